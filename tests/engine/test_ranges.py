"""NVTX ranges: nothing without a listener, all fields in the domain kvferry with one."""

import contextlib

import nvtx
import pytest
from kvferry.engine import ranges
from kvferry.engine.strategy import Method, Strategy
from kvferry.engine.types import Direction


def test_nothing_is_made_when_nothing_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranges, "LISTENING", False)
    assert ranges.span("flush", job=1) is ranges.span("plan")


def test_a_listener_sees_name_fields_and_domain(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def annotate(message: str, domain: str) -> contextlib.AbstractContextManager[None]:
        seen.append((message, domain))
        return contextlib.nullcontext()

    monkeypatch.setattr(ranges, "LISTENING", True)
    monkeypatch.setattr(nvtx, "annotate", annotate)
    with ranges.span("submit", job=7, bytes=64):
        pass
    assert seen == [("submit job=7 bytes=64", "kvferry")]


def test_the_real_package_takes_a_range(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranges, "LISTENING", True)
    with ranges.span("submit", job=7):
        pass


def test_a_field_that_costs_something_is_asked_for_only_by_a_listener(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = []

    def field() -> int:
        asked.append(1)
        return 64

    monkeypatch.setattr(ranges, "LISTENING", False)
    with ranges.span("submit", bytes=field):
        assert not asked
    seen = listen(monkeypatch)
    with ranges.span("submit", bytes=field):
        assert seen == [("submit", {"bytes": 64})]


def listen(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, dict[str, object]]]:
    """Every range from now on: its name and fields."""
    seen: list[tuple[str, dict[str, object]]] = []

    def annotate(name: str, fields: dict[str, object]) -> contextlib.AbstractContextManager[None]:
        seen.append((name, fields))
        return contextlib.nullcontext()

    monkeypatch.setattr(ranges, "LISTENING", True)
    monkeypatch.setattr(ranges, "_annotate", annotate)
    return seen


@pytest.mark.parametrize("direction", list(Direction))
@pytest.mark.parametrize("method", [Method.ZERO_COPY, Method.PACKED, Method.COPY_ENGINE])
def test_every_range_tells_job_direction_bytes_and_strategy(
    make_rig, monkeypatch: pytest.MonkeyPatch, method: Method, direction: Direction
) -> None:
    rig = make_rig(method=method, staging_blocks=1)
    rig.store(1, [0, 1], [0])
    rig.finish()
    gate = rig.simulation.hold_when(lambda operation: operation.stream.startswith(direction))
    seen = listen(monkeypatch)
    if direction is Direction.STORE:
        rig.store(7, [0, 1], [1])
    else:
        rig.load(7, [2, 3], [0])
    rig.flush(7)
    gate.open()
    rig.simulation.run_all()
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
