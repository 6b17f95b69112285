"""Whether every kernel that can be chosen compiles for the GPU at hand, and what came out."""

import os

import torch

from .doctor_findings import Finding, fail, ok, skipped, warn


def target_here() -> str | None:
    """The GPU's architecture by the name that ``kvferry aot`` knows it; None without a GPU."""
    if not torch.cuda.is_available():
        return None
    if torch.version.hip:
        return str(torch.cuda.get_device_properties(0).gcnArchName).split(":")[0]
    major, minor = torch.cuda.get_device_capability()
    return f"sm_{major}{minor}"


def check_kernels(target: str | None) -> Finding:
    """Compile and audit every configuration for ``target``; None where there is no GPU."""
    check = "kernels"
    if target is None:
        return skipped(check, "no GPU here", "name one to compile for it: --target sm_90")
    if os.environ.get("TRITON_INTERPRET", "0") not in ("", "0"):
        return skipped(check, "TRITON_INTERPRET is set: nothing is compiled")
    from ..kernels import aot

    if target not in aot.TARGETS:
        return skipped(check, f"{target} has no audit; known: {', '.join(aot.TARGETS)}")
    try:
        reports = aot.audit_all([target], num_processes=min(2, os.cpu_count() or 1))
    except Exception as error:
        return fail(
            check,
            f"compiling for {target} failed: {type(error).__name__}: {error}",
            "look at Triton's version above; kvferry aot shows the kernel",
        )
    problems = [report for report in reports if report.problems]
    found = f"{len(reports)} compiled for {target}"
    if problems:
        first = f"{problems[0].configuration}: {problems[0].problems[0]}"
        return warn(
            check,
            f"{found}, {len(problems)} with problems ({first})",
            f"they work, but slower than they should: kvferry aot --target {target}",
        )
    return ok(check, f"{found}, no spills, full-width accesses")
