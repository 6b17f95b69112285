"""What the engine tells of itself: nothing without a listener, everything to every one."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import nvtx
import pytest
from kvferry.engine import ranges
from kvferry.engine.ranges import Nvtx, Stretch, listeners_at_start
from kvferry.engine.strategy import Method, Strategy
from kvferry.engine.types import Direction


class Heard:
    """A listener that keeps what it was told, in order."""

    def __init__(self) -> None:
        self.told: list[tuple[str, str, dict[str, object]]] = []

    @contextlib.contextmanager
    def span(self, name: str, fields: dict[str, object]) -> Iterator[None]:
        self.told.append(("span", name, fields))
        try:
            yield
        finally:
            self.told.append(("span ends", name, {}))

    def begin(self, name: str, fields: dict[str, object]) -> Callable[[], None]:
        self.told.append(("begin", name, fields))
        return lambda: self.told.append(("end", name, {}))

    def mark(self, name: str, fields: dict[str, object]) -> None:
        self.told.append(("mark", name, fields))

    def spans(self) -> list[tuple[str, dict[str, object]]]:
        return [(name, fields) for kind, name, fields in self.told if kind == "span"]


@pytest.fixture(autouse=True)
def nobody_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the tests themselves run under a profiler."""
    monkeypatch.setattr(ranges, "_listeners", ())


@pytest.fixture
def heard() -> Iterator[Heard]:
    listener = Heard()
    with ranges.heard_by(listener):
        yield listener


def tell_of_everything(field: object) -> None:
    stretch = Stretch("step")
    stretch.begin(number=field)
    with ranges.span("submit", bytes=field):
        ranges.mark("done", job=field)
    stretch.end()
    stretch.end()


def test_nothing_is_made_or_asked_for_when_nobody_listens() -> None:
    def field() -> int:
        raise AssertionError("asked for a field that nobody hears")

    assert ranges.span("flush", job=1) is ranges.span("plan")
    assert not ranges.anyone_listens()
    tell_of_everything(field)


def test_a_listener_hears_everything_in_order_and_then_nothing() -> None:
    heard, other = Heard(), Heard()
    asked: list[int] = []

    def field() -> int:
        asked.append(1)
        return 64

    with ranges.heard_by(other):
        with ranges.heard_by(heard):
            assert ranges.anyone_listens()
            tell_of_everything(field)
        assert len(asked) == 3  # once each, for both listeners
        assert heard.told == [
            ("begin", "step", {"number": 64}),
            ("span", "submit", {"bytes": 64}),
            ("mark", "done", {"job": 64}),
            ("span ends", "submit", {}),
            ("end", "step", {}),
        ]
        assert other.told == heard.told
        tell_of_everything(1)
    tell_of_everything(1)
    assert (len(heard.told), len(other.told)) == (5, 10)


def test_a_range_ends_when_its_block_fails(heard: Heard) -> None:
    with pytest.raises(ValueError, match="broken"), ranges.span("submit"):
        raise ValueError("broken")
    assert [kind for kind, _, _ in heard.told] == ["span", "span ends"]


def test_a_stretch_that_begins_again_has_ended(heard: Heard) -> None:
    stretch = Stretch("compute")
    stretch.begin()
    stretch.begin()
    assert [kind for kind, _, _ in heard.told] == ["begin", "end", "begin"]


def test_a_stretch_ends_for_those_who_heard_its_beginning() -> None:
    stretch, heard = Stretch("compute"), Heard()
    stretch.begin()
    with ranges.heard_by(heard):
        stretch.end()
        stretch.begin()
    stretch.end()
    assert [kind for kind, _, _ in heard.told] == ["begin", "end"]


