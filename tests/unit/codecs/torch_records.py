"""Decodes records with torch, as a device would."""

from __future__ import annotations

import torch


def decode_by_torch(records: torch.Tensor, bits: int, width: int) -> torch.Tensor:
    """Row-wise quantization: ``uint8 [n, record]`` to float32 ``[n, width]``."""
    header = records[:, :4].to(torch.int32)
    step = (((header[:, 0] | (header[:, 1] << 8)) << 14) + (31 << 23)).view(torch.float32)
    offset = header[:, 2] | (header[:, 3] << 8)
    offset = torch.where(offset >= 1 << 15, offset - (1 << 16), offset).float() * 2.0 ** (bits - 9)
    places = torch.arange(width) * bits
    payload = torch.nn.functional.pad(records[:, 4:].to(torch.int32), (0, 1))
    pairs = payload[:, places // 8] | (payload[:, places // 8 + 1] << 8)
    codes = (pairs >> (places % 8)) & ((1 << bits) - 1)
    values = (codes.float() + offset[:, None]) * step[:, None]
    constant = (header[:, 0] | header[:, 1]) == 0
    if records.shape[1] >= 6:
        values[constant] = records[constant, 2:6].contiguous().view(torch.float32)
    return values


def decode_halves_by_torch(records: torch.Tensor, codec: str) -> torch.Tensor:
    """``fp16`` or ``bf16``: ``uint8 [n, 2 x width]`` to float32 ``[n, width]``."""
    return records.contiguous().view(torch.float16 if codec == "fp16" else torch.bfloat16).float()
