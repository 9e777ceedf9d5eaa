"""Which codec a field's rows are written with."""

from __future__ import annotations

import numpy as np
import pytest
from codec_oracle import DTYPES, LOSSY, ordinary, table

from incremental_ckpt.codecs import codec_for, codec_named, encode_values
from incremental_ckpt.errors import FormatError
from incremental_ckpt.format.rank_facts import CODECS
from incremental_ckpt.model import DTYPE_BYTES, Field


def test_every_codec_of_the_format_is_known_and_no_other() -> None:
    assert {codec_named(name).name for name in CODECS} == CODECS
    with pytest.raises(FormatError, match="int1"):
        codec_named("int1")


@pytest.mark.parametrize("name", LOSSY)
def test_what_is_no_float_is_written_as_it_is(name: str) -> None:
    for dtype in DTYPE_BYTES:
        expected = name if dtype in ("float64", "float32") else None
        chosen = codec_for(name, Field("sum", dtype, 64)).name
        if dtype not in DTYPES:
            assert chosen == "raw"
        elif expected is not None:
            assert chosen == expected


def test_records_are_never_larger_than_rows() -> None:
    chosen = {
        (name, dtype, width): codec_for(name, Field("weight", dtype, width)).name
        for name in LOSSY for dtype in DTYPES for width in (1, 2, 3, 64)
    }  # fmt: skip
    for (name, dtype, width), codec in chosen.items():
        of = Field("weight", dtype, width)
        smaller = codec_named(name).record_bytes(of) < of.row_bytes
        assert codec == (name if smaller else "raw")
    assert chosen["int8", "float32", 1] == "raw"
    assert chosen["fp16", "bfloat16", 64] == "raw"
    assert chosen["int2", "float16", 64] == "int2"


def test_raw_is_taken_where_most_rows_would_lie_beside_their_records() -> None:
    values = ordinary(np.random.default_rng(0), 100, 64)
    values[:30] = np.nan
    rows, of = table(values)
    name, found = encode_values(rows, "int8", of)
    assert (name, found.held is not None) == ("int8", True)
    values[:80] = np.nan
    rows, of = table(values)
    name, found = encode_values(rows, "int8", of)
    assert (name, found.held) == ("raw", None)
    assert np.array_equal(found.records, rows)
