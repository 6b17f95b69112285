"""Where and with what something was measured: without it no figure can be compared."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from .. import __version__
from .doctor_gpu import ask_driver
from .doctor_software import SUPPORTED, installed_version
from .plan_units import size_text

GIT_TIMEOUT_S: Final = 30.0
ENVIRONMENT: Final = ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "CUDA_VISIBLE_DEVICES")
"""What changes figures and is not on the command line."""

Ask = Callable[[Sequence[str]], str | None]


def about(command: Sequence[str]) -> dict[str, str]:
    """Machine, commit, versions, date and command line, each under the name it is shown with."""
    facts = {
        "command": shlex.join(command),
        "date": time.strftime("%Y-%m-%d %H:%M %z"),
        "commit": commit() or f"not known; kvferry {__version__}",
        "machine": machine(),
        "GPU": gpus(),
        "system": f"{platform.system()} {platform.release()}, {platform.machine()}",
        "load before": ", ".join(f"{load:.2f}" for load in os.getloadavg()),
        "kvferry": __version__,
        "Python": platform.python_version(),
    }
    for one in SUPPORTED:
        found = {name: v for name in one.distributions if (v := installed_version(name))}
        shown = [
            v if name == one.distributions[0] else f"{v} ({name})" for name, v in found.items()
        ]
        facts[one.name] = ", ".join(shown) or "not installed"
    given = [f"{name}={os.environ[name]}" for name in ENVIRONMENT if name in os.environ]
    return facts | {"environment": " ".join(given) or "nothing set that changes figures"}


def machine() -> str:
    """Processor, cores that this process may use, memory."""
    from ..engine.devices.cpu import cpu_model

    num_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    cores, usable = os.cpu_count() or 1, len(os.sched_getaffinity(0))
    shown = f"{cores} cores" if usable == cores else f"{usable} of {cores} cores"
    return f"{cpu_model()}, {shown}, {size_text(num_bytes)}"


def gpus() -> str:
    """The names of the GPUs by what the driver says: torch is not asked, since a process that
    it has opened a device in cannot fork engines any more."""
    found = ask_driver()
    if isinstance(found, str):
        return f"none ({found})"
    return ", ".join(f"{gpu.name}, driver {gpu.driver}" for gpu in found) or "none"


def commit(folder: Path | None = None, ask: Ask | None = None) -> str | None:
    """The commit of the checkout that this code runs from, and whether it was changed; None where
    it is installed elsewhere, also when that is inside another project's checkout."""
    folder = Path(__file__).resolve().parent if folder is None else folder
    ask = _git if ask is None else ask
    git = ["git", "-C", str(folder)]
    if ask([*git, "ls-files", "--error-unmatch", Path(__file__).name]) is None:
        return None
    if (found := ask([*git, "rev-parse", "--short=12", "HEAD"])) is None:
        return None
    changed = ask([*git, "status", "--porcelain", "--untracked-files=no"])
    return f"{found}, with changes that are not committed" if changed else found


def _git(command: Sequence[str]) -> str | None:
    """What it prints; None when it fails or is not there."""
    try:
        answer = subprocess.run(
            command, capture_output=True, text=True, timeout=GIT_TIMEOUT_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout.strip()
