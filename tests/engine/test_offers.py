"""A threshold of offers before a chunk is stored."""

import pytest
from kvferry.engine.offers import OfferCounter
from kvferry.engine.types import GroupId, Key

A, B, C = (Key(name) for name in (b"a", b"b", b"c"))
FIRST, SECOND = GroupId(0), GroupId(1)


def test_a_chunk_passes_when_it_is_offered_often_enough() -> None:
    offers = OfferCounter(3, 10)
    assert offers.passing(FIRST, [A, B]) == []
    assert offers.passing(FIRST, [A]) == []
    assert offers.passing(FIRST, [A, B]) == [A]
    assert offers.passing(FIRST, [A, B]) == [A, B]


def test_groups_are_counted_apart() -> None:
    offers = OfferCounter(2, 10)
    assert offers.passing(FIRST, [A]) == []
    assert offers.passing(SECOND, [A]) == []
    assert offers.passing(FIRST, [A]) == [A]


def test_only_the_chunks_offered_last_are_remembered() -> None:
    offers = OfferCounter(2, 2)
    offers.passing(FIRST, [A, B, C])
    assert len(offers) == 2
    assert offers.passing(FIRST, [A]) == []
    assert offers.passing(FIRST, [C]) == [C]


def test_a_threshold_of_one_remembers_nothing() -> None:
    offers = OfferCounter(1, 10)
    assert offers.passing(FIRST, [A, B]) == [A, B]
    assert len(offers) == 0


@pytest.mark.parametrize(("threshold", "max_keys"), [(0, 1), (1, 0)])
def test_sizes_below_one_are_refused(threshold: int, max_keys: int) -> None:
    with pytest.raises(ValueError, match="allowed: from 1"):
        OfferCounter(threshold, max_keys)
