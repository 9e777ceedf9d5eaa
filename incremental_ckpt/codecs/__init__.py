"""Rows to records of fixed size and back. A codec is known by its name in an entry.

It must not know tables, packs or stores; its numpy side must not import torch.
"""

from __future__ import annotations

from incremental_ckpt.codecs.auto import AutoCodec
from incremental_ckpt.codecs.base import Codec, Encoded
from incremental_ckpt.codecs.chosen import Chosen, chosen_codecs
from incremental_ckpt.codecs.registry import codec_for, codec_named, decode_records, encode_values

__all__ = [
    "AutoCodec",
    "Chosen",
    "Codec",
    "Encoded",
    "chosen_codecs",
    "codec_for",
    "codec_named",
    "decode_records",
    "encode_values",
]
