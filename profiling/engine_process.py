"""A vLLM engine in a process of its own: sides of a comparison that share nothing.

Memory, caches and threads are apart, and an engine that nobody asks sleeps at the end of a pipe.
The processes are forked by a server that has imported vLLM and done nothing else.
"""

import multiprocessing
import os
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Final, Generic, Self, TypeVar, cast

from ..demo.engine import EngineSetup, InProcessEngine

Asked = TypeVar("Asked")
Taken = TypeVar("Taken")

ANSWER_DEADLINE_S: Final = 600.0
_JOIN_S: Final = 30.0
_UP: Final = "up"


class EngineFailedError(RuntimeError):
    """An engine did not start or did not answer; ``reason`` is one line, what vLLM said."""

    def __init__(self, reason: str, details: str = "") -> None:
        super().__init__(f"{reason}\n{details}" if details else reason)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class _Failure:
    """What goes through the pipe in place of an answer."""

    reason: str
    details: str


class EngineProcess(Generic[Asked, Taken]):
    """An engine that starts at once, and then runs ``run(engine, asked)`` whenever it is called.

    ``run``, what it is given and what it returns cross a pipe, so they have to be picklable. What
    the process prints goes to standard error. Closing can be repeated.
    """

    def __init__(self, setup: EngineSetup, run: Callable[[InProcessEngine, Asked], Taken]) -> None:
        # Threads that spin while they wait take the processor from other sides and from transfers.
        # The server takes its environment from here when it starts, before torch's threads do.
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
        # Run from the root of a checkout, it would take our kernels/ for the package of that name.
        os.environ.setdefault("PYTHONSAFEPATH", "1")
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["kvferry.profiling.engine_preload"])
        self._pipe, there = context.Pipe()
        self._process = context.Process(target=_serve, args=(there, setup, run), daemon=True)
        self._process.start()
        there.close()

    def wait_until_up(self) -> None:
        """Raises ``EngineFailedError`` when the engine does not start."""
        self._receive()

    def __call__(self, asked: Asked) -> Taken:
        """Raises ``EngineFailedError`` when the engine does not answer."""
        self._pipe.send(asked)
        return cast(Taken, self._receive())

    def _receive(self) -> object:
        name = f"the engine in process {self._process.pid}"
        try:
            if not self._pipe.poll(ANSWER_DEADLINE_S):
                raise EngineFailedError(f"{name} did not answer in {ANSWER_DEADLINE_S:g} s")
            answer = self._pipe.recv()
        except (EOFError, ConnectionError):
            raise EngineFailedError(f"{name} ended") from None
        if isinstance(answer, _Failure):
            raise EngineFailedError(answer.reason, answer.details)
        return answer

    def close(self) -> None:
        """End the process: it reads the end of the pipe, and is stopped if that does not help."""
        self._pipe.close()
        self._process.join(_JOIN_S)
        if self._process.is_alive():
            self._process.terminate()
            self._process.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _serve(
    pipe: Connection,
    setup: EngineSetup,
    run: Callable[[InProcessEngine, object], object],
) -> None:
    os.dup2(2, 1)  # standard output is for results
    try:
        with InProcessEngine(setup) as engine:
            pipe.send(_UP)
            while True:
                try:
                    asked = pipe.recv()
                except EOFError:
                    return
                pipe.send(run(engine, asked))
    except Exception as error:
        reason = f"{type(error).__name__}: {str(error).strip()}"
        with suppress(OSError):  # nobody may be left to hear it
            pipe.send(_Failure(reason.splitlines()[0], traceback.format_exc()))
