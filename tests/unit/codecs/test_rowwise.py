"""Records of row-wise quantization: their bytes, how good their grids are, and that torch reads them as numpy does."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from codec_oracle import (
    BITS,
    CODECS,
    DTYPES,
    ROWWISE,
    encoded,
    excess,
    field,
    numbers,
    of_any_bits,
    ordinary,
    read_record,
    rows_of_all_kinds,
    table,
)
from torch_records import decode_by_torch, decode_halves_by_torch

from incremental_ckpt.codecs.bits import pack, payload_bytes, unpack
from incremental_ckpt.codecs.grid import GridSearch
from incremental_ckpt.codecs.rowwise import RowwiseCodec
from incremental_ckpt.model import Field

rowwise = pytest.mark.parametrize("codec", ROWWISE)


def error(codec: RowwiseCodec, rows: np.ndarray, of: Field) -> np.ndarray:
    """Squared, per row."""
    off = codec.decode(codec.encode(rows, of).records, of).astype(np.float64) - numbers(rows, of)
    squared: np.ndarray = (off**2).sum(axis=1)
    return squared


@rowwise
def test_records_say_what_the_page_says_that_they_say(codec: str) -> None:
    rng = np.random.default_rng(0)
    for width in (1, 2, 5, 8, 13, 64):
        values = ordinary(rng, 30, width)
        values[:5] = values[:5, :1]
        rows, of = table(values)
        records, held = encoded(codec, rows, of)
        by_page = [read_record(codec, r.tobytes(), width) for r in records[held]]
        assert np.array_equal(
            CODECS[codec].decode(records[held], of), np.array(by_page, dtype=np.float32).reshape(-1, width)
        )


@rowwise
@pytest.mark.parametrize("dtype", DTYPES)
def test_torch_decodes_to_the_bits_that_numpy_decodes_to(codec: str, dtype: str) -> None:
    for width in (1, 2, 3, 7, 9, 64, 100):
        values = ordinary(np.random.default_rng(1), 200, width)
        values[:20] = values[:20, :1]
        values[0] = 0
        rows = np.concatenate([table(values, dtype)[0], rows_of_all_kinds(width, width, dtype)[0]])
        of = field(width, dtype)
        records, held = encoded(codec, rows, of)
        assert held[1:20].any() == (records.shape[1] >= 6)
        by_numpy = torch.from_numpy(CODECS[codec].decode(records[held], of)).to(getattr(torch, dtype))
        by_torch = decode_by_torch(torch.from_numpy(records[held]), BITS[codec], width).to(getattr(torch, dtype))
        assert torch.equal(by_torch.reshape(-1).view(torch.uint8), by_numpy.reshape(-1).view(torch.uint8))


@pytest.mark.parametrize("codec", ["fp16", "bf16"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_torch_decodes_halves_to_the_bits_that_numpy_decodes_to(codec: str, dtype: str) -> None:
    for width in (1, 7, 64):
        of = field(width, dtype)
        rng = np.random.default_rng(1)
        rows = np.concatenate([table(ordinary(rng, 200, width), dtype)[0], of_any_bits(rng, 200, of)])
        records, held = encoded(codec, rows, of)
        by_numpy = torch.from_numpy(CODECS[codec].decode(records[held], of)).to(getattr(torch, dtype))
        by_torch = decode_halves_by_torch(torch.from_numpy(records[held]), codec).to(getattr(torch, dtype))
        assert torch.equal(by_torch.reshape(-1).view(torch.uint8), by_numpy.reshape(-1).view(torch.uint8))


@pytest.mark.parametrize("bits", [8, 4, 3, 2])
def test_codes_come_back_from_their_bits_and_left_over_bits_are_zero(bits: int) -> None:
    rng = np.random.default_rng(2)
    for width in range(1, 35):
        codes = rng.integers(0, 1 << bits, (9, width), dtype=np.uint8)
        packed = np.full((9, payload_bytes(width, bits)), 0xFF, np.uint8)
        pack(codes, bits, packed)
        assert np.array_equal(unpack(packed, bits, width), codes)
        assert [int.from_bytes(p.tobytes(), "little") for p in packed] == [
            sum(int(code) << (i * bits) for i, code in enumerate(row)) for row in codes
        ]


@rowwise
def test_both_ends_of_the_codes_are_used(codec: str) -> None:
    rows, of = table(ordinary(np.random.default_rng(3), 500, 64))
    codes = unpack(encoded(codec, rows, of)[0][:, 4:], BITS[codec], 64)
    assert (codes.min(axis=1) == 0).all()
    assert (codes.max(axis=1) == 2 ** BITS[codec] - 1).all()


@pytest.mark.parametrize("codec", ["int4", "int3", "int2"])
def test_the_search_never_makes_a_row_worse_than_its_span(codec: str) -> None:
    rows, of = table(ordinary(np.random.default_rng(4), 1000, 16))
    spanning = RowwiseCodec("spanning", GridSearch(BITS[codec], shrinks=(), rounds=0))
    found, without = error(CODECS[codec], rows, of), error(spanning, rows, of)  # type: ignore[arg-type]
    assert (found <= without * (1 + 1e-5)).all()
    assert found.sum() < 0.97 * without.sum()


@pytest.mark.parametrize(("codec", "share"), [("int4", 1.0), ("int2", 0.8)])
@pytest.mark.parametrize("kind", ["normal", "uniform", "heavy"])
def test_the_error_is_below_that_of_torchs_greedy_search(codec: str, share: float, kind: str) -> None:
    rng = np.random.default_rng(5)
    values = {
        "normal": rng.standard_normal((400, 64)),
        "uniform": rng.uniform(-1, 1, (400, 64)),
        "heavy": rng.standard_t(3, (400, 64)),
    }[kind].astype(np.float32)
    name = f"embedding_bag_{BITS[codec]}bit"
    packed = getattr(torch.ops.quantized, f"{name}_prepack")(torch.from_numpy(values), True)
    greedy = getattr(torch.ops.quantized, f"{name}_unpack")(packed).numpy() - values
    ours = error(CODECS[codec], *table(values))  # type: ignore[arg-type]
    assert np.sqrt(ours.sum()) <= share * np.sqrt((greedy.astype(np.float64) ** 2).sum())


def test_int8_is_as_exact_as_its_step_allows() -> None:
    rows, of = table(ordinary(np.random.default_rng(6), 2000, 64))
    records, _ = encoded("int8", rows, of)
    assert 0.9 < excess("int8", rows, records, of).max() <= 1


def test_a_row_too_short_to_carry_its_constant_is_not_held_but_never_wrong() -> None:
    of = field(2)
    rows = np.array([[0.1, 0.1], [0.1, 0.2]], np.float32).view(np.uint8)
    records, held = encoded("int2", rows, of)
    assert held.tolist() == [False, True]
    assert records.shape == (2, 5)
