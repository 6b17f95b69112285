"""vLLM's Python sources, read and not imported: of the installed release and of the next one.

The next one's files come from ``make vllm-next``; nothing of it can be installed here.
"""

import ast
import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

NEXT = "0.33.0"
NEXT_FOLDER = Path(__file__).resolve().parents[2] / ".cache" / f"vllm-{NEXT}" / "vllm"
NO_NEXT = f"the sources of vLLM {NEXT} are not here: make vllm-next fetches them"

Function = ast.FunctionDef | ast.AsyncFunctionDef


def installed_folder() -> Path:
    spec = importlib.util.find_spec("vllm")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


@cache
def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def module_file(folder: Path, module: str) -> Path | None:
    """The file of ``vllm.x.y`` under ``folder``; None when there is none."""
    path = folder.joinpath(*module.split(".")[1:])
    for candidate in (path.with_suffix(".py"), path / "__init__.py"):
        if candidate.exists():
            return candidate
    return None


@dataclass(frozen=True)
class Hook:
    """A method as a class body writes it. ``arguments`` leaves ``self`` and ``cls`` out."""

    name: str
    kind: str  # "method", "classmethod", "staticmethod" or "property"
    abstract: bool
    arguments: ast.arguments


def class_node(folder: Path, module: str, name: str) -> ast.ClassDef:
    path = module_file(folder, module)
    assert path is not None, f"{module} is not in {folder}"
    for node in parse(path).body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            return node
    raise AssertionError(f"{module} has no class {name} in {folder}")


def hooks_of(node: ast.ClassDef) -> dict[str, Hook]:
    return {item.name: _hook(item) for item in node.body if isinstance(item, Function)}


def _hook(function: Function) -> Hook:
    marks = {ast.unparse(mark).rsplit(".", 1)[-1] for mark in function.decorator_list}
    kinds = marks & {"classmethod", "staticmethod", "property"}
    kind = kinds.pop() if kinds else "property" if "cached_property" in marks else "method"
    arguments = function.args
    if kind != "staticmethod":
        both = [*arguments.posonlyargs, *arguments.args][1:]
        arguments = ast.arguments(
            [], both, arguments.vararg, arguments.kwonlyargs, arguments.kw_defaults,
            arguments.kwarg, arguments.defaults,
        )  # fmt: skip
    return Hook(function.name, kind, "abstractmethod" in marks, arguments)


def names_of_class(folder: Path, module: str, name: str) -> set[str]:
    """Fields, methods and ``self`` attributes that a class has by its own body."""
    node = class_node(folder, module, name)
    found = set(hooks_of(node))
    for item in ast.walk(node):
        if isinstance(item, ast.Attribute) and isinstance(item.value, ast.Name):
            if item.value.id == "self" and isinstance(item.ctx, ast.Store):
                found.add(item.attr)
        elif isinstance(item, ast.AnnAssign | ast.Assign):
            targets = item.targets if isinstance(item, ast.Assign) else [item.target]
            found |= {target.id for target in targets if isinstance(target, ast.Name)}
    return found


def names_of_module(path: Path) -> set[str]:
    """What ``from module import ...`` finds in a module, imports of its own included."""
    found: set[str] = set()
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.ClassDef | Function):
            found.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {target.id for target in targets if isinstance(target, ast.Name)}
    return found


def imports_of_vllm(path: Path) -> Iterator[tuple[str, str]]:
    """(module, name) for everything that a file of ours imports from vLLM."""
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm":
            for alias in node.names:
                yield str(node.module), alias.name


def option_names(path: Path) -> set[str]:
    """Keys that a file reads from a dict called ``extra_config``."""
    found: set[str] = set()
    for node in ast.walk(parse(path)):
        key: ast.expr | None = None
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args:
            if node.func.attr in ("get", "pop", "setdefault") and _is_options(node.func.value):
                key = node.args[0]
        elif isinstance(node, ast.Subscript) and _is_options(node.value):
            key = node.slice
        elif isinstance(node, ast.Compare) and _is_options(node.comparators[0]):
            key = node.left
        if isinstance(key, ast.Constant) and isinstance(key.value, str):
            found.add(key.value)
    return found


def _is_options(node: ast.expr) -> bool:
    return ast.unparse(node).rsplit(".", 1)[-1].endswith("extra_config")
