"""What is installed is what lies in the folders, and type checkers see the same."""

import importlib.metadata
import os
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("kernels", "engine", "integration", "profiling")


def packages_on_disk(root: Path) -> set[str]:
    """Every folder that holds an ``__init__.py``, as the package name it is installed under."""
    found = set()
    for top, prefix in [(root / "src" / "kvferry", ""), *((root / name, name) for name in FOLDERS)]:
        for marker in top.rglob("__init__.py"):
            parts = marker.parent.relative_to(top).parts
            found.add(".".join(["kvferry", *([prefix] if prefix else []), *parts]))
    return found


def listed_packages(root: Path) -> list[str]:
    with (root / "pyproject.toml").open("rb") as file:
        packages: list[str] = tomllib.load(file)["tool"]["setuptools"]["packages"]
    return packages


def test_every_package_is_listed_once() -> None:
    listed = listed_packages(ROOT)
    assert len(listed) == len(set(listed))
    assert set(listed) == packages_on_disk(ROOT)


def test_a_forgotten_package_is_seen(tmp_path: Path) -> None:
    (tmp_path / "engine" / "fresh").mkdir(parents=True)
    (tmp_path / "engine" / "__init__.py").touch()
    (tmp_path / "engine" / "fresh" / "__init__.py").touch()
    assert packages_on_disk(tmp_path) == {"kvferry.engine", "kvferry.engine.fresh"}


def test_no_module_lies_outside_a_package() -> None:
    for name in FOLDERS:
        for module in (ROOT / name).rglob("*.py"):
            assert (module.parent / "__init__.py").exists(), f"{module} would not be installed"


def test_tests_are_no_packages() -> None:
    assert not list((ROOT / "tests").rglob("__init__.py"))


def test_type_checkers_see_every_file() -> None:
    seen = ROOT / "typings" / "kvferry"
    sources = {
        entry.name: entry
        for entry in (ROOT / "src" / "kvferry").iterdir()
        if entry.suffix == ".py" or (entry / "__init__.py").exists()
    }
    sources |= {name: ROOT / name for name in FOLDERS}
    links = {entry.name: entry for entry in seen.iterdir() if entry.name != "__pycache__"}
    assert set(links) == set(sources), "add a link to typings/kvferry for each file of src/kvferry"
    for name, source in sources.items():
        assert links[name].is_symlink(), f"typings/kvferry/{name} is a copy, not a link"
        target = os.readlink(links[name])
        assert not os.path.isabs(target), f"typings/kvferry/{name} points to an absolute path"
        assert links[name].resolve() == source.resolve()


def test_the_entry_points_can_be_loaded() -> None:
    entry_points = importlib.metadata.distribution("kvferry").entry_points
    named = {(entry.group, entry.name): entry for entry in entry_points}
    assert callable(named["console_scripts", "kvferry"].load())
    assert callable(named["vllm.general_plugins", "kvferry"].load())
