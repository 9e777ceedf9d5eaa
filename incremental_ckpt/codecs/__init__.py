"""Rows to records of fixed size and back. A codec is known by its name in an entry.

It must not know tables, packs or stores; its numpy side must not import torch.
"""

from __future__ import annotations

from incremental_ckpt.codecs.base import Codec, codec_named, decode_records

__all__ = ["Codec", "codec_named", "decode_records"]
