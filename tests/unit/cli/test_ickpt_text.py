"""How numbers, sizes and foreign text are shown."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone

import pytest

from incremental_ckpt.cli import text


@pytest.mark.parametrize(
    ("count", "shown"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.0 kB"),
        (999_949, "999.9 kB"),
        (999_950, "1.0 MB"),
        (2_750_000_000, "2.8 GB"),
        (10**18, "1.0 EB"),
        (2 * 10**21, "2,000.0 EB"),
    ],
)
def test_sizes_have_at_most_three_digits_before_the_point(count: int, shown: str) -> None:
    assert text.size(count) == shown


@pytest.mark.parametrize(
    ("numbers", "shown"), [([], ""), ([3], "3"), ([1, 2], "1-2"), ([1, 2, 3, 5, 9, 10], "1-3, 5, 9-10")]
)
def test_neighbours_are_drawn_together(numbers: list[int], shown: str) -> None:
    assert text.ranges(numbers) == shown


def test_a_share_of_nothing_is_no_number() -> None:
    assert (text.share(1, 8), text.share(0, 0)) == ("12.50%", "-")


def test_times_are_shown_in_utc() -> None:
    assert text.time(datetime(2026, 1, 31, 1, 30, tzinfo=timezone(timedelta(hours=2)))) == "2026-01-30 23:30:00"


def test_one_is_singular() -> None:
    assert [text.count(n, "rank") for n in (0, 1, 1200)] == ["0 ranks", "1 rank", "1,200 ranks"]


def test_text_stays_on_its_line_and_keeps_letters_of_all_languages() -> None:
    assert text.printable("Größe 表\n\x1b[1m\x7f\x00\t") == r"Größe 表 \x1b[1m\x7f\x00\t"
