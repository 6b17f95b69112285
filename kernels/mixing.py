# ruff: noqa: N803
# mypy: ignore-errors
"""The word mixing of the checksum, as device code.

The constants and shifts are those of the SplitMix64 finaliser in Stafford's variant 13 (Steele, Lea
and Flood, "Fast splittable pseudorandom number generators", 2014). One multiply would do for
random damage, but lets two sign flips cancel about once in ten million; with two no miss was seen.
"""

import triton
import triton.language as tl

# Above 2^63, so that they are unsigned literals and every shift is a logical one.
STEP = tl.constexpr(0x9E3779B97F4A7C15)
_FIRST = tl.constexpr(0xBF58476D1CE4E5B9)
_SECOND = tl.constexpr(0x94D049BB133111EB)


@triton.jit
def mix(value):
    """A bijection of uint64 values that carries every input bit to every output bit."""
    value = (value ^ (value >> 30)) * _FIRST
    value = (value ^ (value >> 27)) * _SECOND
    return value ^ (value >> 31)


@triton.jit
def place_key(seed, position, fragments, num_bytes):
    """The uint64 key of each fragment's place: seed, position in the chunk, index, and size."""
    key = mix(seed.to(tl.uint64) + position.to(tl.uint64) * STEP)
    return mix(key + fragments.to(tl.uint64) * STEP) ^ num_bytes.to(tl.uint64)


@triton.jit
def as_words(tile, ACCESS_BYTES: tl.constexpr, ROWS: tl.constexpr, ROW_BYTES: tl.constexpr):
    """A tile of narrow elements as little-endian uint64 words ``[ROWS, ROW_BYTES // 8]``."""
    parts: tl.constexpr = 8 // ACCESS_BYTES
    shifts = tl.arange(0, parts) * (8 * ACCESS_BYTES)
    tile = tl.reshape(tile, [ROWS, ROW_BYTES // 8, parts]).to(tl.uint64)
    return tl.sum(tile << shifts[None, None, :].to(tl.uint64), axis=2)
