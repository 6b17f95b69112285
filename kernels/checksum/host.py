"""The checksum on the host, in numpy: the same values as the kernels give.

For a CPU device, and for whoever wants to know on the host what lies in a slot. The definition is
in ``reference``. Work goes through buffers that fit in a core's cache.
"""

from collections.abc import Iterator, Sequence
from itertools import accumulate

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
Ints = npt.NDArray[np.int64]
_Words = npt.NDArray[np.uint64]

_STEP = np.uint64(0x9E3779B97F4A7C15)
_FIRST = np.uint64(0xBF58476D1CE4E5B9)
_SECOND = np.uint64(0x94D049BB133111EB)
_BUFFER_WORDS = 1 << 14


def fragment_keys(seeds: Ints, positions: Ints, fragment_bytes: Sequence[int]) -> _Words:
    """The uint64 keys ``[num_entries, num_fragments]`` of every fragment's place.

    ``seeds`` and ``positions`` are int64 ``[num_entries]``, one an entry.
    """
    sizes = np.asarray(fragment_bytes, dtype=np.uint64)
    places = np.arange(sizes.size, dtype=np.uint64) * _STEP
    keys = _mixed(seeds.astype(np.uint64) + positions.astype(np.uint64) * _STEP)
    return _mixed(keys[:, None] + places[None, :]) ^ sizes[None, :]


def fragment_checksums(
    blocks: Bytes, fragment_bytes: Sequence[int], seeds: Ints, positions: Ints
) -> Ints:
    """The checksums, int64 ``[num_entries, num_fragments]``, of blocks in the format of a slot.

    ``blocks`` is uint8 ``[num_entries, block_bytes]``, rows of any stride but contiguous bytes: the
    fragments of a block back to back. ``seeds`` and ``positions`` are int64 ``[num_entries]``.
    Raises ``ValueError`` where the shapes or dtypes do not fit together.
    """
    _check(blocks, fragment_bytes, seeds, positions)
    keys = fragment_keys(seeds, positions, fragment_bytes)
    sums = np.zeros(keys.shape, dtype=np.uint64)
    for first, count, begin, size in _runs(fragment_bytes):
        columns = slice(first, first + count)
        part = blocks[:, begin : begin + count * size]
        # Fragments of one size that follow each other are summed up as rows of one matrix.
        rows = part.reshape(blocks.shape[0] * count, size) if count > 1 else part
        sums[:, columns] = sums_of_rows(rows, keys[:, columns].reshape(-1)).reshape(-1, count)
    return sums.view(np.int64)


def sums_of_rows(rows: Bytes, keys: _Words) -> _Words:
    """The checksums, uint64 ``[num_rows]``, of rows of bytes that have these keys.

    ``rows`` is uint8 ``[num_rows, num_bytes]`` with contiguous bytes; a row is one fragment.
    """
    num_rows, num_bytes = rows.shape
    num_words = num_bytes // 8
    sums = np.zeros(num_rows, dtype=np.uint64)
    words_a_pass = min(max(num_words, 1), _BUFFER_WORDS)
    rows_a_pass = max(1, _BUFFER_WORDS // words_a_pass)
    for top in range(0, num_rows, rows_a_pass):
        band = slice(top, top + rows_a_pass)
        for left in range(0, num_words, words_a_pass):
            right = min(left + words_a_pass, num_words)
            words = _words(rows[band, left * 8 : right * 8])
            sums[band] += _mixed_words(words, keys[band], left).sum(axis=1, dtype=np.uint64)
        if num_bytes % 8:
            tail = np.zeros((rows[band].shape[0], 8), dtype=np.uint8)
            tail[:, : num_bytes % 8] = rows[band, num_words * 8 :]
            sums[band] += _mixed_words(_words(tail), keys[band], num_words)[:, 0]
    return sums


def _mixed_words(words: _Words, keys: _Words, first_word: int) -> _Words:
    counters = np.arange(first_word, first_word + words.shape[1], dtype=np.uint64) * _STEP
    values = keys[:, None] + counters[None, :]
    values ^= words
    return _mixed(values)


def _mixed(values: _Words) -> _Words:
    """``mix`` of every value, in place."""
    shifted = values >> np.uint64(30)
    values ^= shifted
    values *= _FIRST
    np.right_shift(values, np.uint64(27), out=shifted)
    values ^= shifted
    values *= _SECOND
    np.right_shift(values, np.uint64(31), out=shifted)
    values ^= shifted
    return values


def _words(data: Bytes) -> _Words:
    """Bytes ``[rows, 8 * words]`` as little-endian words; copied only where strides force it."""
    return np.ascontiguousarray(data).view("<u8").astype(np.uint64, copy=False)


def _runs(fragment_bytes: Sequence[int]) -> Iterator[tuple[int, int, int, int]]:
    """Runs of fragments of one size: first index, how many, offset in a block, and the size."""
    offsets = [0, *accumulate(fragment_bytes)]
    first = 0
    for index in range(1, len(fragment_bytes) + 1):
        if index == len(fragment_bytes) or fragment_bytes[index] != fragment_bytes[first]:
            yield first, index - first, offsets[first], fragment_bytes[first]
            first = index


def _check(blocks: Bytes, fragment_bytes: Sequence[int], seeds: Ints, positions: Ints) -> None:
    if blocks.dtype != np.uint8 or blocks.ndim != 2 or blocks.shape[1] != sum(fragment_bytes):
        raise ValueError(
            f"blocks must be uint8 [num_entries, {sum(fragment_bytes)}], got "
            f"{blocks.dtype} {blocks.shape}"
        )
    if not fragment_bytes or min(fragment_bytes) < 1:
        raise ValueError(f"fragments need at least one byte each, got {tuple(fragment_bytes)}")
    for name, column in (("seeds", seeds), ("positions", positions)):
        if column.dtype != np.int64 or column.shape != (blocks.shape[0],):
            raise ValueError(
                f"{name} must be int64 [{blocks.shape[0]}], got {column.dtype} {column.shape}"
            )
