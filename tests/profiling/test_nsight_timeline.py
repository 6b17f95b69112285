"""The built-in trace and the picture of vLLM's real engine on a CPU, made as a user makes them."""

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from kvferry.profiling.nsight_plot import COLOURS

pytest.importorskip("vllm")
image = pytest.importorskip("matplotlib.image")

HERE = Path(__file__).parent
ENVIRONMENT = {
    "PYTHONPATH": str(HERE.parent / "integration"),
    "PYTHONSAFEPATH": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "PYTHONHASHSEED": "0",
}

Span = dict[str, Any]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where ``kvferry profile`` has left the trace and the picture of ``engine_steps.py``."""
    folder = tmp_path_factory.mktemp("profile")
    script = [sys.executable, str(HERE / "engine_steps.py"), str(folder / "models")]
    command = [sys.executable, "-P", "-m", "kvferry", "profile", "--out", str(folder)]
    command += ["--plot", str(folder / "steps.png"), "--steps", "12", "--", *script]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=500, env={**os.environ, **ENVIRONMENT}
    )
    print(done.stdout)
    assert done.returncode == 0, done.stderr[-4000:]
    assert f"picture of a few steps: {folder / 'steps.png'}" in done.stdout
    return folder


@pytest.fixture(scope="module")
def lanes(folder: Path) -> dict[str, list[Span]]:
    """The spans of the trace, by their lane."""
    entries = json.loads((folder / "kvferry.trace.json").read_text())["traceEvents"]
    names = {one["tid"]: one["args"]["name"] for one in entries if one["name"] == "thread_name"}
    found: dict[str, list[Span]] = {name: [] for name in names.values()}
    for one in entries:
        if one["ph"] == "X":
            found[names[one["tid"]]].append(one)
    return found


def test_every_lane_has_what_happened(lanes: dict[str, list[Span]]) -> None:
    assert list(lanes) == [
        *("steps", "compute", "loads, rank 0", "stores, rank 0", "flushes"),
        "ranges of MainThread",
    ]
    assert all(lanes.values())
    for name in ("loads, rank 0", "stores, rank 0"):
        assert all(one["args"]["bytes"] > 0 and not one["args"]["error"] for one in lanes[name])
    assert all(one["args"]["bytes"] > 0 for one in lanes["flushes"])


def test_compute_and_flushes_lie_in_steps_and_not_over_each_other(
    lanes: dict[str, list[Span]],
) -> None:
    inner = sorted([*lanes["compute"], *lanes["flushes"]], key=lambda one: one["ts"])
    for one in inner:
        assert any(within(one, step) for step in lanes["steps"]), one
    for one, after in itertools.pairwise(inner):
        assert end_of(one) <= after["ts"]
    assert len(lanes["compute"]) <= len(lanes["steps"])


def test_a_store_that_compute_was_held_for_has_been_told_by_the_end_of_its_step(
    lanes: dict[str, list[Span]],
) -> None:
    stores = {str(one["args"]["job"]): one for one in lanes["stores, rank 0"]}
    for flush in lanes["flushes"]:
        (step,) = (one for one in lanes["steps"] if within(flush, one))
        for job in flush["args"]["jobs"].split(","):
            assert end_of(flush) <= end_of(stores[job]) <= end_of(step)


def test_the_picture_shows_every_lane(folder: Path) -> None:
    pixels = (image.imread(folder / "steps.png")[..., :3] * 255).round().astype(int)
    for name, colour in COLOURS.items():
        wanted = [int(colour[at : at + 2], 16) for at in (1, 3, 5)]
        assert (pixels == wanted).all(axis=-1).any(), name


def end_of(span: Span) -> float:
    return float(span["ts"] + span["dur"])


def within(inner: Span, outer: Span) -> bool:
    """A nanosecond more, for microseconds that were rounded."""
    return outer["ts"] <= inner["ts"] + 1e-3 and end_of(inner) <= end_of(outer) + 1e-3
