"""The golden records: today's decoder reads from them the rows that were read when they were written."""

from __future__ import annotations

import numpy as np
import pytest
from generate_codecs import FIELDS, GOLDEN, NAMES, encoded, name_of

from incremental_ckpt.codecs import codec_named
from incremental_ckpt.codecs.values import bytes_of
from incremental_ckpt.model import Field

cases = pytest.mark.parametrize(
    ("codec", "field"), [pytest.param(c, f, id=f"{c}-{f.dtype}-{f.width}") for f in FIELDS for c in NAMES]
)


def stored(codec: str, field: Field, what: str) -> np.ndarray:
    with np.load(GOLDEN / f"{codec}.npz") as arrays:
        found: np.ndarray = arrays[name_of(field, what)]
    return found


@cases
def test_stored_records_decode_to_the_stored_rows(codec: str, field: Field) -> None:
    kept = bytes_of(codec_named(codec).decode(stored(codec, field, "records"), field), field)
    assert np.array_equal(kept, stored(codec, field, "rows"))


@cases
def test_the_same_rows_still_encode_to_the_stored_records(codec: str, field: Field) -> None:
    records, held = encoded(codec, field)
    assert np.array_equal(records, stored(codec, field, "records"))
    assert np.array_equal(held, stored(codec, field, "held"))


def test_the_stored_rows_hold_and_refuse_what_they_are_there_to_show() -> None:
    held = stored("int4", FIELDS[0], "held")
    assert np.flatnonzero(~held).tolist() == [20, 21, 22, 23]
