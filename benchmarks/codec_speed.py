"""Measures codecs against FBGEMM's quantization ops and PyTorch's greedy search, on the same rows in the same run.

CPU seconds of one thread, in turn. It must not know checkpoints.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from rows import Row, Target, ratio_row  # noqa: E402 - the path comes first
from timing import rounds_of  # noqa: E402

from incremental_ckpt.codecs import codec_named  # noqa: E402
from incremental_ckpt.codecs.compiled import SPAN_LOOP, SpanLoop  # noqa: E402
from incremental_ckpt.codecs.grid import GridSearch  # noqa: E402
from incremental_ckpt.codecs.rowwise import RowwiseCodec, rowwise_codec  # noqa: E402
from incremental_ckpt.format.rowset import encode_rows  # noqa: E402
from incremental_ckpt.model import Field  # noqa: E402
from incremental_ckpt.settings import Settings  # noqa: E402
from incremental_ckpt.snapshot import rows_per_entry  # noqa: E402

NAMES = ("fp16", "bf16", "int8", "int4", "int3", "int2")
BITS = {"int8": 8, "int4": 4, "int3": 3, "int2": 2}
MOST_BYTES = {"int8": 76, "int4": 44, "int2": 28}
ADAGRAD_BYTES = 4


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--greedy-rows", type=int, default=2048, help="for what is compared with the greedy search")
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--out", type=Path, default=HERE / "results" / "codecs.json")
    arguments = parser.parse_args(argv)
    rows = [*speed(arguments), *errors(arguments), *sizes(arguments)]
    for row in rows:
        print(f"  {row.ratio:8.3f}  {row.what}", flush=True)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(_result(arguments, rows), indent=1) + "\n")
    return 0


def _result(arguments: argparse.Namespace, rows: list[Row]) -> dict[str, Any]:
    from conditions import conditions

    facts = conditions(Path(tempfile.gettempdir())) | {"rows": arguments.rows, "dim": arguments.dim, "threads": 1}
    facts["compiled_loop"] = SPAN_LOOP is not None
    return {
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "conditions": facts,
        "rows": [row.as_json() for row in rows],
    }


def table(kind: str, rows: int, dim: int) -> np.ndarray:
    rng = np.random.default_rng(0)
    values = {
        "normal": lambda: rng.standard_normal((rows, dim)),
        "uniform": lambda: rng.uniform(-1, 1, (rows, dim)),
        "heavy-tailed": lambda: rng.standard_t(3, (rows, dim)),
    }[kind]()
    return (values * 0.05).astype(np.float32)


def speed(arguments: argparse.Namespace) -> list[Row]:
    import fbgemm_gpu  # noqa: F401 - registers the ops
    import torch

    torch.set_num_threads(1)
    values = table("normal", arguments.rows, arguments.dim)
    few = np.ascontiguousarray(values[: arguments.greedy_rows])
    tensor, few_tensor = torch.from_numpy(values), torch.from_numpy(few)
    fbgemm, torch_ops = torch.ops.fbgemm, torch.ops.quantized
    found = [
        _speed_row("encode int8", "FBGEMM", encoder(codec_named("int8"), values),
                   lambda: fbgemm.FloatToFused8BitRowwiseQuantized(tensor), values, arguments, 0.7),
        _speed_row("encode int4 without a search", "FBGEMM", encoder(_without_a_search(SPAN_LOOP), values),
                   lambda: fbgemm.FloatToFusedNBitRowwiseQuantizedSBHalf(tensor, 4), values, arguments, 0.7),
        _speed_row("encode int4", "PyTorch's greedy search", encoder(codec_named("int4"), few),
                   lambda: torch_ops.embedding_bag_4bit_prepack(few_tensor, True), few, arguments, 10),
        _speed_row("encode int2", "PyTorch's greedy search", encoder(codec_named("int2"), few),
                   lambda: torch_ops.embedding_bag_2bit_prepack(few_tensor, True), few, arguments, 10),
    ]  # fmt: skip
    return [*found, *decoding(values, arguments)]


def decoding(values: np.ndarray, arguments: argparse.Namespace) -> list[Row]:
    """Against the codec's own encoder, both entry by entry as saves and restores call them. All rows in one call are
    shown beside it without a target: there the kernel clears memory for a whole decoded table."""
    field, found = Field("weight", "float32", arguments.dim), []
    entry = rows_per_entry([field.row_bytes], Settings().entry_bytes)
    for what, codec in _ways_to_decode().items():
        records = codec.encode(values.view(np.uint8), field).records
        for rows, how, least in ((entry, "", 1), (len(values), ", in one call", None)):
            found.append(
                _speed_row(f"decode {what}{how}", "its encoder",
                           in_calls(lambda part, c=codec: c.decode(part, field), records, rows),
                           in_calls(lambda part, c=codec: c.encode(part, field), values.view(np.uint8), rows),
                           values, arguments, least, rows_per_call=min(rows, len(values)))
            )  # fmt: skip
    return found


def in_calls(action: Callable[[np.ndarray], object], rows: np.ndarray, rows_per_call: int) -> Callable[[], None]:
    def play() -> None:
        for start in range(0, len(rows), rows_per_call):
            action(rows[start : start + rows_per_call])

    return play


def _ways_to_decode() -> dict[str, Any]:
    loops = {"by the compiled loop": SPAN_LOOP, "by numpy": None} if SPAN_LOOP else {"by numpy": None}
    rowwise = {f"{name} {by}": rowwise_codec(bits, loop) for by, loop in loops.items() for name, bits in BITS.items()}
    spanning = {f"int4 without a search {by}": _without_a_search(loop) for by, loop in loops.items()}
    return {name: codec_named(name) for name in NAMES if name not in BITS} | rowwise | spanning


def _without_a_search(loop: SpanLoop | None) -> RowwiseCodec:
    return RowwiseCodec("int4 without a search", GridSearch(4, shrinks=(), rounds=0), loop)


def encoder(codec: Any, values: np.ndarray) -> Callable[[], object]:
    field = Field("weight", "float32", values.shape[1])
    return lambda: codec.encode(values.view(np.uint8), field)


def _speed_row(
    what: str,
    peer: str,
    ours: Callable[[], object],
    theirs: Callable[[], object],
    values: np.ndarray,
    arguments: argparse.Namespace,
    least: float | None,
    **details: int,
) -> Row:
    ours(), theirs()
    rounds = rounds_of(lambda: (_cpu_seconds(theirs), _cpu_seconds(ours)), arguments.repeats, 60)
    return ratio_row(
        "codecs: speed", f"{what}: speed / {peer}", rounds, None if least is None else Target("at least", least),
        bytes_per_second=values.nbytes / float(np.median([r[1] for r in rounds])),
        nanoseconds_per_row=1e9 * float(np.median([r[1] for r in rounds])) / len(values),
        peer_nanoseconds_per_row=1e9 * float(np.median([r[0] for r in rounds])) / len(values), **details,
    )  # fmt: skip


def _cpu_seconds(action: Callable[[], object]) -> float:
    begun = time.thread_time()
    action()
    return time.thread_time() - begun


def errors(arguments: argparse.Namespace) -> list[Row]:
    """Root mean square over all elements; at 3 bits, which PyTorch lacks, and 8 against quantizing the span alone."""
    import torch

    field, found = Field("weight", "float32", arguments.dim), []
    targets = {"int4": Target("at most", 1.0), "int2": Target("at most", 0.8)}
    for kind in ("normal", "uniform", "heavy-tailed"):
        values = table(kind, arguments.greedy_rows, arguments.dim)
        for name, bits in BITS.items():
            codec: Any = codec_named(name)
            error = _error(codec.decode(codec.encode(values.view(np.uint8), field).records, field), values)
            if name in targets:
                ops, of = torch.ops.quantized, f"embedding_bag_{bits}bit"
                packed = getattr(ops, f"{of}_prepack")(torch.from_numpy(values), True)
                peer, other = "PyTorch's greedy search", getattr(ops, f"{of}_unpack")(packed).numpy()
            else:
                span = RowwiseCodec("span", GridSearch(bits, shrinks=(), rounds=0))
                peer, other = "the span alone", span.decode(span.encode(values.view(np.uint8), field).records, field)
            found.append(
                ratio_row(
                    "codecs: error",
                    f"{name}, {kind} rows: error / {peer}",
                    [(error, _error(other, values))],
                    targets.get(name),
                    error_per_deviation=error / float(values.std()),
                )
            )
    return found


def _error(decoded: np.ndarray, values: np.ndarray) -> float:
    return float(np.sqrt(np.mean((decoded.astype(np.float64) - values) ** 2)))


def sizes(arguments: argparse.Namespace) -> list[Row]:
    """Of a delta with 2 % of a million rows: record, row ids and row-wise Adagrad, against float32."""
    ids = np.flatnonzero(np.random.default_rng(0).random(1_000_000) < 0.02)
    index = len(encode_rows(ids)) / len(ids)
    field = Field("weight", "float32", arguments.dim)
    raw = field.row_bytes + ADAGRAD_BYTES + index
    found = []
    for name in NAMES:
        bytes_per_row = codec_named(name).record_bytes(field) + ADAGRAD_BYTES + index
        most = MOST_BYTES.get(name) if arguments.dim == 64 else None
        found.append(
            ratio_row(
                "codecs: bytes",
                f"{name}: bytes per row / raw",
                [(bytes_per_row, raw)],
                Target("at most", most / raw) if most else None,
                per_row=bytes_per_row,
            )
        )
    return found


if __name__ == "__main__":
    raise SystemExit(main())
