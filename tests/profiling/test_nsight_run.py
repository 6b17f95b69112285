"""Running under nsys and ncu, with stand-ins for the two on the path."""

import json
import shutil
import sys
from pathlib import Path

import pytest
from kvferry.profiling import bench_plots
from kvferry.profiling.nsight import main, split_command
from kvferry.profiling.nsight_kernels import METRICS, read_launches

sys.path.insert(0, str(Path(__file__).parent))
from nsys_export import ExportFile

NSYS = """#!{python}
import json, shutil, subprocess, sys
from pathlib import Path
words = sys.argv[1:]
with open({log!r}, "a") as log:
    log.write(json.dumps(words) + "\\n")
output = next(word.split("=", 1)[1] for word in words if word.startswith("--output="))
if words[0] == "profile":
    options = [word for word in words[1:] if word.startswith("--")]
    Path(output).write_text("report")
    sys.exit(subprocess.run(words[1 + len(options):]).returncode)
shutil.copy({export!r}, output)
"""

NCU = """#!{python}
print("==PROF== Connected to process 7")
print("what the program prints, with \\"quotes\\"")
print({table!r})
"""

TABLE = "\n".join(
    [
        '"ID","Process ID","Process Name","Kernel Name","Stream","Block Size","Grid Size",'
        '"Metric Name","Metric Unit","Metric Value"',
        *(
            f'"{launch}","7","python","store_pages_kernel","13","(128, 1, 1)","(2, 1, 1)",'
            f'"{metric}","x","{value}"'
            for launch, duration in ((0, "2,000"), (1, "4,000"))
            for metric, value in zip(METRICS, (duration, "64", "8,192", "40", "n/a"), strict=True)
        ),
    ]
)


def put(folder: Path, name: str, text: str) -> None:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(text)
    (folder / name).chmod(0o755)


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is the whole path."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    return folder


def test_a_missing_profiler_says_how_to_get_it(
    tools: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--", "python", "x.py"]) == 1
    error = capsys.readouterr().err
    assert "nsight-systems-cli" in error
    assert "kvferry profile --builtin -- COMMAND" in error
    assert main(["kernel", "store"]) == 1
    assert "Nsight Compute" in capsys.readouterr().err


def test_a_command_is_profiled_exported_and_summarised(
    tools: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    export, log = tmp_path / "made.sqlite", tmp_path / "log"
    file = ExportFile(export)
    file.domain("kvferry", 1, 100)
    file.span("flush jobs=2 bytes=64", 3000, 3300, process=100)
    file.close()
    text = NSYS.format(python=sys.executable, log=str(log), export=str(export))
    put(tools, "nsys", text)
    command = [sys.executable, "-P", "-c", "import sys; sys.exit(3)"]
    assert main(["--json", "--out", str(tmp_path / "out"), "--", *command]) == 0
    said = capsys.readouterr()
    assert "ended with status 3" in said.err
    assert [one["kind"] for one in json.loads(said.out)["range"]] == ["flush"]
    profile, exported = (json.loads(line) for line in log.read_text().splitlines())
    assert profile[-len(command) :] == command
    assert {"--trace=cuda,nvtx,osrt", "--nvtx-domain-include=kvferry"} <= set(profile)
    assert exported[:2] == ["export", "--type=sqlite"]


def test_a_profiler_that_records_nothing_is_a_failure(
    tools: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    put(tools, "nsys", f"#!{sys.executable}\nraise SystemExit(1)\n")
    assert main(["--out", str(tmp_path / "out"), "--", "python"]) == 1
    assert "recorded nothing" in capsys.readouterr().err


def test_a_kernel_is_profiled(tools: Path, capsys: pytest.CaptureFixture[str]) -> None:
    put(tools, "ncu", NCU.format(python=sys.executable, table=TABLE))
    assert main(["kernel", "store", "--json"]) == 0
    (kernel,) = json.loads(capsys.readouterr().out)["kernel"]
    assert kernel["kind"] == "store_pages_kernel (2, 1, 1)"
    assert (kernel["count"], kernel["total_s"], kernel["num_bytes"]) == (2, 6e-6, 2 * 8256)
    assert kernel["bytes_per_s"] == pytest.approx(2 * 8256 / 6e-6)
    assert main(["kernel", "store"]) == 0
    assert "store_pages_kernel: 40 registers a thread\n" in capsys.readouterr().out


def test_a_table_without_metrics_is_refused(
    tools: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    put(tools, "ncu", f"#!{sys.executable}\nprint('==ERROR== no permission')\n")
    assert main(["kernel", "store"]) == 1
    assert "==ERROR== no permission" in capsys.readouterr().err
    with pytest.raises(ValueError, match="no table"):
        read_launches(['"a","b"', '"1","2"'])


def test_a_picture_without_matplotlib_is_refused_before_the_command_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_plots, "can_draw", lambda: False)
    script = tmp_path / "script.py"
    script.write_text("raise SystemExit(7)")
    command = ["--", "python", str(script)]
    assert main(["--plot", str(tmp_path / "out.png"), *command]) == 1
    assert "pip install matplotlib" in capsys.readouterr().err
    assert main(["--builtin", "--out", str(tmp_path), *command]) == 7
    assert "no picture of the steps: matplotlib is not installed" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        ([], "no command to profile"),
        (["kernel", "attention"], "kernel 'attention'; allowed: store_pages_kernel"),
        (["kernel", "store", "--launches", "0"], "--launches 0"),
        (["--builtin", "--", "ls"], "allowed: kvferry COMMAND"),
        (["--plot", "out.pdf", "--", "ls"], "--plot out.pdf; allowed: a file that ends in .png"),
        (["--steps", "0", "--", "ls"], "--steps 0; allowed: at least 1"),
        (["--builtin", "--", "python", "-c", "1"], "allowed: kvferry COMMAND"),
    ],
)
def test_what_makes_no_sense_is_refused(
    argv: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(argv) == 2
    assert named in capsys.readouterr().err


def test_the_first_dashes_end_our_options() -> None:
    assert split_command(["--json", "--", "a", "--", "b"]) == (["--json"], ["a", "--", "b"])
    assert split_command(["--json"]) == (["--json"], [])


def test_the_stand_ins_replace_the_path(tools: Path) -> None:
    assert shutil.which("nsys") is None
    put(tools, "nsys", f"#!{sys.executable}\n")
    assert shutil.which("nsys") == str(tools / "nsys")
