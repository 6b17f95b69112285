"""The checksum on the host: its values, and a million random damages of each kind, none missed."""

import numpy as np
import pytest
from kvferry.kernels.checksum.host import fragment_checksums, fragment_keys, sums_of_rows
from kvferry.kernels.checksum.reference import fragment_checksum

NUM_TRIALS = 1_000_000
TRIALS_A_PASS = 50_000
NUM_WORDS = 6
SEED = 41


def generator():
    print(f"seed {SEED}")
    return np.random.default_rng(SEED)


def sums(words, keys):
    """Checksums of rows of words, uint64 ``[num_rows, num_words]``."""
    return sums_of_rows(words.view(np.uint8), keys)


def contents(random, num_rows, kind):
    """Rows of words as caches hold them: any bits, nothing but zeros, or one word repeated."""
    if kind == "zeros":
        return np.zeros((num_rows, NUM_WORDS), dtype=np.uint64)
    words = random.integers(0, 2**64, (num_rows, NUM_WORDS), dtype=np.uint64)
    return np.repeat(words[:, :1], NUM_WORDS, axis=1) if kind == "repeated" else words


def count_missed(damage, kind="random"):
    """How many of a million damaged rows have the checksum of the whole ones.

    ``damage(random, words)`` gives the damaged words; rows that it left as they were do not count.
    """
    random = generator()
    missed = 0
    for _ in range(NUM_TRIALS // TRIALS_A_PASS):
        words = contents(random, TRIALS_A_PASS, kind)
        keys = random.integers(0, 2**64, TRIALS_A_PASS, dtype=np.uint64)
        damaged = damage(random, words)
        changed = (damaged != words).any(axis=1)
        assert changed.any()
        missed += int(((sums(damaged, keys) == sums(words, keys)) & changed).sum())
    return missed


def flip(words, rows, bits):
    """Turns one bit a row over: bit number ``bits[row]`` of the row."""
    words[rows, bits // 64] ^= np.uint64(1) << (bits % 64).astype(np.uint64)


@pytest.mark.parametrize("kind", ["random", "zeros"])
@pytest.mark.parametrize("num_bits", [1, 2])
def test_no_flip_of_one_or_two_bits_is_missed(num_bits, kind):
    def damage(random, words):
        damaged = words.copy()
        rows = np.arange(len(words))
        for _ in range(num_bits):
            flip(damaged, rows, random.integers(0, NUM_WORDS * 64, len(words)))
        return damaged

    assert count_missed(damage, kind) == 0


def test_no_two_sign_flips_are_missed():
    """The damage that one multiply a word lets pass: two top bits of 16-bit numbers."""

    def damage(random, words):
        damaged = words.copy()
        rows = np.arange(len(words))
        for _ in range(2):
            number = random.integers(0, NUM_WORDS * 4, len(words))
            flip(damaged, rows, number * 16 + 15)
        return damaged

    assert count_missed(damage) == 0


def test_no_swap_of_words_is_missed():
    def damage(random, words):
        damaged = words.copy()
        rows = np.arange(len(words))
        one, other = (random.integers(0, NUM_WORDS, len(words)) for _ in range(2))
        damaged[rows, one], damaged[rows, other] = words[rows, other], words[rows, one]
        return damaged

    assert count_missed(damage) == 0


@pytest.mark.parametrize("num_bytes", [1, 4, 8, 16])
def test_no_shifted_copy_is_missed(num_bytes):
    def damage(random, words):
        return np.roll(words.view(np.uint8), num_bytes, axis=1).view(np.uint64)

    assert count_missed(damage) == 0


def test_no_swap_of_fragments_is_missed():
    """Two fragments of one block, or of two positions of a chunk, exchange their bytes."""
    random = generator()
    missed = 0
    for _ in range(NUM_TRIALS // TRIALS_A_PASS):
        one, other = (contents(random, TRIALS_A_PASS, "random") for _ in range(2))
        seeds = random.integers(-(2**63), 2**63 - 1, TRIALS_A_PASS)
        positions = random.integers(0, 2, TRIALS_A_PASS)
        here = fragment_keys(seeds, positions, [8 * NUM_WORDS] * 2)
        there = fragment_keys(seeds, 1 - positions, [8 * NUM_WORDS] * 2)
        for mine, theirs in ((here[:, 0], here[:, 1]), (here[:, 0], there[:, 0])):
            missed += int((sums(one, mine) == sums(other, mine)).sum())
            missed += int((sums(one, mine) == sums(one, theirs)).sum())
    assert missed == 0


def test_every_block_has_a_key_of_its_own():
    random = generator()
    seeds = random.integers(-(2**63), 2**63 - 1, 500)
    keys = np.concatenate(
        [fragment_keys(seeds, np.full(500, p), [64] * 60).ravel() for p in range(8)]
    )
    assert len(np.unique(keys)) == keys.size


@pytest.mark.parametrize(
    "sizes",
    [[1], [7, 8, 9], [16] * 5, [13, 13, 64, 64, 64, 1], [300_000, 40], [131_072 + 5] * 2],
    ids=str,
)
def test_values_are_those_of_the_definition(sizes):
    random = generator()
    blocks = random.integers(0, 256, (3, sum(sizes)), dtype=np.uint8)
    seeds = random.integers(-(2**63), 2**63 - 1, 3)
    positions = np.array([0, 3, 1])
    got = fragment_checksums(blocks, sizes, seeds, positions)
    ends = np.cumsum(sizes)
    for entry in range(3):
        for index, (end, size) in enumerate(zip(ends, sizes, strict=True)):
            data = blocks[entry, end - size : end].tobytes()
            want = fragment_checksum(data, int(seeds[entry]), int(positions[entry]), index)
            assert got[entry, index] == want


def test_blocks_may_lie_apart():
    """Rows of a slot memory are strided: the bytes between them do not count."""
    random = generator()
    memory = random.integers(0, 256, (4, 100), dtype=np.uint8)
    seeds, positions = np.arange(4), np.zeros(4, dtype=np.int64)
    got = fragment_checksums(memory[:, :72], [24, 24, 24], seeds, positions)
    want = fragment_checksums(memory[:, :72].copy(), [24, 24, 24], seeds, positions)
    assert (got == want).all()


def test_padding_is_not_the_same_as_zeros():
    """A fragment of 13 bytes and one of 16 that ends in zeros differ."""
    data = np.arange(16, dtype=np.uint8)[None] % 13
    column = np.zeros(1, dtype=np.int64)
    short = fragment_checksums(data[:, :13].copy(), [13], column, column)
    full = np.zeros((1, 16), dtype=np.uint8)
    full[:, :13] = data[:, :13]
    assert short != fragment_checksums(full, [16], column, column)


def test_wrong_input_is_refused():
    block = np.zeros((2, 8), dtype=np.uint8)
    column = np.zeros(2, dtype=np.int64)
    for arguments, message in (
        ((block, [9], column, column), r"uint8 \[num_entries, 9\], got uint8 \(2, 8\)"),
        ((block.view(np.int8), [8], column, column), "got int8"),
        ((block, [8, 0], column, column), "at least one byte each"),
        ((block, [8], column[:1], column), "seeds must be int64"),
        ((block, [8], column, column.astype(np.int32)), "positions must be int64"),
    ):
        with pytest.raises(ValueError, match=message):
            fragment_checksums(*arguments)
