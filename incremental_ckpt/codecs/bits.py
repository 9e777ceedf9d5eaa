"""Codes of 8, 4, 3 or 2 bits in bytes: code i of a row takes bits i x b to (i + 1) x b, the lowest bits first.

It must not know what the codes stand for.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Codes = npt.NDArray[np.uint8]


def payload_bytes(width: int, bits: int) -> int:
    return (width * bits + 7) // 8


def pack(codes: Codes, bits: int, into: Codes) -> None:
    """Args: codes: ``[n, width]``, each below 2^bits. into: ``[n, payload_bytes]``; the bits left over become 0."""
    if bits == 8:
        into[...] = codes
        return
    per_word = 8 if bits == 3 else 8 // bits
    words = _words(codes, per_word)
    if bits == 3:
        packed = np.bitwise_or.reduce([((words >> (8 * i)) & 7) << (3 * i) for i in range(8)])
        packed = packed.astype("<u8", copy=False)
        into[...] = packed.view(np.uint8).reshape(*packed.shape, 8)[..., :3].reshape(len(codes), -1)[:, : into.shape[1]]
    elif bits == 4:
        pairs = words >> 4
        pairs |= words
        np.copyto(into, pairs, casting="unsafe")
    else:
        np.copyto(into, words | (words >> 6) | (words >> 12) | (words >> 18), casting="unsafe")


def unpack(packed: Codes, bits: int, width: int) -> Codes:
    """Args: packed: ``[n, payload_bytes]``. Returns: ``[n, width]``, of its own memory unless 8 bits."""
    if bits == 8:
        return packed
    if bits == 3:
        words = _apart(_triples(packed, -(-width // 8)))
    elif bits == 4:
        words = packed.astype("<u2")
        words |= words << 4
        words &= 0x0F0F
    else:
        words = packed.astype("<u4")
        words |= words << 12
        words &= 0x000F000F
        words |= words << 6
        words &= 0x03030303
    codes: Codes = words.reshape(len(packed), words.size // max(1, len(packed))).view(np.uint8)
    return codes[:, :width]


def _triples(packed: Codes, groups: int) -> np.ndarray:
    """Three bytes, which are eight codes, in one little-endian integer. Missing bytes at the end of a row are 0."""
    rows, size = packed.shape
    if size % 3:
        padded = np.zeros((rows, 3 * groups), dtype=np.uint8)
        padded[:, :size] = packed
        packed = padded
    words = np.zeros((rows, groups), dtype="<u8")
    words.view(np.uint8).reshape(rows, groups, 8)[..., :3] = packed.reshape(rows, groups, 3)
    return words


def _apart(words: np.ndarray) -> np.ndarray:
    """Eight codes of three bits to a byte each: first the halves move apart, then the quarters, then the eighths."""
    for bits, mask in ((12, 0xFFF), (6, 0x3F0000003F), (3, 0x7000700070007)):
        words = (words & mask) | ((words >> bits) & mask) << (8 * bits // 3)
    return words.astype("<u8", copy=False)


def _words(codes: Codes, per_word: int) -> np.ndarray:
    """As many codes as make up whole bytes in one little-endian integer, the first in its lowest byte."""
    rows, width = codes.shape
    if width % per_word:
        padded = np.zeros((rows, -(-width // per_word) * per_word), dtype=np.uint8)
        padded[:, :width] = codes
        codes = padded
    return np.ascontiguousarray(codes).view(f"<u{per_word}")
