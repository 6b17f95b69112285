"""Every state x event pair of a slot, written out again from the design, not from the table."""

import itertools

import pytest
from kvferry.engine.errors import InvalidTransition
from kvferry.engine.state import TRANSITIONS, SlotEvent, SlotState, after

LEGAL = """
    FREE RESERVE WRITING
    WRITING COMMIT READY
    WRITING ABORT DOOMED
    WRITING INVALIDATE DOOMED
    READY PIN READING
    READY EVICT FREE
    READY INVALIDATE FREE
    READING PIN READING
    READING RELEASE READING
    READING LAST_RELEASE READY
    READING INVALIDATE DOOMED
    DOOMED RELEASE DOOMED
    DOOMED LET_GO FREE
"""
EXPECTED = {
    (SlotState[state], SlotEvent[event]): SlotState[following]
    for state, event, following in (line.split() for line in LEGAL.strip().splitlines())
}


@pytest.mark.parametrize(
    ("state", "event"),
    list(itertools.product(SlotState, SlotEvent)),
    ids=lambda value: value.name.lower(),
)
def test_every_pair(state: SlotState, event: SlotEvent) -> None:
    if (state, event) in EXPECTED:
        assert after(state, event) is EXPECTED[state, event]
    else:
        with pytest.raises(InvalidTransition, match=f"a {state.name} slot cannot '{event.value}'"):
            after(state, event)


def test_table_has_nothing_else_and_cannot_be_changed() -> None:
    assert dict(TRANSITIONS) == EXPECTED
    with pytest.raises(TypeError):
        TRANSITIONS[SlotState.FREE, SlotEvent.PIN] = SlotState.READING  # type: ignore[index]


def test_every_state_can_be_reached_and_left_for_free() -> None:
    for target in SlotState:
        seen = {SlotState.FREE if target is not SlotState.FREE else SlotState.WRITING}
        frontier = set(seen)
        while frontier:
            frontier = {to for (at, _), to in TRANSITIONS.items() if at in frontier} - seen
            seen |= frontier
        assert target in seen


def test_only_doomed_and_ready_slots_become_free() -> None:
    """Invariant I2: what somebody reads or writes is never free by one event."""
    sources = {state for (state, _), to in TRANSITIONS.items() if to is SlotState.FREE}
    assert sources == {SlotState.READY, SlotState.DOOMED}
