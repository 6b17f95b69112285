"""The rules of the KV cache groups, against definitions written out token by token."""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from kvferry.engine.rules import GroupKind, GroupRule, Hit, boundary_of, longest_hit
from kvferry.engine.types import GroupId

G0 = GroupId(0)
ABSENT, WRITING, READABLE = 0, 1, 2


@dataclass
class View:
    """A request's chunks as a list of states."""

    states: Sequence[int]

    @property
    def num_chunks(self) -> int:
        return len(self.states)

    def there(self, chunk: int, pending: bool) -> bool:
        if not 0 <= chunk < len(self.states):
            raise IndexError(f"chunk {chunk} of {len(self.states)}")
        return self.states[chunk] == READABLE or (pending and self.states[chunk] == WRITING)

    def leading(self, first: int, last: int, *, pending: bool) -> int:
        count = 0
        while first + count < last and self.there(first + count, pending):
            count += 1
        return count

    def trailing(self, first: int, last: int, *, pending: bool) -> int:
        count = 0
        while last - count > first and self.there(last - 1 - count, pending):
            count += 1
        return count


def full(chunk_tokens: int = 16, draft: bool = False) -> GroupRule:
    return GroupRule(G0, GroupKind.FULL, chunk_tokens, draft=draft)


def window(window_tokens: int, chunk_tokens: int = 16, **more: int) -> GroupRule:
    return GroupRule(G0, GroupKind.WINDOW, chunk_tokens, window_tokens, **more)


def local(window_tokens: int, chunk_tokens: int = 16) -> GroupRule:
    return GroupRule(G0, GroupKind.LOCAL, chunk_tokens, window_tokens)


def looks_back_at(rule: GroupRule, token: int, num_tokens: int) -> bool:
    """Whether computing from ``num_tokens`` on may read ``token``; by definition."""
    match rule.kind:
        case GroupKind.FULL:
            return True
        case GroupKind.RECURRENT:
            return token == num_tokens - 1
        case GroupKind.LOCAL:
            assert rule.window_tokens is not None
            return token // rule.window_tokens == num_tokens // rule.window_tokens
        case GroupKind.WINDOW:
            assert rule.window_tokens is not None
            return any(
                reader - rule.window_tokens < token <= reader
                for reader in range(num_tokens - rule.retained_tokens, num_tokens + 1)
            )


