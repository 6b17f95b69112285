"""``kvferry profile``: what the engine's ranges, copies and kernels cost.

  kvferry profile [OPTIONS] -- COMMAND               run COMMAND under Nsight Systems, summarise
  kvferry profile --builtin [OPTIONS] -- COMMAND     the engine's own trace, on any machine
  kvferry profile --plot FILE.png -- COMMAND         the same, and a picture of a few of its steps
  kvferry profile kernel NAME [OPTIONS] [-- COMMAND] a kernel under Nsight Compute
  kvferry profile summary FILE [--json]              summarise what nsys export has written

Exit status: COMMAND's own with --builtin, 0 for a summary, 1 when a profiler is missing or fails,
2 for a command line that makes no sense.
"""

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Final

from .nsight_export import Export
from .nsight_summary import Summary, lines_of, summarise

EXIT_FAILED: Final = 1
EXIT_USAGE: Final = 2

KERNELS: Final = (
    "store_pages_kernel",
    "load_pages_kernel",
    "pack_pages_kernel",
    "unpack_pages_kernel",
    "checksum_pages_kernel",
)
WORKLOAD: Final = (
    "from kvferry.profiling.doctor_trip import check_round_trip as trip;print(*trip(), sep=chr(10))"
)
"""What is profiled when no command is given: the round trip of kvferry doctor."""

Sections = dict[str, list[Summary]]


def main(argv: list[str]) -> int:
    own, command = split_command(argv)
    from .nsight_run import MissingToolError, ToolError

    try:
        if own[:1] == ["kernel"]:
            return _kernel(own[1:], command)
        if own[:1] == ["summary"]:
            return _summary(own[1:])
        return _profile(own, command)
    except ValueError as error:
        print(f"kvferry profile: {error}", file=sys.stderr)
        return EXIT_USAGE
    except (MissingToolError, ToolError) as error:
        print(f"kvferry profile: {error}", file=sys.stderr)
        return EXIT_FAILED


def split_command(argv: list[str]) -> tuple[list[str], list[str]]:
    """What stands before the first ``--``, and what stands after it."""
    if "--" not in argv:
        return argv, []
    at = argv.index("--")
    return argv[:at], argv[at + 1 :]


def _profile(own: list[str], command: list[str]) -> int:
    from . import nsight_run

    options = _profile_parser().parse_args(own)
    if not command:
        raise ValueError("no command to profile; allowed: kvferry profile [OPTIONS] -- COMMAND")
    if options.steps < 1:
        raise ValueError(f"--steps {options.steps}; allowed: at least 1")
    if options.plot is not None and (options.plot.suffix != ".png" or options.plot.is_dir()):
        raise ValueError(f"--plot {options.plot}; allowed: a file that ends in .png")
    if options.builtin or options.plot is not None:
        return _profile_builtin(options, command)
    export = nsight_run.run_nsys(options.out, command, all_domains=options.all_domains)
    _tell(sections_of(Export(export)), f"full profile: {export}", as_json=options.json)
    return 0


def _profile_parser() -> argparse.ArgumentParser:
    parser = _parser("kvferry profile")
    add = parser.add_argument
    add("--out", type=Path, default=Path("profile"), help="folder of what is written")
    add("--builtin", action="store_true", help="record the engine's own trace")
    add("--plot", type=Path, metavar="FILE", help="with --builtin: write the picture there (PNG)")
    add("--steps", type=int, default=8, help="as many steps in the picture (default 8)")
    add("--all-domains", action="store_true", help="keep others' NVTX ranges too")
    return parser


def _profile_builtin(options: argparse.Namespace, command: list[str]) -> int:
    from . import bench_plots, nsight_plot, nsight_run, nsight_trace

    if options.plot is not None and not bench_plots.can_draw():
        raise nsight_run.MissingToolError(
            "--plot draws with matplotlib, which is not installed: pip install matplotlib"
        )
    recorder, status = nsight_run.run_recorded(command)
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / "kvferry.trace.json"
    nsight_trace.write_trace(recorder, path)
    notes = [f"trace, for Perfetto or chrome://tracing: {path}"]
    picture = options.plot or options.out / "kvferry.timeline.png"
    picture.parent.mkdir(parents=True, exist_ok=True)
    if not bench_plots.can_draw():
        notes.append("no picture of the steps: matplotlib is not installed")
    elif nsight_plot.write_timeline(recorder.events, picture, options.steps):
        notes.append(f"picture of a few steps: {picture}")
    else:
        notes.append("no picture: no step of an engine was recorded")
    timed = [event.timed() for event in recorder.events]
    _tell({"range": summarise(timed)}, "\n".join(notes), as_json=options.json)
    return status


def _kernel(own: list[str], command: list[str]) -> int:
    from . import nsight_kernels, nsight_run

    parser = _parser("kvferry profile kernel")
    parser.add_argument("name", help=f"its beginning is enough: {', '.join(KERNELS)}")
    parser.add_argument("--launches", type=int, default=20, help="as many (default 20)")
    options = parser.parse_args(own)
    if not any(kernel.startswith(options.name) for kernel in KERNELS):
        raise ValueError(f"kernel {options.name!r}; allowed: {', '.join(KERNELS)}")
    if options.launches < 1:
        raise ValueError(f"--launches {options.launches}; allowed: at least 1")
    command = command or [sys.executable, "-P", "-c", WORKLOAD]
    launches = nsight_run.run_ncu(options.name, options.launches, command)
    note = "\n".join(nsight_kernels.occupancy_lines(launches))
    _tell({"kernel": summarise(one.timed() for one in launches)}, note, as_json=options.json)
    return 0


def _summary(own: list[str]) -> int:
    parser = _parser("kvferry profile summary")
    parser.add_argument("file", type=Path, help="an SQLite file that nsys export has written")
    options = parser.parse_args(own)
    _tell(sections_of(Export(options.file)), "", as_json=options.json)
    return 0


def sections_of(export: Export) -> Sections:
    """Our ranges, all copies, and our kernels."""
    ours = [one for one in export.kernels if one.kind in KERNELS]
    return {
        "range": summarise(export.ranges),
        "copy": summarise(export.copies),
        "kernel": summarise(ours),
    }


def _tell(sections: Sections, note: str, *, as_json: bool) -> None:
    if as_json:
        print(
            json.dumps({name: [asdict(one) for one in found] for name, found in sections.items()})
        )
        return
    for name, found in sections.items():
        if found:
            print("\n".join([*lines_of(name, found), ""]))
        elif name == "range":
            print("no range of kvferry's was recorded: did the command move KV blocks?\n")
    if note:
        print(note)


def _parser(name: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        name, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print the summary as JSON")
    return parser
