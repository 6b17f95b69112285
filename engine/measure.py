"""Measures which strategy is fastest here, in bounded time, and remembers it on disk.

Only at start: pieces are stored from a group's first blocks and loaded back from the same slots, so
that no byte of the KV cache changes and no slot is in use yet. A point that the time does not
reach is left to the built-in rule. Where a device pins host memory, only pinned slots are measured:
the speed of pageable ones says nothing about what they soon are. The file is one for each device,
driver and version of ours and torch's; it can be deleted at any time.
"""

import hashlib
import json
import logging
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Final

import numpy as np
import torch

from .. import __version__
from .devices.base import Device, HostMemory, Lane, Piece
from .layout import GroupLayout, Layout
from .strategy import Method, Situation, Strategy
from .types import Direction, JobId

logger = logging.getLogger(__name__)

FORMAT: Final = 2
NUM_BLOCKS: Final = (256, 16, 1)
MAX_BYTES: Final = 32 << 20
NUM_REPEATS: Final = 3
CLEARLY: Final = 0.9
"""Another strategy must take less than this share of the device's first guess to replace it."""

PIECE_TIMEOUT_S: Final = 1.0

Table = dict[Situation, Strategy]


def measured_table(
    device: Device,
    layout: Layout,
    memory: HostMemory,
    budget_s: float,
    folder: Path | None = None,
    clock: Callable[[], float] = time.perf_counter,
    *,
    checked: bool = False,
) -> Table:
    """The table for this layout: from the file, and what the file lacks measured.

    ``checked``: with the checksums of every fragment, which has a table of its own.
    ``folder`` is by default ``kvferry`` in the user's cache folder. Never raises for the device or
    the file: what fails is left out.
    """
    identity = f"{device.identity}, checked" if checked else device.identity
    path = table_path(identity, folder or cache_folder())
    table = read_table(path, identity)
    deadline = clock() + budget_s
    measured = 0
    for group, situation, blocks in _points(layout, memory):
        if situation in table:
            continue
        if clock() >= deadline or not _measurable(
            device, memory, group, blocks, deadline - clock()
        ):
            break
        try:
            found = _fastest(device, group, situation, blocks, deadline, clock, checked)
        except Exception as error:
            logger.warning("measuring transfers failed: %s", error, exc_info=error)
            break
        if found is not None:
            table[situation] = found
            measured += 1
    if measured:
        write_table(path, identity, table)
        logger.info("measured %d ways to transfer on %s", measured, identity)
    return table


