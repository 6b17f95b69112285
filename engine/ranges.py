"""What the engine tells of itself while it runs; nothing at all when nobody listens.

Three kinds of things are told: a *span* is a range around a block of code, a *stretch* is one whose
beginning and end stand in different functions, a *mark* is a moment. Under NVIDIA's tools they go
to NVTX, in the domain ``kvferry``; a recorder that was added with ``heard_by`` hears the same.
Without a listener each of them is one look at an empty tuple.
"""

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

DOMAIN = "kvferry"

Fields = dict[str, object]


class Listener(Protocol):
    """Is called on the thread on which something happens, so perhaps by several at once."""

    def span(self, name: str, fields: Fields) -> contextlib.AbstractContextManager[None]: ...

    def begin(self, name: str, fields: Fields) -> Callable[[], None]:
        """A stretch begins; what is returned is called once, when it ends."""
        ...

    def mark(self, name: str, fields: Fields) -> None: ...


class Nvtx:
    """Everything as NVTX has it: the fields stand in the message."""

    def __init__(self) -> None:
        import nvtx  # type: ignore[import-untyped]

        self._nvtx: Any = nvtx

    def span(self, name: str, fields: Fields) -> contextlib.AbstractContextManager[None]:
        annotated: contextlib.AbstractContextManager[None] = self._nvtx.annotate(
            _message(name, fields), domain=DOMAIN
        )
        return annotated

    def begin(self, name: str, fields: Fields) -> Callable[[], None]:
        begun = self._nvtx.start_range(_message(name, fields), domain=DOMAIN)
        return lambda: self._nvtx.end_range(begun)

    def mark(self, name: str, fields: Fields) -> None:
        self._nvtx.mark(_message(name, fields), domain=DOMAIN)


def _message(name: str, fields: Fields) -> str:
    return " ".join([name, *(f"{key}={value}" for key, value in fields.items())])


def listeners_at_start(environment: Mapping[str, str]) -> tuple[Listener, ...]:
    """NVTX where NVIDIA's tools have set these in the process they start: else a range goes
    nowhere."""
    injected = ("NVTX_INJECTION64_PATH", "NVTX_INJECTION32_PATH")
    return (Nvtx(),) if any(environment.get(name) for name in injected) else ()


_listeners: tuple[Listener, ...] = listeners_at_start(os.environ)
_NOTHING = contextlib.nullcontext()


@contextlib.contextmanager
def heard_by(listener: Listener) -> Iterator[None]:
    """Tell ``listener`` too, of what begins on any thread while the block runs."""
    global _listeners
    _listeners = (*_listeners, listener)
    try:
        yield
    finally:
        _listeners = tuple(one for one in _listeners if one is not listener)


def anyone_listens() -> bool:
    return bool(_listeners)


def span(name: str, **fields: object) -> contextlib.AbstractContextManager[None]:
    """A range called ``name`` around a block.

    A field may be a function without arguments that gives the value: called for a listener only.
    """
    if not _listeners:
        return _NOTHING
    return _span(_listeners, name, _known(fields))


@contextlib.contextmanager
def _span(listeners: tuple[Listener, ...], name: str, fields: Fields) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for listener in listeners:
            stack.enter_context(listener.span(name, fields))
        yield


def mark(name: str, **fields: object) -> None:
    """Something happened just now. Fields are as those of ``span``."""
    if _listeners:
        known = _known(fields)
        for listener in _listeners:
            listener.mark(name, known)


class Stretch:
    """A range called ``name`` that one function begins and another ends; not two at a time."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._ends: list[Callable[[], None]] = []

    def begin(self, **fields: object) -> None:
        """It begins; one that is still open ends here. Fields are as those of ``span``."""
        self.end()
        if _listeners:
            known = _known(fields)
            self._ends = [listener.begin(self._name, known) for listener in _listeners]

    def end(self) -> None:
        """It ends, if it has begun."""
        if self._ends:
            ends, self._ends = self._ends, []
            for end in ends:
                end()


def _known(fields: Fields) -> Fields:
    return {key: value() if callable(value) else value for key, value in fields.items()}
