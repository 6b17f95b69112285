"""Lets a second vLLM engine start in a process that has numba loaded.

llvmlite's library proxy answers every name, ``__dict__`` too, with a function. Who looks through
all modules for values with a ``__dict__`` stumbles over that: vLLM's CPU build does when a second
engine starts, and stops with an AttributeError (seen with vLLM 0.32 and llvmlite 0.47).
"""

from typing import Any


def answer_no_special_names() -> None:
    """Make llvmlite's proxy say that it has no ``__dict__``; may be repeated. Needs llvmlite."""
    from llvmlite.binding import ffi  # type: ignore[import-untyped]

    proxy = type(ffi.lib)
    if not hasattr(ffi.lib, "__dict__"):
        return
    answer = proxy.__getattr__

    def __getattr__(self: Any, name: str) -> Any:  # noqa: N807
        if name.startswith("__"):
            raise AttributeError(name)
        return answer(self, name)

    proxy.__getattr__ = __getattr__