def serves(rule: GroupRule, view: View, start: int, hit: int, pending: bool) -> bool:
    """Whether the group has all that a hit of ``hit`` tokens needs beyond ``start``."""
    needed = {
        token // rule.chunk_tokens for token in range(start, hit) if looks_back_at(rule, token, hit)
    }
    if rule.draft:
        needed.add(hit // rule.chunk_tokens)
    return all(chunk < view.num_chunks and view.there(chunk, pending) for chunk in needed)


def longest(
    rules: Sequence[GroupRule], views: Sequence[View], start: int, limit: int, pending: bool
) -> int:
    boundary = boundary_of(rules)
    for hit in range(limit // boundary * boundary, start, -boundary):
        if all(serves(r, v, start, hit, pending) for r, v in zip(rules, views, strict=True)):
            return hit
    return start


def random_rule(rng: random.Random) -> GroupRule:
    kind = rng.choice(list(GroupKind))
    size = rng.choice([4, 8, 16])
    windowed = kind in (GroupKind.WINDOW, GroupKind.LOCAL)
    return GroupRule(
        G0,
        kind,
        size,
        rng.choice([1, 4, 7, 16, 24, 40]) if windowed else None,
        rng.choice([0, 0, 3]) if kind is GroupKind.WINDOW else 0,
        draft=rng.random() < 0.2,
    )


@pytest.mark.parametrize("seed", range(200))
def test_longest_hit_against_its_definition(seed: int) -> None:
    print(f"seed {seed}")
    rng = random.Random(seed)
    for _ in range(20):
        rules = [random_rule(rng) for _ in range(rng.randint(1, 4))]
        num_tokens = rng.randint(1, 200)
        gaps = rng.choice([0.0, 0.05, 0.3])
        views = []
        for rule in rules:
            weights = [gaps, gaps, 1 - gaps]
            chunks = num_tokens // rule.chunk_tokens
            views.append(View(rng.choices([ABSENT, WRITING, READABLE], weights, k=chunks)))
        boundary = boundary_of(rules)
        start = rng.choice([0, boundary, rng.randint(0, num_tokens)])
        limit = rng.choice([num_tokens - 1, rng.randint(0, num_tokens - 1)])
        expected = Hit(
            longest(rules, views, start, limit, pending=False),
            longest(rules, views, start, limit, pending=True),
        )
        assert longest_hit(rules, views, start, limit) == expected, (rules, views, start, limit)
        assert expected.pending == (expected.pending_tokens > expected.ready_tokens)


@pytest.mark.parametrize("seed", range(50))
def test_needed_and_worth_storing_against_their_definitions(seed: int) -> None:
    print(f"seed {seed}")
    rng = random.Random(seed)
    for _ in range(10):
        rule = random_rule(rng)
        boundary = rule.chunk_tokens * rng.choice([1, 2, 4, 8])
        boundaries = range(boundary, 640, boundary)
        wanted = set()
        for hit in boundaries:
            tokens = [t for t in range(hit) if looks_back_at(rule, t, hit)]
            needed = sorted({token // rule.chunk_tokens for token in tokens})
            assert list(rule.needed_chunks(0, hit)) == needed, (rule, hit)
            wanted |= set(needed) | ({hit // rule.chunk_tokens} if rule.draft else set())
        for chunk in range(320 // rule.chunk_tokens):
            assert rule.worth_storing(chunk, boundary) == (chunk in wanted), (rule, chunk, boundary)


def test_a_window_needs_only_its_tail() -> None:
    rule = window(33)
    assert rule.needed_chunks(0, 160) == range(8, 10)
    assert rule.needed_chunks(144, 160) == range(9, 10)
    view = View([ABSENT] * 8 + [READABLE] * 2)
    assert longest_hit([rule], [view], 0, 170) == Hit(160, 160)
    assert longest_hit([full()], [view], 0, 170) == Hit(0, 0)


def test_a_window_with_its_tail_missing_serves_a_shorter_hit() -> None:
    view = View([READABLE] * 6 + [ABSENT] + [READABLE] * 3)
    assert longest_hit([window(65)], [view], 0, 170) == Hit(96, 96)
    assert longest_hit([window(33)], [view], 0, 170) == Hit(160, 160)


def test_local_attention_needs_nothing_at_the_start_of_its_chunk() -> None:
    view = View([ABSENT] * 4)
    assert longest_hit([local(64)], [view], 0, 70) == Hit(64, 64)
    assert longest_hit([full(), local(64)], [View([READABLE] * 4), view], 0, 60) == Hit(0, 0)


def test_groups_shorten_each_other_until_stable() -> None:
    """The window's answer shortens the full group's, and that again the window's."""
    rules = [full(32), window(33)]
    views = [View([READABLE] * 4), View([READABLE] * 2 + [ABSENT] * 3 + [READABLE] * 3)]
    assert boundary_of(rules) == 32
    assert longest_hit(rules, views, 0, 127) == Hit(32, 32)


def test_what_is_being_written_is_told_from_what_is_absent() -> None:
    view = View([READABLE, READABLE, WRITING, READABLE, ABSENT])
    hit = longest_hit([full()], [view], 0, 100)
    assert hit == Hit(32, 64)
    assert hit.pending
    assert not longest_hit([full()], [View([READABLE, ABSENT, WRITING])], 0, 100).pending


def test_a_draft_group_gives_up_its_last_chunk_and_keeps_the_others() -> None:
    views = [View([READABLE] * 5), View([READABLE] * 4)]
    assert longest_hit([full(), full(draft=True)], views, 0, 90) == Hit(48, 48)
    draft = full(draft=True)
    assert [draft.storable_chunks(n, decoding=True) for n in (0, 15, 16, 40, 48)] == [0, 0, 0, 1, 2]
    assert draft.storable_chunks(48, decoding=False) == 3
    assert full().storable_chunks(48, decoding=True) == 3


def test_limits_shorten_to_a_boundary() -> None:
    views = [View([READABLE] * 8), View([READABLE] * 2)]
    rules = [full(16), full(64)]
    assert boundary_of(rules) == math.lcm(16, 64)
    assert longest_hit(rules, views, 0, 127) == Hit(64, 64)
    assert longest_hit(rules, views, 0, 128) == Hit(128, 128)
    assert longest_hit(rules, views, 64, 127) == Hit(64, 64)
    assert longest_hit(rules, views, 50, 60) == Hit(50, 50)


@pytest.mark.parametrize(
    "wrong",
    [
        {"chunk_tokens": 0},
        {"chunk_tokens": 16, "window_tokens": 8},
        {"chunk_tokens": 16, "retained_tokens": -1},
        {"chunk_tokens": 16, "kind": GroupKind.WINDOW},
        {"chunk_tokens": 16, "kind": GroupKind.LOCAL, "window_tokens": 0},
    ],
)
def test_rules_that_make_no_sense_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="allowed:"):
        GroupRule(**{"group": G0, "kind": GroupKind.FULL, **wrong})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="no KV cache groups"):
        boundary_of([])
