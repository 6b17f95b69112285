"""The command line names what exists, and stays cheap to ask."""

import importlib
import subprocess
import sys

import pytest

from kvferry import __version__
from kvferry.cli import EXIT_USAGE, SUB_COMMANDS, main


@pytest.mark.parametrize("name", SUB_COMMANDS)
def test_every_sub_command_exists(name: str) -> None:
    module = importlib.import_module(SUB_COMMANDS[name].module, "kvferry")
    assert callable(module.main)


@pytest.mark.parametrize("name", SUB_COMMANDS)
def test_every_sub_command_has_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main([name, "--help"])
    assert stop.value.code == 0
    assert f"kvferry {name}" in capsys.readouterr().out


@pytest.mark.parametrize("argv", [[], ["ferry"], ["--demo"]])
def test_a_wrong_command_says_what_is_allowed(
    argv: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(argv) == EXIT_USAGE
    error = capsys.readouterr().err
    assert all(name in error for name in SUB_COMMANDS)
    assert not argv or repr(argv[0]) in error


def test_help_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in SUB_COMMANDS)
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"kvferry {__version__}\n"


def test_help_loads_nothing_heavy() -> None:
    code = (
        "import sys; from kvferry.cli import main; main(['--help']); "
        "sys.exit(any(name in sys.modules for name in ('torch', 'triton', 'vllm', 'numpy')))"
    )
    subprocess.run([sys.executable, "-P", "-c", code], check=True, capture_output=True, timeout=60)
