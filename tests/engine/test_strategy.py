"""Choosing a strategy: the built-in rule, the measured table, and its file."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from kvferry.engine.devices.base import HostMemory, Ints, Lane, Mark, Piece, Ticket
from kvferry.engine.devices.cpu import CpuDevice, cpu_model
from kvferry.engine.measure import (
    cache_folder,
    measured_table,
    read_table,
    situation_of,
    table_path,
    write_table,
)
from kvferry.engine.strategy import Chooser, Method, Situation, Strategy
from kvferry.engine.types import Direction
from worker_rig import WAIT_S, Clock, Rig

STORE, LOAD = Direction.STORE, Direction.LOAD
GPU = [Strategy(method) for method in (Method.ZERO_COPY, Method.PACKED, Method.COPY_ENGINE)]
ONE, TWO = Strategy(Method.COMPILED, 1), Strategy(Method.COMPILED, 2)


@pytest.mark.parametrize(
    ("direction", "fragment_bytes", "num_fragments", "busy", "method"),
    [
        (STORE, 64 << 10, 1000, False, Method.COPY_ENGINE),
        (LOAD, 28 << 10, 1000, True, Method.COPY_ENGINE),
        (LOAD, 4096, 16, False, Method.COPY_ENGINE),
        (STORE, 4096, 1000, False, Method.PACKED),
        (LOAD, 4096, 1000, False, Method.ZERO_COPY),
        (LOAD, 4096, 1000, True, Method.PACKED),
    ],
)
def test_the_built_in_rule(
    direction: Direction, fragment_bytes: int, num_fragments: int, busy: bool, method: Method
) -> None:
    chooser = Chooser(dict.fromkeys(Direction, GPU))
    situation = Situation(direction, fragment_bytes, num_fragments, busy)
    assert chooser.choose(situation).method is method


def test_a_method_that_a_device_lacks_is_not_chosen() -> None:
    chooser = Chooser({way: [TWO, ONE] for way in Direction})
    assert chooser.choose(Situation(STORE, 4096, 1000, False)) is TWO


def test_the_nearest_measured_point_counts() -> None:
    table = {
        Situation(STORE, 4096, 64, False): ONE,
        Situation(STORE, 4096, 4096, False): TWO,
    }
    chooser = Chooser.of({way: [TWO, ONE] for way in Direction}, table)
    assert chooser.choose(Situation(STORE, 4096, 128, False)) is ONE
    assert chooser.choose(Situation(STORE, 4096, 2048, False)) is TWO
    assert chooser.choose(Situation(STORE, 8192, 64, False)) is ONE


def test_a_measured_point_says_nothing_about_the_other_direction_or_load() -> None:
    table = {Situation(STORE, 4096, 64, False): ONE}
    chooser = Chooser.of({way: [TWO, ONE] for way in Direction}, table)
    assert chooser.choose(Situation(LOAD, 4096, 64, False)) is TWO
    assert chooser.choose(Situation(STORE, 4096, 64, True)) is TWO


def test_a_table_of_another_device_is_not_followed() -> None:
    table = {Situation(STORE, 4096, 64, False): Strategy(Method.PACKED)}
    chooser = Chooser.of({way: [TWO, ONE] for way in Direction}, table)
    assert chooser.table == {}


def test_numbers_of_fragments_are_coarse() -> None:
    with Rig() as rig:
        group = rig.layout.groups[0]
        assert len(group.fragments) == 3
        assert situation_of(group, STORE, 5, False) == Situation(STORE, 64, 8, False)
        assert situation_of(group, STORE, 0, True) == Situation(STORE, 64, 1, True)


class Paced(CpuDevice):
    """A device on which a move takes as long as its strategy says, on a clock of its own."""

    def __init__(self, clock: Clock, seconds: dict[Strategy, float]) -> None:
        self.clock, self.seconds = clock, seconds
        self.launched: list[tuple[Direction, Strategy]] = []
        super().__init__(2)

    def launch(self, piece: Piece, lane: Lane, after: Sequence[Mark], strategy: Strategy) -> Ticket:
        self.launched.append((piece.direction, strategy))
        self.clock.now_s += self.seconds[strategy]
        return super().launch(piece, lane, after, strategy)


def measured(tmp_path: Path, seconds: dict[Strategy, float], budget_s: float = 1e9):
    clock = Clock()
    device = Paced(clock, seconds)
    with Rig(device) as rig:
        for cache in rig.caches:
            cache.random_(0, 255)
        before = [cache.clone() for cache in rig.caches]
        table = measured_table(device, rig.layout, rig.arena, budget_s, tmp_path, clock)
        assert all(torch.equal(*pair) for pair in zip(before, rig.caches, strict=True))
        assert device.wait([], WAIT_S)
    return device, table


def test_the_fastest_is_found_and_remembered(tmp_path: Path) -> None:
    device, table = measured(tmp_path, {ONE: 5.0, TWO: 1.0})
    assert set(table.values()) == {TWO}
    assert {situation.direction for situation in table} == set(Direction)
    again, same = measured(tmp_path, {ONE: 1.0, TWO: 5.0})
    assert same == table
    assert again.launched == []
    assert read_table(table_path(device.identity, tmp_path), device.identity) == table


def test_loads_measured_alone_change_no_byte_either(tmp_path: Path) -> None:
    device, table = measured(tmp_path, {ONE: 1.0, TWO: 1.0})
    stores = {where: how for where, how in table.items() if where.direction is STORE}
    write_table(table_path(device.identity, tmp_path), device.identity, stores)
    again, same = measured(tmp_path, {ONE: 1.0, TWO: 1.0})
    assert same == table
    assert again.launched


def test_the_first_guess_stays_unless_another_is_clearly_faster(tmp_path: Path) -> None:
    _, table = measured(tmp_path, {ONE: 1.0, TWO: 0.95})
    chosen = {situation.direction: strategy for situation, strategy in table.items()}
    assert chosen == {STORE: ONE, LOAD: TWO}


def test_measuring_ends_with_its_budget(tmp_path: Path) -> None:
    device, table = measured(tmp_path, {ONE: 1.0, TWO: 1.0}, budget_s=9.0)
    assert len(table) == 1
    assert device.clock.now_s <= 9.0 + 1.0, "at most one move is under way when the time is up"
    device, nothing = measured(tmp_path / "slow", {ONE: 0.9, TWO: 0.9}, budget_s=1.0)
    assert device.clock.now_s < 2.0
    assert nothing == {}
    _, nothing = measured(tmp_path / "other", {ONE: 1.0, TWO: 1.0}, budget_s=0.0)
    assert nothing == {}


def test_a_device_that_fails_ends_the_measuring(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _, table = measured(tmp_path, {})  # a strategy that it does not know: a KeyError
    assert table == {}
    assert "measuring transfers failed" in caplog.text


class Pinning:
    """Host memory as a device sees it; ``pinned_at_last`` is what a wait for its pinning gives."""

    def __init__(self, memory: HostMemory, pinned_at_last: bool) -> None:
        self.memory, self.pinned_at_last = memory, pinned_at_last
        self.pinned, self.waits_s = False, []

    def __getattr__(self, name: str) -> object:
        return getattr(self.memory, name)

    def is_pinned(self, slots: Ints) -> bool:
        return self.pinned

    def wait_until_pinned(self, slots: Ints, timeout_s: float) -> bool:
        self.waits_s.append(timeout_s)
        self.pinned = self.pinned_at_last
        return self.pinned


@pytest.mark.parametrize("pinned_at_last", [False, True])
def test_what_is_pageable_is_not_measured(tmp_path: Path, pinned_at_last: bool) -> None:
    """Its speed says nothing about the pinned memory that it soon is, and would be kept on disk."""
    device = Paced(Clock(), {ONE: 5.0, TWO: 1.0})
    with Rig(device) as rig:
        device.can_pin = True
        memory = Pinning(rig.arena, pinned_at_last)
        table = measured_table(device, rig.layout, memory, 1e3, tmp_path, device.clock)
    assert memory.waits_s[0] == 1e3
    assert bool(table) == bool(device.launched) == pinned_at_last
    assert any(tmp_path.iterdir()) == pinned_at_last


def test_checksums_are_part_of_what_is_measured(tmp_path: Path) -> None:
    """The copy engine needs a kernel more for them: what is fastest may be another."""
    checked: list[bool] = []

    class Noting(Paced):
        def launch(self, piece: Piece, *arguments: Any) -> Ticket:
            checked.append(piece.any_checked and bool(piece.checked.all()))
            return super().launch(piece, *arguments)

    with Rig(Noting(Clock(), {ONE: 1.0, TWO: 1.0}), integrity="full") as rig:
        for flag in (True, False):
            clock = rig.device.clock
            measured_table(rig.device, rig.layout, rig.arena, 1e9, tmp_path, clock, checked=flag)
            assert set(checked) == {flag}
            checked.clear()
    assert len(list(tmp_path.iterdir())) == 2, "a table for each"


@pytest.mark.parametrize(("integrity", "checked"), [("full", True), ("sample", False)])
def test_an_engine_measures_what_it_will_do(
    monkeypatch: pytest.MonkeyPatch, integrity: str, checked: bool
) -> None:
    asked = []
    monkeypatch.setattr(
        "kvferry.engine.transfer.measured_table", lambda *_, checked: asked.append(checked) or {}
    )
    with Rig(CpuDevice(1), integrity=integrity, measure_s=1.0):
        assert asked == [checked]


def test_the_file_is_one_of_this_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = table_path("a", tmp_path)
    monkeypatch.setattr("kvferry.engine.measure.__version__", "another")
    assert table_path("a", tmp_path) != ours


def test_the_cpu_is_named_by_its_model() -> None:
    device = CpuDevice(1)
    assert cpu_model() in device.identity
    assert device.close(WAIT_S)


@pytest.mark.parametrize("text", ["", "[]", '{"identity": "x"}', '{"identity": "a", "format": 0}'])
def test_a_damaged_file_is_measured_anew(tmp_path: Path, text: str) -> None:
    path = tmp_path / "strategies.json"
    path.write_text(text)
    assert read_table(path, "a") == {}


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    write_table(tmp_path / "file" / "table.json", "a", {})
    assert list(tmp_path.iterdir()) == [tmp_path / "file"]


def test_the_file_lies_in_the_users_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "kvferry"
    assert table_path("a", tmp_path) != table_path("b", tmp_path)
    with Rig(CpuDevice(2), measure_s=30.0) as rig:
        assert rig.engine._chooser.table
        assert len(list((tmp_path / "kvferry").iterdir())) == 1


@pytest.mark.parametrize("checked", [False, True])
def test_a_stream_device_is_measured_without_a_race(make_rig, tmp_path: Path, checked: bool):
    rig = make_rig()
    rig.fill(range(16), range(16))
    layout = rig.engine._layout
    table = measured_table(
        rig.device, layout, rig.arena, 1e9, tmp_path, rig.runtime.now_s, checked=checked
    )
    assert {situation.direction for situation in table} == set(Direction)
    assert all(how in rig.device.strategies(where.direction) for where, how in table.items())
    rig.simulation.check()
    assert rig.values(range(16)) == list(range(16)), "no byte of the cache has changed"
    assert not rig.simulation.unfinished()