def situation_of(
    group: GroupLayout, direction: Direction, num_blocks: int, busy: bool
) -> Situation:
    """What the choice for a piece of this many blocks depends on."""
    num_fragments = max(1, num_blocks * len(group.fragments))
    return Situation(
        direction,
        max(1, group.block_bytes // len(group.fragments)),
        1 << num_fragments.bit_length() - 1,
        busy,
    )


def _points(layout: Layout, memory: HostMemory) -> Iterator[tuple[GroupLayout, Situation, int]]:
    """The situations to know, large pieces first: they matter most."""
    for num_blocks in NUM_BLOCKS:
        for group in layout.groups:
            room = min(group.num_blocks, memory.num_slots * group.blocks_per_chunk)
            fits = min(num_blocks, room, max(1, MAX_BYTES // group.block_bytes))
            for direction in (Direction.STORE, Direction.LOAD):
                yield group, situation_of(group, direction, fits, busy=False), fits


def _measurable(
    device: Device, memory: HostMemory, group: GroupLayout, num_blocks: int, timeout_s: float
) -> bool:
    """Whether a point's slots are what they will be: pinned, where that means anything."""
    if not device.can_pin:
        return True
    num_slots = -(-num_blocks // group.blocks_per_chunk)
    return memory.wait_until_pinned(np.arange(num_slots, dtype=np.int64), timeout_s)


def _fastest(
    device: Device,
    group: GroupLayout,
    situation: Situation,
    num_blocks: int,
    deadline: float,
    clock: Callable[[], float],
    checked: bool,
) -> Strategy | None:
    """The fastest strategy; None when the time was up before all were measured."""
    candidates = device.strategies(situation.direction)
    piece = _piece(group, situation.direction, num_blocks, checked)
    if situation.direction is Direction.LOAD:  # what is loaded must be what is there already
        _seconds(device, _piece(group, Direction.STORE, num_blocks, checked), None, clock)
    times: dict[Strategy, float] = {}
    for strategy in candidates:
        runs: list[float] = []
        for _ in range(1 + NUM_REPEATS):
            if clock() >= deadline:
                return None
            runs.append(_seconds(device, piece, strategy, clock))
        times[strategy] = statistics.median(runs[1:])  # the first compiles and allocates
    best = min(times, key=lambda strategy: times[strategy])
    return best if times[best] < CLEARLY * times[candidates[0]] else candidates[0]


def _seconds(
    device: Device, piece: Piece, strategy: Strategy | None, clock: Callable[[], float]
) -> float:
    """Wall time of one piece, from launch to done. Raises what the device raises."""
    chosen = strategy or device.strategies(piece.direction)[0]
    lane = Lane.STORES if piece.direction is Direction.STORE else Lane.LOADS
    begun = clock()
    ticket = device.launch(piece, lane, (device.mark_compute(),), chosen)
    if not device.wait([ticket], PIECE_TIMEOUT_S):
        ticket.cancel()
        raise TimeoutError(f"a piece of {piece.num_bytes} bytes took over {PIECE_TIMEOUT_S} s")
    if (error := ticket.error()) is not None:
        raise error
    return clock() - begun


def _piece(group: GroupLayout, direction: Direction, num_blocks: int, checked: bool) -> Piece:
    """The group's first blocks, to or from the first slots."""
    blocks = np.arange(num_blocks, dtype=np.int64)
    return Piece(
        JobId(-1),
        direction,
        group.group,
        blocks,
        blocks // group.blocks_per_chunk,
        blocks % group.blocks_per_chunk,
        np.zeros(num_blocks, dtype=np.int64),
        np.full(num_blocks, checked),
        checked,
        num_blocks * group.block_bytes,
    )


def cache_folder() -> Path:
    """Where users' caches are kept, by the XDG rules."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "kvferry"


def table_path(identity: str, folder: Path) -> Path:
    """The file of one device, driver and version."""
    versions = f"{FORMAT} {__version__} {torch.__version__}"
    name = hashlib.sha256(f"{versions} {identity}".encode()).hexdigest()[:16]
    return folder / f"strategies-{name}.json"


def read_table(path: Path, identity: str) -> Table:
    """What was measured before; empty when there is no file, or it is not one of ours."""
    try:
        data = json.loads(path.read_text())
        if data["identity"] != identity or data["format"] != FORMAT:
            return {}
        return {
            Situation(
                Direction(row["direction"]),
                int(row["fragment_bytes"]),
                int(row["num_fragments"]),
                bool(row["busy"]),
            ): Strategy(Method(row["method"]), int(row["width"]))
            for row in data["rows"]
        }
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError) as error:
        logger.warning("%s is not a table of strategies (%s): measuring again", path, error)
        return {}


def write_table(path: Path, identity: str, table: Mapping[Situation, Strategy]) -> None:
    """Keep a table; other processes see the old file or the new one. Only logs what goes wrong."""
    rows = [
        {
            "direction": situation.direction.value,
            "fragment_bytes": situation.fragment_bytes,
            "num_fragments": situation.num_fragments,
            "busy": situation.busy,
            "method": strategy.method.value,
            "width": strategy.width,
        }
        for situation, strategy in table.items()
    ]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
            json.dump({"format": FORMAT, "identity": identity, "rows": rows}, file, indent=1)
        os.replace(file.name, path)
    except OSError as error:
        logger.info("the table of strategies is not kept: %s", error)
