"""Checks of the host: NUMA, huge pages, cgroup, free memory, the memlock limit.

``root`` is where ``proc`` and ``sys`` are found; ``wanted_bytes`` is the host memory that kvferry
is to have, for all ranks together.
"""

import re
from pathlib import Path
from typing import Final

from ..engine.capacity import UNLIMITED, MemoryLimits
from .doctor_findings import Finding, ok, skipped, warn
from .doctor_findings import fail as failed
from .plan_units import size_text

HEADROOM: Final = 0.9
"""Asking for more of the free memory than this leaves nothing for what vLLM allocates later."""


def check_memory(limits: MemoryLimits, wanted_bytes: int) -> list[Finding]:
    """Free memory, the cgroup's limit and the memlock limit, against what is wanted."""
    return [
        _room("free memory", limits.available, wanted_bytes, "add memory, or ask kvferry for less"),
        ok("cgroup memory", "no limit")
        if limits.cgroup_free >= UNLIMITED
        else _room(
            "cgroup memory",
            limits.cgroup_free,
            wanted_bytes,
            "raise the container's memory limit, or ask kvferry for less",
        ),
        _memlock(limits, wanted_bytes),
    ]


def _room(check: str, free: int, wanted: int, advice: str) -> Finding:
    found = f"{size_text(free)} free, {size_text(wanted)} wanted"
    if free < wanted:
        return failed(check, found, f"{advice} (cpu_bytes_to_use: at most {size_text(free)})")
    if free * HEADROOM < wanted:
        return warn(check, found, f"little is left for everything else: {advice}")
    return ok(check, found)


def _memlock(limits: MemoryLimits, wanted: int) -> Finding:
    if limits.memlock >= wanted:
        found = "no limit" if limits.memlock >= UNLIMITED else size_text(limits.memlock)
        return ok("memlock limit", found)
    return warn(
        "memlock limit",
        f"{size_text(limits.memlock)}, below the {size_text(wanted)} to pin",
        "pinning is tried all the same; if it fails: ulimit -l unlimited, or --ulimit memlock=-1"
        " for a container",
    )


def check_numa(root: Path = Path("/")) -> Finding:
    """How many memory nodes there are, and what each has free."""
    nodes = sorted((root / "sys/devices/system/node").glob("node[0-9]*/meminfo"))
    if not nodes:
        return skipped("NUMA", "the kernel names no nodes")
    free = {node.parent.name.removeprefix("node"): _node_free(node) for node in nodes}
    found = ", ".join(f"node {name}: {size_text(size)} free" for name, size in free.items())
    if len(free) == 1:
        return ok("NUMA", f"one node ({found})")
    return ok("NUMA", f"{len(free)} nodes ({found}); kvferry takes memory near its GPU")


def _node_free(meminfo: Path) -> int:
    match = re.search(r"MemFree:\s+(\d+) kB", meminfo.read_text())
    return int(match[1]) * 1024 if match else 0


def check_huge_pages(root: Path = Path("/")) -> Finding:
    """Whether the kernel backs large mappings with 2 MiB pages when asked to."""
    path = root / "sys/kernel/mm/transparent_hugepage/enabled"
    try:
        chosen = re.search(r"\[(\w+)\]", path.read_text())
    except OSError:
        return skipped("huge pages", "the kernel has no transparent huge pages")
    mode = chosen[1] if chosen else "unknown"
    if mode in ("always", "madvise"):
        return ok("huge pages", f"transparent huge pages: {mode}")
    return warn(
        "huge pages",
        f"transparent huge pages: {mode}",
        f"start-up and pinning take longer without: echo madvise > /{path.relative_to(root)}",
    )
