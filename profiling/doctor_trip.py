"""A round trip through the real transfer engine: store, scramble, load elsewhere, compare.

256 MiB of random bytes as KV blocks go to host memory (pinned where there is a GPU) and come back
into other blocks, once for each method that the device has. Then one byte of a slot is flipped, and
the load of that slot must be refused.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Final

import torch

from ..engine.arena import Arena
from ..engine.capacity import read_limits
from ..engine.devices.base import Device
from ..engine.devices.cpu import CpuDevice
from ..engine.layout import Layout, group_layout
from ..engine.messages import JobOrder, JobReport, Segment
from ..engine.options import TransferOptions
from ..engine.strategy import Chooser, Method
from ..engine.transfer import TransferEngine
from ..engine.types import BlockId, Direction, GroupId, JobId, Key, Rank, SlotId, seed_of
from .doctor_findings import Finding, ok, skipped
from .doctor_findings import fail as failed
from .plan_units import size_text

NUM_BYTES: Final = 256 << 20
NUM_LAYERS: Final = 8
PAGE_BYTES: Final = 32 << 10
DEADLINE_S: Final = 120.0
SEED: Final = 20261130

Make = Callable[[], tuple[Device, torch.device]]


@dataclass(frozen=True, slots=True)
class Trip:
    """What came of it. ``wrong_bytes`` counts those that did not come back as they went out."""

    wrong_bytes: int
    pinned_bytes: int
    store_s: float
    load_s: float
    errors: tuple[str, ...]
    corruption_seen: bool


def device_here() -> tuple[Device, torch.device]:
    """The GPU where torch can use one, else the CPU device."""
    if not torch.cuda.is_available():
        return CpuDevice(), torch.device("cpu")
    from ..engine.devices.cuda import StreamDevice
    from ..engine.devices.cuda_runtime import CudaRuntime

    place = torch.device("cuda", torch.cuda.current_device())
    return StreamDevice(CudaRuntime(place)), place


def check_round_trip(num_bytes: int = NUM_BYTES, make: Make = device_here) -> list[Finding]:
    """Two findings, the round trip and the checksums. Whatever goes wrong ends up in them."""
    needed = 3 * num_bytes
    if (usable := read_limits().usable) < needed:
        why = f"it takes {size_text(needed)} of host memory, {size_text(usable)} are free"
        return [skipped("round trip", why), skipped("checksums", why)]
    try:
        device, place = make()
        methods = methods_of(device)
        trips = {methods[0]: _travel(device, place, methods[0], num_bytes)}
        for method in methods[1:]:
            trips[method] = _travel(*make(), method, num_bytes)
    except Exception as error:
        found = f"{type(error).__name__}: {error}"
        advice = "kvferry cannot move KV blocks here; the error above says what the device refused"
        return [failed("round trip", found, advice), skipped("checksums", "the round trip failed")]
    return findings_of(trips, num_bytes, place)


def methods_of(device: Device) -> list[Method]:
    """The ways in which this device can both store and load, its best guess for stores first."""
    loads = {strategy.method for strategy in device.strategies(Direction.LOAD)}
    stores = dict.fromkeys(strategy.method for strategy in device.strategies(Direction.STORE))
    return [method for method in stores if method in loads]


def findings_of(trips: dict[Method, Trip], num_bytes: int, place: torch.device) -> list[Finding]:
    """What the trips mean, one for each method."""
    advice = "do not serve from this machine: test its memory (and its GPU) first"
    size = size_text(num_bytes)
    for method, trip in trips.items():
        if trip.errors or trip.wrong_bytes:
            wrong = "; ".join(trip.errors) or f"{trip.wrong_bytes} bytes of {size} came back wrong"
            why = "the round trip failed"
            return [failed("round trip", f"{method}: {wrong}", advice), skipped("checksums", why)]
    memory = "through the CPU device, nothing pinned: no GPU here"
    if place.type == "cuda":
        memory = f"{size_text(min(trip.pinned_bytes for trip in trips.values()))} pinned"
    rates = "; ".join(f"{method} {_rates(trip, num_bytes)}" for method, trip in trips.items())
    round_trip = ok("round trip", f"{size} came back byte for byte, {memory} ({rates})")
    unseen = [str(method) for method, trip in trips.items() if not trip.corruption_seen]
    if unseen:
        found = f"a flipped byte was loaded without a word ({', '.join(unseen)})"
        return [round_trip, failed("checksums", found, "this is a bug of kvferry's: report it")]
    return [round_trip, ok("checksums", "a flipped byte in host memory was refused")]


def _rates(trip: Trip, num_bytes: int) -> str:
    ways = (("store", trip.store_s), ("load", trip.load_s))
    return ", ".join(f"{way} {num_bytes / s / 1e9:.1f} GB/s" for way, s in ways if s > 0)


class _Traveller:
    """An engine with jobs run one at a time."""

    def __init__(self, engine: TransferEngine) -> None:
        self._engine = engine
        self._next = 1

    def run(self, way: Direction, slots: list[int], blocks: list[int]) -> JobReport:
        keys = [Key(slot.to_bytes(8, "little")) for slot in slots]
        segment = Segment(
            GroupId(0),
            tuple(map(SlotId, slots)),
            tuple(map(BlockId, blocks)),
            tuple(seed_of(GroupId(0), key) for key in keys),
        )
        job = JobId(self._next)
        self._next += 1
        self._engine.begin_step()
        self._engine.submit(JobOrder(job, way, (segment,)))
        return next(one for one in self._engine.drain(DEADLINE_S) if one.job_id == job)


def _travel(device: Device, place: torch.device, method: Method, num_bytes: int) -> Trip:
    num_blocks = max(2, num_bytes // (NUM_LAYERS * PAGE_BYTES))
    caches = [
        torch.empty(num_blocks, PAGE_BYTES, dtype=torch.uint8, device=place)
        for _ in range(NUM_LAYERS)
    ]
    for layer, cache in enumerate(caches):
        cache.copy_(_bytes_of(layer, num_blocks))
    layout = Layout((group_layout(GroupId(0), 1, [(one, PAGE_BYTES) for one in caches]),))
    arena = Arena.reserve(
        num_blocks, layout.slot_stride_bytes, layout.checksum_stride_bytes, device
    )
    arena.wait_pinned(DEADLINE_S)
    options = TransferOptions(integrity="full", deadline_s=DEADLINE_S)
    chooser = Chooser(
        {way: [one for one in device.strategies(way) if one.method is method] for way in Direction}
    )
    engine = TransferEngine(device, layout, arena, Rank(0), options, chooser=chooser)
    with closing(engine):
        return _there_and_back(_Traveller(engine), caches, arena)


def _there_and_back(engine: _Traveller, caches: list[torch.Tensor], arena: Arena) -> Trip:
    num_blocks = arena.num_slots
    slots = list(range(num_blocks))
    targets: list[int] = torch.randperm(num_blocks, generator=_generator(NUM_LAYERS)).tolist()
    stored = engine.run(Direction.STORE, slots, slots)
    for cache in caches:
        cache.zero_()
    loaded = engine.run(Direction.LOAD, slots, targets)
    wrong = 0
    for layer, cache in enumerate(caches):
        back = cache.cpu()[torch.tensor(targets)]
        wrong += int((back != _bytes_of(layer, num_blocks)).sum())
    arena.slots[arena.slot_stride_bytes + PAGE_BYTES // 2] ^= 1
    with _quiet():
        spoilt = engine.run(Direction.LOAD, [1], [targets[1]])
    return Trip(
        wrong,
        arena.pinned_bytes,
        stored.seconds,
        loaded.seconds,
        tuple(report.error for report in (stored, loaded) if report.error),
        (spoilt.error or "").startswith("IntegrityError"),
    )


@contextmanager
def _quiet() -> Iterator[None]:
    """The engine logs a corrupt slot as an error, which it is not where it was made on purpose."""
    log = logging.getLogger(TransferEngine.__module__)
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before


def _generator(number: int) -> torch.Generator:
    return torch.Generator().manual_seed(SEED + number)


def _bytes_of(layer: int, num_blocks: int) -> torch.Tensor:
    """The same random bytes every time, uint8 ``[num_blocks, PAGE_BYTES]``."""
    words = torch.randint(
        -(1 << 63), (1 << 63) - 1, (num_blocks, PAGE_BYTES // 8), generator=_generator(layer)
    )
    return words.view(torch.uint8)
