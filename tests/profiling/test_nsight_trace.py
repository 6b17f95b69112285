"""The built-in trace of a real transfer engine on the CPU device."""

import json
from pathlib import Path

import pytest
from kvferry.engine import ranges
from kvferry.engine.types import Direction
from kvferry.profiling import nsight_trace
from kvferry.profiling.doctor_trip import check_round_trip
from kvferry.profiling.nsight import main
from kvferry.profiling.nsight_plot import busiest, write_timeline
from kvferry.profiling.nsight_trace import STEPS, Event, Recorder, recording, write_trace

NUM_BYTES = 2 << 20


def test_an_engine_is_recorded_and_then_left_alone(tmp_path: Path) -> None:
    with recording() as recorder:
        assert ranges.anyone_listens()
        check_round_trip(NUM_BYTES)
    assert not ranges.anyone_listens()
    num_events = len(recorder.events)
    check_round_trip(NUM_BYTES)
    assert len(recorder.events) == num_events

    write_trace(recorder, tmp_path / "trace.json")
    entries = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    lanes = {one["tid"]: one["args"]["name"] for one in entries if one["name"] == "thread_name"}
    assert list(lanes.values())[:3] == [STEPS, "loads, rank 0", "stores, rank 0"]
    spans = [one for one in entries if one["ph"] == "X"]
    assert min(one["ts"] for one in spans) == 0
    assert all(one["dur"] >= 0 for one in spans)
    by_lane = {name: [one for one in spans if lanes[one["tid"]] == name] for name in lanes.values()}
    assert [one["args"]["job"] for one in by_lane["stores, rank 0"]] == [1]
    assert by_lane["stores, rank 0"][0]["args"]["bytes"] == NUM_BYTES
    loads = by_lane["loads, rank 0"]
    assert [one["args"]["job"] for one in loads] == [2, 3]
    assert loads[0]["args"]["error"] is None
    assert "IntegrityError" in loads[1]["args"]["error"]
    assert len(by_lane[STEPS]) == 3
    names = {one["name"] for one in by_lane["ranges of MainThread"]}
    assert {"plan", "submit"} <= names


def test_a_script_is_run_and_its_trace_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    pytest.importorskip("matplotlib")
    script = tmp_path / "script.py"
    script.write_text(
        "import sys\n"
        "from kvferry.profiling.doctor_trip import check_round_trip\n"
        f"check_round_trip({NUM_BYTES})\n"
        "sys.exit(len(sys.argv))\n"
    )
    out = tmp_path / "out"
    assert main(["--builtin", "--json", "--out", str(out), "--", "python", str(script), "x"]) == 2
    kinds = {one["kind"]: one for one in json.loads(capsys.readouterr().out)["range"]}
    store = next(one for kind, one in kinds.items() if kind.startswith("store "))
    assert store["num_bytes"] == NUM_BYTES
    assert store["bytes_per_s"] > 0
    assert (out / "kvferry.trace.json").exists()
    assert (out / "kvferry.timeline.png").read_bytes().startswith(b"\x89PNG")


def test_the_steps_with_most_kinds_of_events_are_shown() -> None:
    steps = [Event(STEPS, "step", 0, 999)]  # a long first step, as compilers make it
    steps += [Event(STEPS, "step", 1000 + 10 * number, 1009 + 10 * number) for number in range(9)]
    stores = [Event("stores", "store", start, start + 10) for start in (5, 1005, 1055)]
    loads = [Event("loads", "load", start, start + 5) for start in (500, 1041)]
    flush = Event("flushes", "flush", 1060, 1062)
    plan = Event("ranges of main", "plan", 1041, 1042)
    before = Event("compute", "compute", 1035, 1041)  # begins before the steps that are shown
    shown = busiest([*steps, *stores, *loads, flush, plan, before], 3)
    assert [one.start_ns for one in shown] == [1040, 1050, 1060, 1055, 1041, 1060, 1035]
    assert busiest(steps, 3) == steps[1:4]
    assert len(busiest([*steps, *loads], 100)) == 12
    assert busiest(loads, 3) == []


def test_what_would_be_too_small_to_see_counts_little() -> None:
    prefill = [Event(STEPS, "step", 0, 100_000), Event("compute", "compute", 0, 100_000)]
    small = [Event("loads", "load", 10, 60), Event("stores", "store", 100_010, 100_060)]
    decode = [Event(STEPS, "step", start, start + 90) for start in range(100_000, 101_000, 100)]
    decode += [Event("compute", "compute", start, start + 80) for start in (100_100, 100_200)]
    shown = busiest([*prefill, *small, *decode], 2)
    assert [one.start_ns for one in shown if one.lane == STEPS] == [100_000, 100_100]


def test_there_is_no_picture_of_nothing(tmp_path: Path) -> None:
    assert not write_timeline([Event("loads", "load", 0, 1)], tmp_path / "none.png")
    assert not (tmp_path / "none.png").exists()


def test_lanes_by_a_clock_that_the_test_moves() -> None:
    now = [0]
    recorder = Recorder(lambda: now[0])
    done = {"rank": 2, "direction": Direction.LOAD, "bytes": 64, "device_s": 0.5, "error": None}
    end_step = recorder.begin("step", {})
    end_compute = recorder.begin("compute", {})
    now[0] = 10
    with recorder.span("submit", {"job": 5, "direction": Direction.LOAD}):
        now[0] = 12
    now[0] = 20
    end_compute()
    with recorder.span("submit", {"job": 5, "direction": Direction.LOAD}):  # its second piece
        now[0] = 25
    with recorder.span("flush", {"jobs": "5"}):
        now[0] = 50
    recorder.mark("done", {"job": 5, **done})
    recorder.mark("done", {"job": 6, **done})  # one that never reached the device
    end_step()
    now[0] = 60
    recorder.mark("done", {"job": 5, **done})  # the second report of a job that was given up
    recorder.mark("something else", {})
    still_open = recorder.begin("step", {})
    recorder.stop()
    still_open()
    lasted = [(event.lane, event.name, event.start_ns, event.end_ns) for event in recorder.events]
    main = "ranges of MainThread"
    assert lasted == [
        (main, "submit", 10, 12),
        ("compute", "compute", 0, 20),
        (main, "submit", 20, 25),
        ("flushes", "flush", 25, 50),
        ("loads, rank 2", "load", 10, 50),
        ("steps", "step", 0, 50),
    ]
    assert recorder.events[4].fields == {"job": 5, "bytes": 64, "device_s": 0.5, "error": None}
    assert recorder.events[4].timed().device_ns == 500_000_000


def test_a_long_recording_is_cut_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nsight_trace, "MAX_EVENTS", 2)
    recorder = Recorder()
    for number in range(5):
        recorder.add(Event("lane", "name", number, number + 1))
    write_trace(recorder, tmp_path / "trace.json")
    whole = json.loads((tmp_path / "trace.json").read_text())
    assert whole["otherData"] == {"left_out": 3}
    assert sum(one["ph"] == "X" for one in whole["traceEvents"]) == 2
