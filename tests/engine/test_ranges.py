"""NVTX ranges: nothing without a listener, all fields in the domain kvferry with one."""

import contextlib

import nvtx
import pytest
from kvferry.engine import ranges


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
    with ranges.span("launch", job=7, bytes=64):
        pass
    assert seen == [("launch job=7 bytes=64", "kvferry")]


def test_the_real_package_takes_a_range(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranges, "LISTENING", True)
    with ranges.span("launch", job=7):
        pass
