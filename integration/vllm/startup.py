"""The line that each rank logs once: the layout, what it makes of a block, and what follows."""

from collections.abc import Callable
from dataclasses import dataclass

from ...engine.layout import GroupLayout, Layout
from ...engine.strategy import Strategy
from ...engine.types import Direction, GroupId, Rank

EXAMPLE_BLOCKS = 64
"""The size of the pieces whose strategy is named."""

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


@dataclass(frozen=True, slots=True)
class HostMemoryFacts:
    """What was taken: ``num_bytes`` for all slots with their checksums."""

    num_slots: int
    slot_bytes: int
    num_bytes: int


def startup_line(
    rank: Rank,
    layout_name: str,
    layout: Layout,
    memory: HostMemoryFacts,
    strategy_for: Callable[[GroupId, Direction, int], Strategy],
) -> str:
    """One line for one rank. ``strategy_for``: how a piece of so many blocks would be moved."""
    groups = [_about_group(group, strategy_for) for group in layout.groups]
    unused = layout.wasted_bytes()
    left_over = ", ".join(f"group {group} {size(n)}" for group, n in unused.items() if n)
    return (
        f"kvferry rank {rank}: KV cache layout {layout_name}; {'; '.join(groups)}; "
        f"{memory.num_slots} slots of {size(memory.slot_bytes)}, {size(memory.num_bytes)} in all; "
        f"unused in a slot: {left_over or 'nothing'}"
    )


def _about_group(
    group: GroupLayout, strategy_for: Callable[[GroupId, Direction, int], Strategy]
) -> str:
    sizes = [fragment.num_bytes for fragment in group.fragments]
    each = (
        size(min(sizes))
        if min(sizes) == max(sizes)
        else f"{size(min(sizes))} to {size(max(sizes))}"
    )
    ways = [strategy_for(group.group, way, EXAMPLE_BLOCKS) for way in Direction]
    plural = "s" if len(sizes) > 1 else ""
    chunk = f"{group.blocks_per_chunk} block{'s' if group.blocks_per_chunk > 1 else ''} a chunk"
    return (
        f"group {group.group}: {len(sizes)} fragment{plural} of {each} a block, {chunk}, "
        f"{EXAMPLE_BLOCKS} blocks stored by {ways[0]} and loaded by {ways[1]}"
    )


def size(num_bytes: int) -> str:
    """A size for people: exact where it is whole, else to one decimal."""
    unit = max(i for i in range(len(_UNITS)) if i == 0 or num_bytes >= 1024**i)
    number = num_bytes / 1024**unit
    return (
        f"{number:.0f} {_UNITS[unit]}" if number == int(number) else f"{number:.1f} {_UNITS[unit]}"
    )
