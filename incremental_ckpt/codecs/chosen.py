"""The codecs that a caller asks for: by name, or left to the number of restores.

It must not know who writes with them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from incremental_ckpt.codecs.auto import AUTO, AutoCodec
from incremental_ckpt.codecs.base import Codec
from incremental_ckpt.codecs.raw import RAW
from incremental_ckpt.codecs.registry import codec_named

OPTIMIZER_CODECS = frozenset({"raw", "bf16"})
"""Those that lose nothing of an element that is small beside the rest of its row (docs/adr/0010)."""

NOT_FOR_OPTIMIZERS: Mapping[str, str] = dict.fromkeys(
    ("fp16", "int8", "int4", "int3", "int2"),
    "it rounds what is small beside the rest of its row to 0, and where a second moment (Adam's exp_avg_sq) is 0 the "
    "first update after a restore is hundreds of times too large. Use 'bf16', which keeps 8 significant bits of every "
    "element, or 'raw'",
)
"""Known codecs that are refused, and why."""


@dataclass(frozen=True)
class Chosen:
    """Attributes: weight: where ``auto`` does not choose one for each save."""

    weight: Codec
    optimizer: Codec
    auto: AutoCodec | None = None


def chosen_codecs(codec: str | AutoCodec, optimizer_codec: str) -> Chosen:
    """
    Args:
        optimizer_codec: one of OPTIMIZER_CODECS.

    Raises:
        FormatError: a name that this version does not know.
    """
    optimizer = codec_named(optimizer_codec)
    if isinstance(codec, AutoCodec):
        return Chosen(RAW, optimizer, codec)
    return Chosen(RAW, optimizer, AutoCodec()) if codec == AUTO else Chosen(codec_named(codec), optimizer)
