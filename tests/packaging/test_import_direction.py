"""Imports point one way: integration/vllm -> engine -> kernels; the scheduler half knows no torch,
and the two halves of the engine know each other only by the words that they share.

Read with ``ast``, so an import inside a function counts as well.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

WORKER_HALF = {
    "arena",
    "capacity",
    "devices",
    "health",
    "holds",
    "layout",
    "mapping",
    "measure",
    "options",
    "pieces",
    "ranges",
    "running",
    "strategy",
    "transfer",
}
"""Modules (and packages) of ``engine`` that may use torch and numpy; all others stay plain Python,
so that a new module has to be listed before it may."""

SHARED = {"errors", "messages", "types"}
"""Where the two halves of ``engine`` meet, and nowhere else."""

HEAVY = ("torch", "triton", "numpy", "numba", "vllm")


def package_of(path: Path, root: Path) -> list[str]:
    """The dotted package that the module at ``path`` lies in, as a list."""
    relative = path.relative_to(root).parent.parts
    if relative[:2] == ("src", "kvferry"):
        relative = relative[2:]
    return ["kvferry", *relative]


def imports_of(source: str, package: list[str]) -> Iterator[str]:
    """Absolute names of everything that ``source`` imports, also late and by string literal."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            yield from (f"{module}.{alias.name}" for alias in node.names)
        elif (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name | ast.Attribute)
            and (node.func.id if isinstance(node.func, ast.Name) else node.func.attr)
            in ("import_module", "__import__")
            and node.args
            and isinstance(node.args[0], ast.Constant)
            and isinstance(node.args[0].value, str)
        ):
            name = node.args[0].value
            level = len(name) - len(name.lstrip("."))
            base = package[: len(package) - level + 1] if level else []
            yield ".".join([*base, name.lstrip(".")])


def scheduler_half() -> list[str]:
    """The modules of ``engine`` that hold the scheduler's state."""
    units = {path.name.removesuffix(".py") for path in (ROOT / "engine").iterdir()}
    return sorted(units - WORKER_HALF - SHARED - {"__init__", "__pycache__"})


def breaches(name: str, forbidden: tuple[str, ...]) -> bool:
    return any(name == prefix or name.startswith(f"{prefix}.") for prefix in forbidden)


def forbidden_for(path: Path) -> tuple[str, ...]:
    """The names that the module at ``path`` (relative to the root) must not import."""
    top = path.parts[0]
    if top == "kernels":
        return ("vllm", "kvferry.engine", "kvferry.integration", "kvferry.profiling")
    if top == "engine":
        above = ("vllm", "kvferry.integration", "kvferry.profiling")
        unit = path.parts[1].removesuffix(".py")
        if unit in WORKER_HALF:
            return (*above, *(f"kvferry.engine.{name}" for name in scheduler_half()))
        worker = (f"kvferry.engine.{name}" for name in sorted(WORKER_HALF))
        return (*above, *HEAVY, "kvferry.kernels", *worker)
    if top == "integration":
        return ("kvferry.profiling",)
    return ()


def all_modules() -> list[Path]:
    return sorted(
        path.relative_to(ROOT)
        for name in ("kernels", "engine", "integration")
        for path in (ROOT / name).rglob("*.py")
    )


@pytest.mark.parametrize("path", all_modules(), ids=str)
def test_imports_point_one_way(path: Path) -> None:
    source = (ROOT / path).read_text()
    names = imports_of(source, package_of(ROOT / path, ROOT))
    wrong = sorted(name for name in names if breaches(name, forbidden_for(path)))
    hint = "a new module of the engine's worker half has to be listed in WORKER_HALF here"
    assert not wrong, f"{path} must not import {wrong} ({hint})"


@pytest.mark.parametrize(
    ("path", "source", "name"),
    [
        ("engine/transfer.py", "def late():\n    import vllm.config\n", "vllm.config"),
        ("engine/ledger.py", "import torch", "torch"),
        ("engine/jobs.py", "from torch import Tensor", "torch.Tensor"),
        ("engine/core.py", "from ..kernels import table", "kvferry.kernels.table"),
        ("engine/brand_new.py", "import numpy as np", "numpy"),
        ("engine/transfer.py", "from .ledger import Ledger", "kvferry.engine.ledger.Ledger"),
        ("engine/planner.py", "from .arena import Arena", "kvferry.engine.arena.Arena"),
        ("engine/devices/cuda.py", "from ...integration import vllm", "kvferry.integration.vllm"),
        ("kernels/copy/op.py", "from ...engine.types import JobId", "kvferry.engine.types.JobId"),
        ("kernels/aot.py", "import importlib\nimportlib.import_module('vllm')", "vllm"),
        (
            "integration/vllm/plugin.py",
            "from importlib import import_module\nimport_module('...profiling', __package__)",
            "kvferry.profiling",
        ),
    ],
)
def test_a_wrong_import_is_seen(path: str, source: str, name: str) -> None:
    found = [
        imported
        for imported in imports_of(source, package_of(ROOT / path, ROOT))
        if breaches(imported, forbidden_for(Path(path)))
    ]
    assert found == [name]
