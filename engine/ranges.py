"""NVTX ranges in the domain ``kvferry``; nothing at all when no profiler listens."""

import contextlib
import os
from collections.abc import Iterator

LISTENING = bool(os.environ.get("NVTX_INJECTION64_PATH") or os.environ.get("NVTX_INJECTION32_PATH"))
"""NVIDIA's tools set these in the process they start; without one a range goes nowhere."""

_NOTHING = contextlib.nullcontext()


def span(name: str, **fields: object) -> contextlib.AbstractContextManager[None]:
    """A range called ``name`` around a block, its message ending in the fields.

    A field may be a function without arguments that gives the value: called for a listener only.
    """
    if not LISTENING:
        return _NOTHING
    known = {key: value() if callable(value) else value for key, value in fields.items()}
    return _annotate(name, known)


@contextlib.contextmanager
def _annotate(name: str, fields: dict[str, object]) -> Iterator[None]:
    import nvtx  # type: ignore[import-untyped]

    message = " ".join([name, *(f"{key}={value}" for key, value in fields.items())])
    with nvtx.annotate(message, domain="kvferry"):
        yield
