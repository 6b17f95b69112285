"""The transfer benchmark checks its bytes, and says when a target is missed."""

import argparse
import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from kvferry.profiling import bench_link, bench_transfer, transfer

SMALL: dict[str, Any] = {
    "device": "cpu",
    "fragment_kib": [4],
    "threads": [1],
    "mib": 1,
    "rounds": 1,
}


def told(_num_done: int, _num_steps: int, _what: str) -> None:
    """Progress that nobody reads."""


def test_every_case_is_measured_both_ways_and_told() -> None:
    steps: list[tuple[int, int]] = []
    result = bench_transfer.measure_transfer(
        quick=True,
        progress=lambda num_done, num_steps, _what: steps.append((num_done, num_steps)),
        **SMALL | {"fragment_kib": [4, 8], "integrity": ["off", "sample", "full"]},
    )
    cases = result.data["cases"]
    assert len(cases) == 2 * 2 * 3
    assert all(case["gb_per_s"] > 0 for case in cases)
    assert [case["direction"] for case in cases[:2]] == ["store", "load"]
    assert [case["target"] for case in cases] == [0.6] * 2 + [None] * 10
    assert steps == [(n, 12) for n in range(0, 13, 2)]
    (table,) = result.tables
    assert len(table.rows) == len(cases)
    assert [plot.name for plot in result.plots] == [
        "transfer-store",
        "transfer-store-integrity",
        "transfer-load",
        "transfer-load-integrity",
    ]
    lines, bars = result.plots[:2]
    assert [(one.label, list(one.x)) for one in lines.series] == [
        ("1 thread", [4, 8]),
        ("peak: plain copy", [4, 8]),
    ]
    assert [one.label for one in bars.series] == ["off", "sample", "full"]


def test_the_peak_is_the_fastest_copy_of_all_rounds() -> None:
    result = bench_transfer.measure_transfer(
        quick=True, progress=told, **SMALL | {"rounds": 3, "integrity": ["off"]}
    )
    for case in result.data["cases"]:
        assert case["best_copy_gb_per_s"] >= case["copy_gb_per_s"]
        assert result.data["peak_gb_per_s"][case["direction"]] == case["best_copy_gb_per_s"]


def test_a_missed_target_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(transfer.TARGETS, 4096, 1e9)
    result = bench_transfer.measure_transfer(
        quick=True, progress=told, **SMALL | {"integrity": ["off"]}
    )
    assert len(result.data["missed"]) == 2
    assert result.data["missed"][0].startswith("store, 4 KiB, 1 thread: ")
    assert "0 of 2 targets are met." in result.summary


def test_wrong_bytes_end_it(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = transfer.Bench(4096, 1, "off", 1 << 20)
    original = bench.transfer

    def damage(direction: transfer.Direction) -> None:
        original(direction)
        bench.arena.slots[5] ^= 1

    monkeypatch.setattr(bench, "transfer", damage)
    with pytest.raises(RuntimeError, match="not what was stored"):
        bench.check()
    bench.close()


@pytest.mark.parametrize(
    ("wrong", "allowed"),
    [
        (["--mib", "0"], "0; allowed: from 1"),
        (["--threads", "1", "65"], "65; allowed: from 1 to 64"),
        (["--device", "tpu"], "cpu"),
        (["--integrity", "some"], "sample"),
    ],
)
def test_wrong_options_are_refused_with_what_is_allowed(
    wrong: list[str], allowed: str, capsys: pytest.CaptureFixture[str]
) -> None:
    parser = argparse.ArgumentParser()
    bench_transfer.add_options(parser)
    with pytest.raises(SystemExit):
        parser.parse_args(wrong)
    assert allowed in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_cuda_is_refused_where_there_is_none() -> None:
    with pytest.raises(ValueError, match="torch finds no CUDA device; allowed here: cpu"):
        bench_transfer.measure_transfer(quick=True, progress=told, device="cuda")


def test_what_only_the_cpu_has_is_refused_on_a_gpu() -> None:
    with pytest.raises(ValueError, match="--threads, --mib given, allowed: only with --device cpu"):
        bench_transfer.measure_transfer(
            quick=True, progress=told, device="cuda", threads=[1], mib=1
        )


def row(strategy: str, direction: str, fragment_bytes: int, gb_per_s: float) -> dict[str, Any]:
    return {
        "strategy": strategy,
        "direction": direction,
        "fragment_bytes": fragment_bytes,
        "num_fragments": 64,
        "device_s": 1e-3,
        "submit_s": 2e-5,
        "wall_s": 2e-3,
        "gb_per_s": gb_per_s,
    }


def test_rows_of_a_gpu_become_tables_and_plots_against_the_link() -> None:
    both = ("store", "load")
    results = {
        "ceiling": [{"direction": name, "gb_per_s": 50.0} for name in (*both, "both")],
        "strategies": [
            row(strategy, direction, size, rate + size / 4096)
            for direction in both
            for size in (512, 4096)
            for strategy, rate in (("packed", 20.0), ("copy engine", 39.0))
        ],
    }
    result = bench_link.result_of(results, {"device": "made up"})
    assert result.summary[0] == (
        "A store reaches up to 80 % of the link's 50.0 GB/s, with copy engine at 4 KiB."
    )
    _, winners, _ = result.tables
    assert [list(one[:6]) for one in winners.rows] == [
        [direction, kib, 64, "copy engine", 39 + kib / 4, 2 * (39 + kib / 4)]
        for direction in ("load", "store")
        for kib in (0.5, 4.0)
    ]
    store, load = result.plots
    assert [(one.label, list(one.x), list(one.y), one.reference) for one in store.series] == [
        ("packed", [0.5, 4.0], [20.125, 21.0], False),
        ("copy engine", [0.5, 4.0], [39.125, 40.0], False),
        ("peak: one large copy", [0.5, 4.0], [50.0, 50.0], True),
    ]
    assert load.name == "transfer-load"


DRY = """
import torch
from kvferry.profiling import bench_link, gpu_measure, gpu_platform

torch.cuda.is_available = lambda: True
gpu_platform.CudaPlatform = gpu_platform.DryPlatform
gpu_measure.QUICK = gpu_measure.DRY
steps = []
result = bench_link.measure_link(
    quick=True, progress=lambda *step: steps.append(step), fragment_kib=[1, 4], rounds=1
)
assert [num_done for num_done, _, _ in steps] == list(range(len(steps))), steps
assert steps[-1][0] == steps[-1][1], steps[-1]
assert {row[1] for row in result.tables[1].rows} == {1.0, 4.0}, result.tables[1]
"""


def test_a_gpu_is_measured_in_a_dry_run_step_by_step() -> None:
    ran = subprocess.run(
        [sys.executable, "-P", "-c", DRY],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
