"""The submission benchmark: its verdict on costs written here, and one short real run."""

import importlib.util
import json
import os
import subprocess
import sys
from typing import Any

import pytest
from kvferry.profiling import submit_cost
from kvferry.profiling.standin_driver import install
from kvferry.profiling.submit_cost import Cost, missed, table


def cost(kvferry_us: float, vllm_us: float | None, layers: int = 64, blocks: int = 512) -> Cost:
    ratio = None if vllm_us is None else vllm_us / kvferry_us
    vllm_s = None if vllm_us is None else vllm_us * 1e-6
    return Cost(layers, blocks, 32, kvferry_us * 1e-6, vllm_s, ratio)


def test_only_the_case_with_a_target_can_miss_it() -> None:
    assert missed([cost(99.0, 300.0), cost(5000.0, 300.0, layers=128)]) == []
    assert missed([cost(101.0, 400.0)]) == ["101.0 us, allowed are 100"]
    assert missed([cost(99.0, 290.0)]) == ["2.93 times less than vLLM, wanted is 3"]
    assert missed([cost(99.0, None)]) == []


def test_the_table_has_a_line_for_each_case_also_without_vllm() -> None:
    lines = table([cost(90.0, 360.0), cost(90.0, None)]).splitlines()
    assert lines[1].split() == ["64", "512", "32", "90.0", "360.0", "4.00"]
    assert lines[2].split() == ["64", "512", "32", "90.0", "-", "-"]


def test_counts_out_of_range_are_named(capsys: Any) -> None:
    with pytest.raises(SystemExit):
        submit_cost.main(["--layers", "0"])
    assert "counts must be 1 to 8192, got '0'" in capsys.readouterr().err


def test_no_rounds_are_refused_before_anything_is_measured(capsys: Any) -> None:
    with pytest.raises(SystemExit):
        submit_cost.main(["--rounds", "0"])
    assert "--rounds 0; allowed: from 1" in capsys.readouterr().err


def test_the_stand_in_is_no_use_to_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(RuntimeError, match="never reaches a driver"):
        install()


def test_a_short_run_launches_one_kernel_for_each_slice() -> None:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [
            *(sys.executable, "-m", "kvferry.profiling.submit_cost", "--json"),
            *("--layers", "1,64", "--blocks", "512", "--rounds", "3"),
        ],
        env={**environment, "PYTHONSAFEPATH": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    # The status tells of a time, and no test depends on one: only the form is looked at.
    assert done.returncode in (0, 1), done.stderr[-3000:]
    costs = json.loads(done.stdout)["costs"]
    assert [c["num_launches"] for c in costs] == [1, 32]  # slices of 32 MiB
    has_vllm = importlib.util.find_spec("vllm") is not None
    assert all((c["ratio"] is not None) == has_vllm for c in costs)
