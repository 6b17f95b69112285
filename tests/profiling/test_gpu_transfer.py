"""The GPU benchmark where there is no GPU: its command line, its byte check, and a dry run."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from kvferry.profiling import gpu_transfer
from kvferry.profiling.gpu_cases import DIRECTIONS, WrongBytesError, build, check, copy_engine
from kvferry.profiling.gpu_platform import DryPlatform

without_cuda = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")


@without_cuda
def test_without_a_gpu_it_says_so_and_measures_nothing(tmp_path: Path, capsys: Any) -> None:
    assert gpu_transfer.main(["--out", str(tmp_path / "out")]) == gpu_transfer.EXIT_NO_GPU
    assert "no CUDA device here" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_an_unknown_item_is_named_with_what_is_allowed(capsys: Any) -> None:
    with pytest.raises(SystemExit) as stopped:
        gpu_transfer.main(["--items", "grids,speed"])
    assert stopped.value.code == 2
    told = capsys.readouterr().err
    assert "unknown item 'speed'; allowed: ceiling, strategies, grids, both_ways" in told


@pytest.mark.parametrize(("argv", "interpreted"), [(["--dry-run"], "0"), ([], "1")])
def test_a_dry_run_and_the_interpreter_need_each_other(
    argv: list[str], interpreted: str, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", interpreted)
    with pytest.raises(SystemExit):
        gpu_transfer.main(argv)
    assert "need each other" in capsys.readouterr().err


def test_options() -> None:
    options = gpu_transfer.parser().parse_args(["--quick", "--items", "grids,ceiling"])
    assert options.quick
    assert options.items == ("grids", "ceiling")
    assert gpu_transfer.parser().parse_args([]).items == tuple(gpu_transfer.ITEMS)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_right_bytes_pass_the_check_as_often_as_asked(direction: Any) -> None:
    case = build(DryPlatform(), fragment_bytes=96, num_fragments=12)
    for _ in range(2):
        check(case, direction, copy_engine(case, direction))


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_one_wrong_byte_is_found_before_anything_is_timed(direction: Any) -> None:
    case = build(DryPlatform(), fragment_bytes=96, num_fragments=128)
    move = copy_engine(case, direction)

    def damage(stream: object) -> None:
        move(stream)
        if direction == "store":
            case.slots.memory[case.table.block_bytes * int(case.slot_ids[1]) + 5] ^= 1
        else:
            case.pages[3, int(case.block_ids[1]), 5] ^= 1

    with pytest.raises(WrongBytesError, match=rf"block {case.block_ids[1]} in slot"):
        check(case, direction, damage)


def test_a_transfer_that_does_nothing_is_found() -> None:
    case = build(DryPlatform(), fragment_bytes=96, num_fragments=12)
    with pytest.raises(WrongBytesError, match="store: 1 of 1 blocks differ"):
        check(case, "store", lambda stream: None)


def test_a_dry_run_measures_every_item_and_writes_everything(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "kvferry.profiling.gpu_transfer", "--dry-run", "--out", tmp_path],
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONSAFEPATH": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    results = json.loads((tmp_path / "gpu_transfer.json").read_text())
    assert list(results) == ["about", *gpu_transfer.ITEMS, "winners"]
    assert all(results.values())
    assert {row["beside"] for row in results["beside_work"]} > {"nothing", "store, packed"}
    assert sum(row["chosen"] for row in results["grids"]) == len(DIRECTIONS)
    checked = {row["strategy"] for row in results["checksums"]}
    plain = {row["strategy"] for row in results["strategies"]}
    assert checked == plain | {f"{strategy} + checksum" for strategy in plain}
