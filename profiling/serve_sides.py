"""The sides of the serving benchmark: engines that differ in their connector only."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any, Final

from ..demo.engine import EngineSetup, kv_transfer_of
from .engine_process import EngineFailedError, EngineProcess
from .serve_client import Played, Wave, play

PLAIN: Final = "without"
GPU_SHARE: Final = 0.9
"""Of a GPU's memory, for all sides together: their engines are all up."""


@dataclass(frozen=True, slots=True)
class SideKind:
    """A side: ``label`` in tables; ``connector`` is a class name of kvferry's or of vLLM's."""

    label: str
    connector: str | None = None
    is_ours: bool = False

    def setup(
        self, plain: EngineSetup, host_bytes: int, our_options: Mapping[str, Any]
    ) -> EngineSetup:
        """The engine of this side. All connectors get the same host memory and else defaults."""
        if self.connector is None:
            return plain
        options = our_options if self.is_ours else {}
        transfer = kv_transfer_of(self.connector, cpu_bytes_to_use=host_bytes, **options)
        return replace(plain, kv_transfer=transfer)


SIDES: Final = {
    PLAIN: SideKind("without"),
    "kvferry-offloading": SideKind("kvferry offloading", "KVFerryOffloadingConnector", True),
    "kvferry-simple": SideKind("kvferry simple", "KVFerrySimpleConnector", True),
    "vllm-offloading": SideKind("vLLM offloading", "OffloadingConnector"),
    "vllm-simple": SideKind("vLLM simple", "SimpleCPUOffloadConnector"),
}
QUICK_SIDES: Final = (PLAIN, "kvferry-offloading", "vllm-offloading")

Side = EngineProcess[Wave, Played]


@contextmanager
def running(
    names: Sequence[str],
    plain: EngineSetup,
    host_bytes: int,
    our_options: Mapping[str, Any],
    *,
    at_once: bool,
) -> Iterator[tuple[dict[str, Side], dict[str, str]]]:
    """Engines for the named sides, and why those of vLLM's connectors that do not run do not.

    ``at_once``: all engines start at the same time. vLLM measures a GPU's free memory while it
    starts, so there they start one after the other. Raises ``EngineFailedError`` when a side that
    is not vLLM's does not start.
    """
    with ExitStack() as stack:
        sides: dict[str, Side] = {}
        refused: dict[str, str] = {}

        def wait_for(name: str, side: Side) -> None:
            try:
                side.wait_until_up()
                sides[name] = side
            except EngineFailedError as error:
                if SIDES[name].connector is None or SIDES[name].is_ours:
                    raise
                refused[name] = error.reason
                side.close()

        started: dict[str, Side] = {}
        for name in names:
            setup = SIDES[name].setup(plain, host_bytes, our_options)
            started[name] = stack.enter_context(EngineProcess(setup, play))
            if not at_once:
                wait_for(name, started[name])
        if at_once:
            for name, side in started.items():
                wait_for(name, side)
        yield sides, refused
