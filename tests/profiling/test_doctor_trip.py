"""The round trip of ``kvferry doctor`` on sound devices and on broken ones, and the command."""

import json
import logging

import pytest
import torch
from kvferry.engine.capacity import MemoryLimits
from kvferry.engine.devices.base import Piece
from kvferry.engine.devices.cpu import CpuDevice
from kvferry.engine.strategy import Strategy
from kvferry.engine.types import Direction
from kvferry.profiling import doctor, doctor_trip
from kvferry.profiling.doctor_findings import Finding, Status
from kvferry.profiling.doctor_trip import check_round_trip

NUM_BYTES = 2 << 20
CPU = torch.device("cpu")


class LosesBlocks(CpuDevice):
    """Says that it loaded, and leaves one range of entries out."""

    def _move(self, piece: Piece, begin: int, end: int, strategy: Strategy) -> list[int]:
        if piece.direction is Direction.LOAD and begin == 0:
            return super()._move(piece, 1, end, strategy)
        return super()._move(piece, begin, end, strategy)


class Refuses(CpuDevice):
    def _move(self, piece: Piece, begin: int, end: int, strategy: Strategy) -> list[int]:
        raise OSError("the device says no")


class TrustsAnything(CpuDevice):
    """Verifies nothing."""

    def _move(self, piece: Piece, begin: int, end: int, strategy: Strategy) -> list[int]:
        super()._move(piece, begin, end, strategy)
        return []


def trip(device: type[CpuDevice]) -> list[Finding]:
    return check_round_trip(NUM_BYTES, lambda: (device(2), CPU))


def test_a_sound_device(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR):
        round_trip, checksums = trip(CpuDevice)
    assert round_trip.status is checksums.status is Status.OK
    assert "2 MiB came back byte for byte" in round_trip.found
    assert "nothing pinned: no GPU here" in round_trip.found
    assert not caplog.records  # the flipped byte is no error of the machine's


@pytest.mark.parametrize(
    ("device", "said"),
    [(LosesBlocks, "came back wrong"), (Refuses, "the device says no")],
)
def test_a_broken_device_is_a_failure(device: type[CpuDevice], said: str) -> None:
    round_trip, checksums = trip(device)
    assert (round_trip.status, checksums.status) == (Status.FAIL, Status.SKIPPED)
    assert said in round_trip.found


def test_a_device_that_verifies_nothing_is_a_failure() -> None:
    round_trip, checksums = trip(TrustsAnything)
    assert (round_trip.status, checksums.status) == (Status.OK, Status.FAIL)


def test_a_device_that_cannot_be_made_is_a_failure() -> None:
    def fail() -> tuple[CpuDevice, torch.device]:
        raise RuntimeError("no driver")

    round_trip, _ = check_round_trip(NUM_BYTES, fail)
    assert (round_trip.status, round_trip.found) == (Status.FAIL, "RuntimeError: no driver")


def test_without_the_memory_for_it_nothing_is_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = MemoryLimits(NUM_BYTES, NUM_BYTES, NUM_BYTES)
    monkeypatch.setattr(doctor_trip, "read_limits", lambda: limits)
    assert [one.status for one in trip(CpuDevice)] == [Status.SKIPPED] * 2


def test_the_quick_command(capsys: pytest.CaptureFixture[str]) -> None:
    config = '{"kv_load_failure_policy": "recompute"}'
    argv = ["--quick", "--host-memory", "1MiB", "--kv-transfer-config", config]
    assert doctor.main(argv) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "ok    failed loads     kv_load_failure_policy is recompute" in lines
    assert lines[-1].endswith("not checked")
    assert not any("round trip" in line for line in lines)


def test_a_failure_is_the_exit_status(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.main(["--quick", "--json", "--host-memory", "1000TiB"]) == 1
    data = json.loads(capsys.readouterr().out)
    failed = [one["check"] for one in data["findings"] if one["status"] == "fail"]
    assert "free memory" in failed
    assert data["counts"]["fail"] == len(failed)


def test_what_was_asked_for_decides_the_memory() -> None:
    config = json.dumps({"kv_connector_extra_config": {"cpu_bytes_to_use": "3GiB"}})
    assert doctor.wanted_from(None, config) == 3 << 30
    assert doctor.wanted_from("2GiB", config) == 2 << 30
    assert doctor.wanted_from(None, None) == doctor.wanted_from(None, "{") == 8 << 30
    assert doctor.main(["--quick", "--host-memory", "lots"]) == 2


@pytest.mark.parametrize(
    ("argv", "told"),
    [(["--target", "sm_1"], "sm_90"), (["--target", "sm_90", "--quick"], "one")],
)
def test_a_target_that_would_not_be_compiled_for_is_refused_at_once(
    argv: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert doctor.main(argv) == 2
    printed = capsys.readouterr()
    assert f"--target {argv[1]}" in printed.err.replace("'", "")
    assert told in printed.err
    assert not printed.out


def test_the_default_memory_is_the_connectors_own() -> None:
    pytest.importorskip("vllm")
    from kvferry.integration.vllm.config import Options

    assert doctor.wanted_from(None, None) == Options().cpu_bytes_to_use
