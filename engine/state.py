"""The life of a slot: its states, what can happen to it, and one table that says what follows.

A slot is the place of one chunk in host memory. At any time it is in exactly one state:

- FREE: nobody uses it and no key leads to it.
- WRITING: one ``WriteLease`` holds it; its key is known (so that nobody stores the chunk twice),
  but the bytes are not there yet and cannot be found by a lookup.
- READY: the bytes are complete on every rank, the key is found, and nobody holds the slot. READY is
  the same as "may be evicted"; there is no second flag for that.
- READING: like READY, but at least one ``ReadLease`` holds it, so it cannot be evicted.
- DOOMED: the slot's content is not wanted any more (a failed transfer, an abort, a reset), but
  somebody may still read or write its bytes. No key leads to it. It becomes FREE when the last
  holder lets go.

    FREE    --reserve-->      WRITING
    WRITING --commit-->       READY
    WRITING --abort-->        DOOMED
    WRITING --invalidate-->   DOOMED
    READY   --pin-->          READING
    READY   --evict-->        FREE
    READY   --invalidate-->   FREE
    READING --pin-->          READING      one more reader
    READING --release-->      READING      other readers remain
    READING --last release--> READY
    READING --invalidate-->   DOOMED
    DOOMED  --release-->      DOOMED       other readers remain
    DOOMED  --let go-->       FREE         the last holder is gone

Two rules follow from the table and carry the engine's invariants I2 and I3: the only ways to FREE
start in states that nobody holds or pass through "let go", and the only way to be found by a lookup
is through "commit". A pair that the table does not have is a bug of ours: ``after`` raises
``InvalidTransition`` and, since it only computes, changes nothing.
"""

import enum
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from .errors import InvalidTransition


class SlotState(enum.IntEnum):
    """Where a slot is in its life. The values fit a byte and FREE is zero: fresh memory is FREE."""

    FREE = 0
    WRITING = 1
    READY = 2
    READING = 3
    DOOMED = 4


class SlotEvent(enum.Enum):
    """What can happen to a slot."""

    RESERVE = "reserve"
    COMMIT = "commit"
    ABORT = "abort"
    PIN = "pin"
    RELEASE = "release"  # a reader leaves, others remain
    LAST_RELEASE = "last release"
    EVICT = "evict"
    INVALIDATE = "invalidate"
    LET_GO = "let go"  # the last holder of a doomed slot leaves


TRANSITIONS: Final[Mapping[tuple[SlotState, SlotEvent], SlotState]] = MappingProxyType(
    {
        (SlotState.FREE, SlotEvent.RESERVE): SlotState.WRITING,
        (SlotState.WRITING, SlotEvent.COMMIT): SlotState.READY,
        (SlotState.WRITING, SlotEvent.ABORT): SlotState.DOOMED,
        (SlotState.WRITING, SlotEvent.INVALIDATE): SlotState.DOOMED,
        (SlotState.READY, SlotEvent.PIN): SlotState.READING,
        (SlotState.READY, SlotEvent.EVICT): SlotState.FREE,
        (SlotState.READY, SlotEvent.INVALIDATE): SlotState.FREE,
        (SlotState.READING, SlotEvent.PIN): SlotState.READING,
        (SlotState.READING, SlotEvent.RELEASE): SlotState.READING,
        (SlotState.READING, SlotEvent.LAST_RELEASE): SlotState.READY,
        (SlotState.READING, SlotEvent.INVALIDATE): SlotState.DOOMED,
        (SlotState.DOOMED, SlotEvent.RELEASE): SlotState.DOOMED,
        (SlotState.DOOMED, SlotEvent.LET_GO): SlotState.FREE,
    }
)


def after(state: SlotState, event: SlotEvent) -> SlotState:
    """The state that follows ``state`` on ``event``; raises ``InvalidTransition`` if none does."""
    following = TRANSITIONS.get((state, event))
    if following is None:
        allowed = sorted(e.value for s, e in TRANSITIONS if s is state)
        raise InvalidTransition(
            f"a {state.name} slot cannot {event.value!r}; allowed: {', '.join(allowed)}"
        )
    return following