def test_nvtx_has_the_fields_in_the_message_and_our_domain(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[Any] = []

    def annotate(message: str, domain: str) -> contextlib.AbstractContextManager[None]:
        seen.append((message, domain))
        return contextlib.nullcontext()

    def start_range(message: str, domain: str) -> int:
        seen.append((message, domain))
        return 5

    monkeypatch.setattr(nvtx, "annotate", annotate)
    monkeypatch.setattr(nvtx, "start_range", start_range)
    monkeypatch.setattr(nvtx, "end_range", seen.append)
    monkeypatch.setattr(nvtx, "mark", lambda message, domain: seen.append((message, domain)))
    with ranges.heard_by(Nvtx()):
        tell_of_everything(64)
    assert seen == [
        ("step number=64", "kvferry"),
        ("submit bytes=64", "kvferry"),
        ("done job=64", "kvferry"),
        5,
    ]


def test_the_real_nvtx_takes_everything() -> None:
    with ranges.heard_by(Nvtx()):
        tell_of_everything(7)


@pytest.mark.parametrize("width", [32, 64])
def test_nvtx_listens_where_a_profiler_has_started_the_process(width: int) -> None:
    (listener,) = listeners_at_start({f"NVTX_INJECTION{width}_PATH": "/tool.so"})
    assert isinstance(listener, Nvtx)
    assert listeners_at_start({f"NVTX_INJECTION{width}_PATH": ""}) == ()


def test_a_step_and_the_end_of_each_job_are_told(make_rig, heard: Heard) -> None:
    rig = make_rig(staging_blocks=1)
    rig.engine.begin_step()
    rig.store(1, [0, 1], [0])
    rig.simulation.run_all()
    rig.engine.poll()
    rig.engine.poll()
    outer = [(kind, name) for kind, name, _ in heard.told if name in ("step", "done")]
    assert outer == [("begin", "step"), ("mark", "done"), ("end", "step")]
    (done,) = [fields for _, name, fields in heard.told if name == "done"]
    told = {key: done[key] for key in ("job", "rank", "direction", "bytes", "error")}
    assert told == {"job": 1, "rank": 0, "direction": "store", "bytes": 192, "error": None}
    assert isinstance(done["device_s"], float)
    assert done["strategy"]


@pytest.mark.parametrize("direction", list(Direction))
@pytest.mark.parametrize("method", [Method.ZERO_COPY, Method.PACKED, Method.COPY_ENGINE])
def test_every_range_tells_job_direction_bytes_and_strategy(
    make_rig, heard: Heard, method: Method, direction: Direction
) -> None:
    rig = make_rig(method=method, staging_blocks=1)
    rig.store(1, [0, 1], [0])
    rig.finish()
    gate = rig.simulation.hold_when(lambda operation: operation.stream.startswith(direction))
    heard.told.clear()
    if direction is Direction.STORE:
        rig.store(7, [0, 1], [1])
    else:
        rig.load(7, [2, 3], [0])
    rig.flush(7)
    gate.open()
    rig.simulation.run_all()
    seen = heard.spans()
    job = {"job": 7, "direction": direction, "bytes": 192}
    about = {"strategy": Strategy(method)}
    assert ("plan", job) in seen
    assert ("submit", job | about) in seen
    assert (
        "flush",
        {
            "jobs": "7",
            "direction": direction.value,
            "bytes": 192,
            "strategy": str(method),
        },
    ) in seen
    inner = [(name, fields) for name, fields in seen if name in ("kernel", "dma")]
    assert all(
        fields.items() >= ({"job": 7, "direction": direction} | about).items()
        for _, fields in inner
    )
    moving = {
        Method.ZERO_COPY: [("kernel", direction.value)],
        Method.PACKED: [
            ("kernel", "pack" if direction is Direction.STORE else "unpack"),
            ("dma", None),
        ],
        Method.COPY_ENGINE: [("dma", None)],
    }[method]
    for name, operation in moving:
        sizes = [
            fields["bytes"]
            for kind, fields in inner
            if kind == name and fields.get("of") == operation
        ]
        assert sum(sizes) == 192, (name, inner)
