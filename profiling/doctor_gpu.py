"""Checks of the GPUs and their links, by what ``nvidia-smi`` says."""

import csv
import shutil
import subprocess
from dataclasses import dataclass
from typing import Final

from .doctor_findings import Finding, fail, ok, skipped, warn

FIELDS: Final = (
    "index",
    "name",
    "driver_version",
    "pcie.link.gen.current",
    "pcie.link.gen.max",
    "pcie.link.width.current",
    "pcie.link.width.max",
    "pci.bus_id",
)
TIMEOUT_S: Final = 30.0


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU as the driver describes it. A generation or width is None where it is not told."""

    index: int
    name: str
    driver: str
    generation: int | None
    max_generation: int | None
    width: int | None
    max_width: int | None
    bus_id: str


def ask_driver() -> list[Gpu] | str:
    """The GPUs here, or why they cannot be asked for."""
    command = shutil.which("nvidia-smi")
    if command is None:
        return "nvidia-smi is not on the path"
    query = [command, f"--query-gpu={','.join(FIELDS)}", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"nvidia-smi does not answer: {error}"
    if answer.returncode:
        return f"nvidia-smi failed: {(answer.stderr or answer.stdout).strip()}"
    return parse_gpus(answer.stdout)


def parse_gpus(text: str) -> list[Gpu]:
    """The GPUs from the driver's CSV, a line each, in the order of ``FIELDS``."""
    gpus = []
    for row in csv.reader(text.splitlines(), skipinitialspace=True):
        if len(row) != len(FIELDS):
            raise ValueError(f"nvidia-smi said {row}; expected: {', '.join(FIELDS)}")
        gen, max_gen, width, max_width = (
            int(value) if value.isdigit() else None for value in row[3:7]
        )
        gpus.append(Gpu(int(row[0]), row[1], row[2], gen, max_gen, width, max_width, row[7]))
    return gpus


def check_gpus(gpus: list[Gpu] | str, torch_sees: int) -> list[Finding]:
    """GPU, driver and link of each. ``torch_sees``: how many devices torch can use."""
    if isinstance(gpus, str) or not gpus:
        why = gpus if isinstance(gpus, str) else "the driver knows no GPU"
        advice = "run this where the GPU is: a CPU engine needs none"
        return [skipped("GPU", why, advice), skipped("GPU link", why)]
    return [_usable(gpus, torch_sees), *(_link(gpu) for gpu in gpus)]


def _usable(gpus: list[Gpu], torch_sees: int) -> Finding:
    names = ", ".join(f"{gpu.index}: {gpu.name}" for gpu in gpus)
    found = f"{names}; driver {gpus[0].driver}"
    if torch_sees == 0:
        return fail(
            "GPU",
            f"{found}; torch can use none of them",
            "install a CUDA build of torch that this driver supports; look at CUDA_VISIBLE_DEVICES",
        )
    return ok("GPU", f"{found}; torch sees {torch_sees}")


def _link(gpu: Gpu) -> Finding:
    check = f"GPU {gpu.index} link"
    if None in (gpu.generation, gpu.max_generation, gpu.width, gpu.max_width):
        return skipped(check, "the driver does not tell (no PCIe link of its own?)")
    found = (
        f"PCIe gen {gpu.generation} x{gpu.width} now, gen {gpu.max_generation} x{gpu.max_width}"
        f" at most ({gpu.bus_id})"
    )
    if gpu.width != gpu.max_width:
        return warn(check, found, "fewer lanes than the card has: look at its slot and its riser")
    if gpu.generation != gpu.max_generation:
        return warn(
            check,
            found,
            "an idle GPU lowers its link: look again under load (nvidia-smi -q -d PCIE); if it"
            " stays low, look at the firmware's PCIe settings",
        )
    return ok(check, found)
