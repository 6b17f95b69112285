"""``kvferry aot``: compile every kernel the launchers can choose, for GPUs that are not here, and
check the machine code.

A configuration fails when a bulk access is narrower than its alignment allows, when registers
spill, when a staged loop did not become asynchronous copies, or when the bytes in flight that it
promises are not there. Which accesses are bulk, and how they are found, is told in `instructions`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Final

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from . import instructions
from .configurations import KernelConfiguration, all_configurations

TARGETS: Final[dict[str, GPUTarget]] = {
    **{f"sm_{arch}": GPUTarget("cuda", arch, 32) for arch in (80, 86, 89, 90, 100, 120)},
    **{arch: GPUTarget("hip", arch, 64) for arch in ("gfx942", "gfx950")},
}
DEFAULT_TARGETS: Final = ("sm_80", "sm_90", "sm_100", "gfx942")
EXIT_FAILED: Final = 1


@dataclass(frozen=True, slots=True)
class Report:
    """What one configuration became on one target; widths map bytes to a count of instructions."""

    configuration: str
    target: str
    registers: int
    spills: int
    shared_bytes: int
    stack_bytes: int
    load_widths: dict[int, int]
    store_widths: dict[int, int]
    in_flight_bytes: int
    problems: tuple[str, ...]


def audit(configuration: KernelConfiguration, target: str) -> Report:
    """Compile one configuration for one of `TARGETS` and check what came out."""
    gpu = TARGETS[target]
    compiled = compile_for(configuration, gpu)
    bulk = instructions.bulk_locations(compiled.asm["ttgir"])
    read = _read_cuda if gpu.backend == "cuda" else _read_hip
    widths, registers, spills, stack_bytes, problems = read(compiled, bulk)
    problems = [
        *problems,
        *_narrow(widths, configuration),
        *_missing(widths, bulk),
        *_in_flight(compiled, widths, configuration, gpu),
    ]
    if spills:
        problems.append(f"{spills} register spills")
    return Report(
        configuration=configuration.name,
        target=target,
        registers=registers,
        spills=spills,
        shared_bytes=compiled.metadata.shared,
        stack_bytes=stack_bytes,
        load_widths=_of(widths, "load"),
        store_widths=_of(widths, "store"),
        in_flight_bytes=configuration.in_flight_bytes,
        problems=tuple(problems),
    )


def compile_for(configuration: KernelConfiguration, gpu: GPUTarget) -> Any:
    """Triton's compiled kernel; no GPU is asked for."""
    names = configuration.kernel.arg_names
    constexprs = dict(configuration.constexprs)
    signature = {
        name: "constexpr" if name in constexprs else configuration.signature[name] for name in names
    }
    attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in configuration.aligned}
    return triton.compile(
        ASTSource(
            fn=configuration.kernel, signature=signature, constexprs=constexprs, attrs=attributes
        ),
        target=gpu,
        options=dict(configuration.options),
    )


