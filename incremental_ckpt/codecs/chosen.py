"""The codecs that a caller asks for: by name, or left to the number of restores.

It must not know who writes with them.
"""

from __future__ import annotations

from dataclasses import dataclass

from incremental_ckpt.codecs.auto import AUTO, AutoCodec
from incremental_ckpt.codecs.base import Codec
from incremental_ckpt.codecs.raw import RAW
from incremental_ckpt.codecs.registry import codec_named


@dataclass(frozen=True)
class Chosen:
    """Attributes: weight: where ``auto`` does not choose one for each save."""

    weight: Codec
    optimizer: Codec
    auto: AutoCodec | None = None


def chosen_codecs(codec: str | AutoCodec, optimizer_codec: str) -> Chosen:
    """
    Raises:
        FormatError: a name that this version does not know.
        ValueError: ``auto`` for the optimizer's fields.
    """
    if optimizer_codec == AUTO:
        raise ValueError("optimizer_codec takes a codec by name, such as 'raw' or 'bf16'; 'auto' is for weights only")
    optimizer = codec_named(optimizer_codec)
    if isinstance(codec, AutoCodec):
        return Chosen(RAW, optimizer, codec)
    return Chosen(RAW, optimizer, AutoCodec()) if codec == AUTO else Chosen(codec_named(codec), optimizer)
