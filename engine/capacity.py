"""How much host memory this process may take: cgroup limits, free memory, the memlock limit."""

import re
import resource
from dataclasses import dataclass
from pathlib import Path

from .errors import CapacityError

UNLIMITED = 1 << 62


@dataclass(frozen=True, slots=True)
class MemoryLimits:
    """In bytes. ``cgroup_free`` is the least of all cgroups above us, ``UNLIMITED`` for none."""

    available: int
    cgroup_free: int
    memlock: int

    @property
    def usable(self) -> int:
        return min(self.available, self.cgroup_free)


def read_limits(root: Path = Path("/")) -> MemoryLimits:
    """The limits as they are now. ``root`` is where ``proc`` and ``sys`` are found."""
    text = (root / "proc/meminfo").read_text()
    found = re.search(r"^MemAvailable:\s+(\d+) kB", text, re.MULTILINE)
    available = int(found[1]) * 1024 if found else UNLIMITED
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    memlock = UNLIMITED if soft == resource.RLIM_INFINITY else soft
    return MemoryLimits(available, _cgroup_free(root), memlock)


def _cgroup_free(root: Path) -> int:
    """The room left under the tightest cgroup limit. Page cache counts as free: it is dropped."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return UNLIMITED
    free = UNLIMITED
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base, names = root / "sys/fs/cgroup", ("memory.max", "memory.current", "")
        elif "memory" in controllers.split(","):
            base = root / "sys/fs/cgroup/memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")
        else:
            continue
        relative = Path(path.lstrip("/"))
        for folder in (base / relative, *(base / above for above in relative.parents), base):
            free = min(free, _room(folder, *names))
    return free


def _room(folder: Path, limit_name: str, usage_name: str, stat_prefix: str) -> int:
    """What one cgroup leaves; ``UNLIMITED`` when it sets no limit or cannot be read."""
    try:
        limit = (folder / limit_name).read_text().strip()
        usage = int((folder / usage_name).read_text())
        stat = (folder / "memory.stat").read_text()
    except (OSError, ValueError):
        return UNLIMITED
    if limit == "max" or int(limit) >= UNLIMITED:
        return UNLIMITED
    pattern = rf"^{stat_prefix}(?:in)?active_file (\d+)$"
    cache = sum(int(size) for size in re.findall(pattern, stat, re.MULTILINE))
    return max(0, int(limit) - max(0, usage - cache))


def check_capacity(num_bytes: int, limits: MemoryLimits, num_ranks: int = 1) -> None:
    """Raises ``CapacityError`` with the numbers when all ranks of this host do not fit."""
    total = num_bytes * num_ranks
    if total <= limits.usable:
        return
    cgroup = "no limit" if limits.cgroup_free == UNLIMITED else f"{limits.cgroup_free} bytes free"
    raise CapacityError(
        f"{total} bytes of host memory asked for ({num_ranks} ranks on this host, {num_bytes} "
        f"bytes each); available: {limits.available} bytes, cgroup: {cgroup}. "
        f"Ask for at most {limits.usable // num_ranks} bytes a rank."
    )
