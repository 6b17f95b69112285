"""The checksum by its definition, word by word, in Python's integers.

The checksum of a fragment is the sum, modulo 2^64, of ``mix(word[i] ^ (key + i * STEP))`` over its
little-endian 8-byte words, the last one filled up with zeros. The key says where the fragment
belongs: ``mix(mix(seed + position * STEP) + index * STEP) ^ num_bytes``. ``mix`` and ``STEP`` are
SplitMix64's (see ``mixing``). Everything is an unsigned 64-bit number; the result is read as a
signed one.
"""

from collections.abc import Sequence

import torch

from ..entries import Entries
from ..table import ChecksumSlots

_MASK = 2**64 - 1
_STEP = 0x9E3779B97F4A7C15
_FIRST = 0xBF58476D1CE4E5B9
_SECOND = 0x94D049BB133111EB


def fragment_checksum(data: bytes, seed: int, position: int, index: int) -> int:
    """The checksum of fragment ``index`` at ``position`` in the chunk with this seed."""
    key = _mix((_mix((seed + position * _STEP) & _MASK) + index * _STEP) & _MASK) ^ len(data)
    total = 0
    for i in range(0, len(data), 8):
        word = int.from_bytes(data[i : i + 8], "little")
        total += _mix(word ^ ((key + i // 8 * _STEP) & _MASK))
    total &= _MASK
    return total - 2**64 if total >= 2**63 else total


def write(views: Sequence[torch.Tensor], entries: Entries, checksums: ChecksumSlots) -> None:
    """Write the checksums of the entries' blocks; ``views`` as in the reference of ``copy``."""
    for block, slot, position, seed in entries.records.tolist():
        for index, view in enumerate(views):
            data = view[block].cpu().numpy().tobytes()
            value = fragment_checksum(data, seed, position, index)
            checksums.values[slot, position * len(views) + index] = value


def verify(
    views: Sequence[torch.Tensor],
    entries: Entries,
    checksums: ChecksumSlots,
    flags: torch.Tensor,
) -> None:
    """Set the flag of every entry of which a fragment does not have its stored checksum."""
    for entry, (block, slot, position, seed) in enumerate(entries.records.tolist()):
        for index, view in enumerate(views):
            data = view[block].cpu().numpy().tobytes()
            value = fragment_checksum(data, seed, position, index)
            if checksums.values[slot, position * len(views) + index] != value:
                flags[entry] = 1


def _mix(value: int) -> int:
    value = ((value ^ (value >> 30)) * _FIRST) & _MASK
    value = ((value ^ (value >> 27)) * _SECOND) & _MASK
    return value ^ (value >> 31)
