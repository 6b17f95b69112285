"""Runs a command under Nsight Systems or Nsight Compute, or here with our own recorder."""

import os
import runpy
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from .. import cli
from . import nsight_kernels
from .nsight_export import DOMAIN
from .nsight_trace import Recorder, recording

GET_NSYS: Final = (
    "nsys (Nsight Systems) is not on the path. It comes with the CUDA toolkit; alone it is the"
    " package nsight-systems-cli of NVIDIA's repositories for Linux distributions, or a download"
    " from NVIDIA's page of Nsight Systems. It runs without a GPU too."
)
GET_NCU: Final = (
    "ncu (Nsight Compute) is not on the path. It comes with the CUDA toolkit; alone it is the"
    " package nsight-compute of NVIDIA's repositories, or a download from NVIDIA's page of Nsight"
    " Compute. It needs a GPU, and the right to read its counters (root, or the driver's option"
    " NVreg_RestrictProfilingToAdminUsers=0)."
)
OFFER: Final = "On any machine: kvferry profile --builtin -- COMMAND, a trace of the engine's own."


class MissingToolError(Exception):
    """A profiler that is not installed; the message says how to get it."""


class ToolError(Exception):
    """A profiler that ended with an error of its own."""


def nsys_command(
    nsys: str, report: Path, command: Sequence[str], *, all_domains: bool
) -> list[str]:
    """``nsys profile``: CUDA, NVTX and OS runtime, the processes that vLLM forks included; no CPU
    sampling, which costs most and tells least here."""
    filters = [] if all_domains else [f"--nvtx-domain-include={DOMAIN}"]
    return [
        nsys,
        "profile",
        "--trace=cuda,nvtx,osrt",
        *filters,
        "--sample=none",
        "--cpuctxsw=none",
        "--trace-fork-before-exec=true",
        "--force-overwrite=true",
        f"--output={report}",
        *command,
    ]


def export_command(nsys: str, report: Path, export: Path) -> list[str]:
    return [
        nsys,
        "export",
        "--type=sqlite",
        "--force-overwrite=true",
        f"--output={export}",
        str(report),
    ]


def ncu_command(ncu: str, name: str, num_launches: int, command: Sequence[str]) -> list[str]:
    """``ncu``: a few metrics of the first launches of kernels whose name begins so."""
    return [
        ncu,
        "--csv",
        "--print-units=base",
        f"--metrics={','.join(nsight_kernels.METRICS)}",
        f"--kernel-name=regex:^{name}",
        f"--launch-count={num_launches}",
        "--target-processes=all",
        *command,
    ]


def run_nsys(folder: Path, command: Sequence[str], *, all_domains: bool) -> Path:
    """Profile ``command`` and return the exported file in ``folder``.

    A command that fails is exported all the same: what it did until then may tell why. Raises
    ``MissingToolError``, or ``ToolError`` when nothing was recorded.
    """
    nsys = shutil.which("nsys")
    if nsys is None:
        raise MissingToolError(f"{GET_NSYS}\n{OFFER}")
    folder.mkdir(parents=True, exist_ok=True)
    report, export = folder / "kvferry.nsys-rep", folder / "kvferry.sqlite"
    report.unlink(missing_ok=True)
    status = subprocess.run(nsys_command(nsys, report, command, all_domains=all_domains)).returncode
    if status:
        print(f"kvferry profile: the command ended with status {status}", file=sys.stderr)
    if not report.exists():
        raise ToolError(f"nsys ended with status {status} and recorded nothing")
    exported = subprocess.run(
        export_command(nsys, report, export), capture_output=True, text=True, errors="replace"
    )
    if exported.returncode or not export.exists():
        raise ToolError(f"nsys export failed: {exported.stderr.strip() or exported.stdout.strip()}")
    return export


def run_ncu(name: str, num_launches: int, command: Sequence[str]) -> list[nsight_kernels.Launch]:
    """Profile the kernels that ``command`` launches; raises ``MissingToolError``, ``ToolError``."""
    ncu = shutil.which("ncu")
    if ncu is None:
        raise MissingToolError(f"{GET_NCU}\n{OFFER}")
    answer = subprocess.run(
        ncu_command(ncu, name, num_launches, command),
        stdout=subprocess.PIPE,
        text=True,
        errors="replace",
    )
    try:
        return nsight_kernels.read_launches(answer.stdout.splitlines())
    except ValueError as error:
        said = [line for line in answer.stdout.splitlines() if line.startswith("==")]
        raise ToolError("\n".join([f"{error} (status {answer.returncode})", *said])) from error


def run_recorded(command: Sequence[str]) -> tuple[Recorder, int]:
    """Run a Python command in this process under our recorder; what came of it, and its status.

    vLLM's engine core is kept in this process (``VLLM_ENABLE_V1_MULTIPROCESSING=0``) unless the
    environment says otherwise: other processes are not recorded. Raises ValueError for a command
    that is not Python's.
    """
    argv, start = _python(command)
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    before, sys.argv = sys.argv, argv
    status = 0
    with recording() as recorder:
        try:
            start()
        except SystemExit as stop:
            status = stop.code if isinstance(stop.code, int) else 0 if stop.code is None else 1
        except KeyboardInterrupt:
            status = 130
        finally:
            sys.argv = before
    return recorder, status


def _python(command: Sequence[str]) -> tuple[list[str], Callable[[], object]]:
    """The ``sys.argv`` of a command, and what runs it here."""
    words = list(command)
    if words and Path(words[0]).name == "kvferry":
        return words, lambda: sys.exit(cli.main(words[1:]))
    if words and Path(words[0]).name.startswith("python"):
        words = words[1:]
        while words and words[0] in ("-P", "-u", "-B"):
            words = words[1:]
    match words:
        case ["-m", module, *_]:
            return words[1:], lambda: runpy.run_module(module, run_name="__main__", alter_sys=True)
        case [script, *_] if script.endswith(".py") and Path(script).is_file():
            return words, lambda: runpy.run_path(script, run_name="__main__")
    raise ValueError(
        f"the built-in trace cannot run {' '.join(command)!r}; allowed: kvferry COMMAND, python "
        "SCRIPT.py, python -m MODULE"
    )