def _read_cuda(
    compiled: Any, bulk: Mapping[instructions.Location, instructions.Direction]
) -> tuple[instructions.Widths, int, int, int, list[str]]:
    wide, rest = instructions.split_bulk(instructions.ptx_accesses(compiled.asm["ptx"]), bulk)
    tools = triton.knobs.nvidia
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "kernel.cubin"
        cubin.write_bytes(compiled.asm["cubin"])
        usage = instructions.resource_usage(_run(tools.cuobjdump.path, "-res-usage", cubin))
        # Without its data flow analysis, which only names branch targets, it takes a third less.
        sass = _run(tools.nvdisasm.path, "-c", "-ndf", cubin)
    # LOCAL counts what the kernel's own arrays need, STACK the frame: both hold spilled registers.
    spills = max(instructions.sass_spills(sass), usage["LOCAL"] // 4)
    problems = instructions.reconcile(wide, rest, instructions.sass_widths(sass))
    return wide, usage["REG"], spills, usage["STACK"], problems


def _read_hip(
    compiled: Any, bulk: Mapping[instructions.Location, instructions.Direction]
) -> tuple[instructions.Widths, int, int, int, list[str]]:
    assembly = compiled.asm["amdgcn"]
    wide, _ = instructions.split_bulk(instructions.amd_accesses(assembly), bulk)
    found = instructions.amd_resources(assembly)
    spills = found["vgpr_spill_count"] + found["sgpr_spill_count"]
    return wide, found["vgpr_count"], spills, found["private_segment_fixed_size"], []


def _run(*command: str | Path) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def _narrow(widths: instructions.Widths, configuration: KernelConfiguration) -> Iterable[str]:
    allowed = configuration.access_bytes
    for (direction, width), count in sorted(widths.items()):
        if width < allowed:
            yield f"{count} bulk {direction}s of {width} bytes where {allowed} are possible"


def _missing(
    widths: instructions.Widths,
    bulk: Mapping[instructions.Location, instructions.Direction],
) -> Iterable[str]:
    """An access that the IR has and the machine code has not was not recognised: a blind check."""
    if not bulk:
        yield "no bulk access found in the IR"
    for direction in sorted(set(bulk.values())):
        if not _of(widths, direction):
            yield f"no bulk {direction} found in the machine code"


def _in_flight(
    compiled: Any, widths: instructions.Widths, configuration: KernelConfiguration, gpu: GPUTarget
) -> Iterable[str]:
    """Promised bytes must fit in what holds them: shared memory if staged, else registers."""
    promised = configuration.in_flight_bytes
    if configuration.num_stages > 1 and gpu.backend == "cuda":
        held, place = compiled.metadata.shared, "shared memory"
        if "cp.async" not in compiled.asm["ptx"]:
            yield "staged, but without asynchronous copies"
    else:
        num_threads = gpu.warp_size * configuration.options["num_warps"]
        loads = _of(widths, "load").items()
        held, place = num_threads * sum(width * count for width, count in loads), "loads"
    if held < promised:
        yield f"{promised} bytes in flight promised, {held} bytes of {place} found"


def _of(widths: instructions.Widths, direction: str) -> dict[int, int]:
    return {width: count for (d, width), count in sorted(widths.items()) if d == direction}


def _audit_by_index(index: int, target: str) -> Report:
    """For another process: a kernel does not travel, its place in the list does."""
    return audit(_configurations(target)[index], target)


def _configurations(target: str) -> list[KernelConfiguration]:
    return list(all_configurations(TARGETS[target].backend))


def audit_all(targets: Sequence[str], num_processes: int) -> list[Report]:
    """Audit every configuration on every target, in processes of their own when more than one."""
    jobs = [(i, target) for target in targets for i in range(len(_configurations(target)))]
    if num_processes == 1:
        return [_audit_by_index(*job) for job in jobs]
    with ProcessPoolExecutor(num_processes, mp_context=get_context("spawn")) as pool:
        indices, names = zip(*jobs, strict=True)
        return list(pool.map(_audit_by_index, indices, names, chunksize=4))


def table(reports: Sequence[Report]) -> str:
    """The reports as aligned text, one line each and one below for every problem."""
    heads = ("configuration", "target", "regs", "spills", "shared", "stack", "load", "store")
    rows = [
        (
            r.configuration,
            r.target,
            *map(str, (r.registers, r.spills, r.shared_bytes, r.stack_bytes)),
            _widths_text(r.load_widths),
            _widths_text(r.store_widths),
            str(r.in_flight_bytes),
        )
        for r in reports
    ]
    cells = [(*heads, "in flight"), *rows]
    sizes = [max(len(row[column]) for row in cells) for column in range(len(cells[0]))]
    lines = ["  ".join(c.ljust(s) for c, s in zip(row, sizes, strict=True)) for row in cells]
    for position in range(len(reports), 0, -1):
        problems = [f"    FAILED: {problem}" for problem in reports[position - 1].problems]
        lines[position + 1 : position + 1] = problems
    return "\n".join(line.rstrip() for line in lines)


def _widths_text(widths: Mapping[int, int]) -> str:
    return " ".join(f"{count}x{width}B" for width, count in widths.items()) or "-"


def _parse_targets(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    unknown = [name for name in names if name not in TARGETS]
    if unknown:
        raise argparse.ArgumentTypeError(
            f"unknown target {unknown[0]!r}; allowed: {', '.join(TARGETS)}"
        )
    return names


def main(argv: Sequence[str]) -> int:
    """Print the report; 0 when every configuration passed, 1 when one failed."""
    parser = argparse.ArgumentParser(prog="kvferry aot", description=__doc__)
    parser.add_argument(
        "--target",
        type=_parse_targets,
        default=DEFAULT_TARGETS,
        metavar="NAME,NAME",
        help=f"of {', '.join(TARGETS)} (default {','.join(DEFAULT_TARGETS)})",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument(
        "--jobs",
        type=int,
        choices=(1, 2),
        default=min(2, os.cpu_count() or 1),
        help="processes that compile (default: 2 where there are as many cores)",
    )
    options = parser.parse_args(argv)
    if os.environ.get("TRITON_INTERPRET", "0") not in ("", "0"):
        parser.error("TRITON_INTERPRET is set: the interpreter compiles nothing")
    reports = audit_all(options.target, options.jobs)
    failed = [report for report in reports if report.problems]
    if options.json:
        json.dump([asdict(report) for report in reports], sys.stdout, indent=1)
        print()
    else:
        print(table(reports))
        print(f"{len(reports)} kernels compiled, {len(failed)} failed")
    return EXIT_FAILED if failed else 0
