"""vLLM's real OpenAI server in a process of its own, on loopback, with kvferry on."""

import contextlib
import json
import os
import queue
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

START_S = 240.0
"""Enough for a machine that is busy with other things; a quiet one takes a tenth."""

END_S = 30.0
HTTP_S = 120.0
LOOK_S = 0.05
READY = "Application startup complete"
MODEL_NAME = "tiny"

_SAMPLE = re.compile(r"([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)(?: \d+)?")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')

Samples = dict[str, list[tuple[dict[str, str], float]]]
"""By name: labels and value of every time series."""


@dataclass(frozen=True)
class Server:
    """One that answers at ``address``."""

    address: str

    def complete(self, prompt: Sequence[int], *, max_tokens: int = 4) -> list[int]:
        """Token ids of a greedy answer."""
        body = {
            "model": MODEL_NAME,
            "prompt": list(prompt),
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        (choice,) = self._post("/v1/completions", body)["choices"]
        tokens: list[int] = choice["token_ids"]
        return tokens

    def reset_gpu_cache(self) -> None:
        """vLLM's own prefix cache, which only a server in development mode lets go of."""
        self._post("/reset_prefix_cache", None)

    def metrics(self) -> Samples:
        with urllib.request.urlopen(f"{self.address}/metrics", timeout=HTTP_S) as answer:
            return samples_of(answer.read().decode())

    def metrics_when(self, condition: Callable[[Samples], bool]) -> Samples:
        """The first that meet the condition; asked for until ``HTTP_S`` are over."""
        deadline = time.monotonic() + HTTP_S
        while not condition(now := self.metrics()):
            if time.monotonic() > deadline:
                raise AssertionError(f"the metrics do not settle: {now}")
            threading.Event().wait(LOOK_S)
        return now

    def _post(self, path: str, body: dict[str, Any] | None) -> Any:
        request = urllib.request.Request(
            self.address + path,
            data=b"" if body is None else json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=HTTP_S) as answer:
            text = answer.read()
        return json.loads(text) if text else None


def samples_of(text: str) -> Samples:
    """What the text of a ``/metrics`` page says."""
    found: Samples = {}
    for line in text.splitlines():
        if match := _SAMPLE.fullmatch(line.strip()):
            labels = dict(_LABEL.findall(match[2] or ""))
            found.setdefault(match[1], []).append((labels, float(match[3])))
    return found


@contextlib.contextmanager
def openai_server(model: Path, transfer_config: dict[str, Any], *options: str) -> Iterator[Server]:
    """A server of ``model``, ended with all its processes when the block is left.

    Raises AssertionError, with the last it has said, when it ends or is not ready in time.
    """
    port = free_port()
    command = [sys.executable, "-P", "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--host", "127.0.0.1", "--port", str(port), "--model", str(model)]
    command += ["--served-model-name", MODEL_NAME, "--dtype", "float32", "--enforce-eager"]
    command += ["--kv-transfer-config", json.dumps(transfer_config), *options]
    environment = {
        **os.environ,
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_SERVER_DEV_MODE": "1",
        "HF_HUB_OFFLINE": "1",
        "PYTHONHASHSEED": "0",
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": "1",
        "OMP_WAIT_POLICY": "PASSIVE",
    }
    with running(command, environment, READY, START_S):
        yield Server(f"http://127.0.0.1:{port}")


@contextlib.contextmanager
def running(
    command: Sequence[str], environment: dict[str, str], ready: str, start_s: float
) -> Iterator[int]:
    """The group of a process that has said ``ready``; ended as a whole, however the block ends."""
    process = subprocess.Popen(
        command,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        text=True,
        errors="replace",
        start_new_session=True,  # a group of its own
    )
    said = _Said(process)
    try:
        said.wait_for(ready, start_s)
        yield process.pid
    finally:
        _end(process)
        said.close()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


class _Said:
    """What the process says, read on a thread: else it would block once the pipe is full."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self._lines: queue.Queue[str | None] = queue.Queue()
        self._last: list[str] = []
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put(None)

    def wait_for(self, words: str, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while (left := deadline - time.monotonic()) > 0:
            # A child may hold the pipe open when the process itself has ended.
            ended = self._process.poll() is not None
            try:
                line = self._lines.get(timeout=min(left, 1.0))
            except queue.Empty:
                line = None if ended else ""
            if line is None:
                raise AssertionError("it ended:\n" + "".join(self._last))
            self._last = [*self._last[-60:], line]
            if words in line:
                return
        raise AssertionError(f"not ready in {timeout_s} s:\n" + "".join(self._last))

    def close(self) -> None:
        """To be called when all is ended: then nobody holds the pipe any more."""
        self._thread.join(END_S)
        assert not self._thread.is_alive(), "a process is left that was to be ended"
        assert self._process.stdout is not None
        self._process.stdout.close()


def _end(process: subprocess.Popen[str]) -> None:
    """Ask the server to end, then end whatever is left of its group."""
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(END_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(END_S)
