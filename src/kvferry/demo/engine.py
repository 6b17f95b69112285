"""A vLLM engine in this process, stepped by hand, so that its insides can be watched.

Driving the steps here, not through ``LLM.generate``, gives the time of the first token, and lets
the engine be stepped on after its requests are done until it has nothing left.
"""

import gc
import os
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Literal, Self

if TYPE_CHECKING:
    from vllm import LLM
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

ENVIRONMENT: Final = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "HF_HUB_OFFLINE": "1",
    "TQDM_DISABLE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
"""One process, no network, few words; what the user has set already stays."""

SETTLE_DEADLINE_S: Final = 60.0


def prepare_environment() -> None:
    """Set what vLLM reads from the environment; to be called before vLLM is imported."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    # vLLM looks through all loaded modules when a second engine starts, torch's old names too.
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"vllm\.triton_utils")


@dataclass(frozen=True, slots=True)
class Answer:
    """What one request brought: tokens, where its prompt's KV came from, and when."""

    tokens: tuple[int, ...]
    text: str
    first_token_s: float
    num_prompt_tokens: int
    num_from_gpu: int
    num_from_host: int
    prompt_logprobs: tuple[float | None, ...]

    @property
    def num_recomputed(self) -> int:
        return self.num_prompt_tokens - self.num_from_gpu - self.num_from_host


@dataclass(frozen=True, slots=True)
class EngineSetup:
    """How to start an engine. ``kv_transfer`` is vLLM's ``--kv-transfer-config``, None for none;
    ``gpu_memory_share`` the part of a GPU that the engine may take, None for vLLM's default."""

    model: Path
    max_model_len: int
    num_gpu_blocks: int
    block_size: int
    dtype: Literal["float32", "bfloat16"]
    kv_transfer: dict[str, Any] | None = None
    gpu_memory_share: float | None = None


def kv_transfer_of(connector: str, **extra_config: Any) -> dict[str, Any]:
    """A ``--kv-transfer-config`` for one of kvferry's connectors."""
    return {
        "kv_connector": connector,
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": extra_config,
    }


@dataclass(slots=True)
class _Open:
    """A request that is not finished. ``core_id`` is what the engine core calls it."""

    prompt: Sequence[int]
    started: float
    core_id: str = ""
    first_token_s: float | None = None


class InProcessEngine:
    """One vLLM engine and its connector, if it has one. Close it before starting the next.

    Requests are submitted and the engine is stepped until it gives their answers back; ``ask`` does
    both for a request that is alone on the engine.
    """

    def __init__(self, setup: EngineSetup) -> None:
        prepare_environment()
        from vllm import LLM

        self.setup = setup
        share: dict[str, Any] = {}
        if setup.gpu_memory_share is not None:
            share["gpu_memory_utilization"] = setup.gpu_memory_share
        self._llm: LLM | None = LLM(
            model=str(setup.model),
            dtype=setup.dtype,
            max_model_len=setup.max_model_len,
            max_num_batched_tokens=setup.max_model_len,
            max_num_seqs=8,
            block_size=setup.block_size,
            num_gpu_blocks_override=setup.num_gpu_blocks,
            enforce_eager=True,
            enable_prefix_caching=True,
            seed=0,
            kv_transfer_config=setup.kv_transfer,
            use_tqdm_on_load=False,
            **share,
        )
        self._num_requests = 0
        self._open: dict[str, _Open] = {}
        self._prefills: dict[str, Any] = {}
        self._watch_prefills()

    @property
    def llm(self) -> "LLM":
        if self._llm is None:
            raise RuntimeError("the engine is closed")
        return self._llm

    @property
    def _core(self) -> Any:
        return self.llm.llm_engine.engine_core.engine_core  # type: ignore[attr-defined]

    @property
    def connector(self) -> "KVConnectorBase_V1":
        """The scheduler's connector. Raises ``RuntimeError`` when the engine has none."""
        connector: KVConnectorBase_V1 | None = self._core.scheduler.connector
        if connector is None:
            raise RuntimeError("the engine was started without a connector")
        return connector

    @property
    def worker_connector(self) -> "KVConnectorBase_V1":
        """The connector in the worker, which is in this process too."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        return get_kv_transfer_group()

    def _watch_prefills(self) -> None:
        """Keep what the core tells of a request's prefill: the public output only has the sum."""
        client = self.llm.llm_engine.engine_core
        get_output = client.get_output

        def watched() -> Any:
            outputs = get_output()
            for output in outputs.outputs:
                if output.prefill_stats is not None:
                    self._prefills[output.request_id] = output.prefill_stats
            return outputs

        client.get_output = watched  # type: ignore[method-assign]

    def submit(
        self, prompt: Sequence[int], max_tokens: int, *, prompt_logprobs: bool = False
    ) -> str:
        """Queue a request, decoded greedily to its ``max_tokens``; returns its id for ``step``."""
        from vllm import SamplingParams

        params = SamplingParams(
            temperature=0.0,
            max_tokens=max_tokens,
            ignore_eos=True,
            prompt_logprobs=0 if prompt_logprobs else None,
        )
        self._num_requests += 1
        request_id = f"request-{self._num_requests}"
        request = self._open[request_id] = _Open(prompt, time.perf_counter())
        request.core_id = self.llm.llm_engine.add_request(
            request_id, {"prompt_token_ids": list(prompt)}, params
        )
        return request_id

    def step(self) -> dict[str, Answer]:
        """Step the engine once; returns the answers that are complete with it, by request id."""
        answers = {}
        for output in self.llm.llm_engine.step():
            request = self._open[output.request_id]
            if request.first_token_s is None and output.outputs[0].token_ids:  # type: ignore[index]
                request.first_token_s = time.perf_counter() - request.started
            if output.finished:
                answers[output.request_id] = self._answer(output)
        return answers

    def _answer(self, output: Any) -> Answer:
        request = self._open.pop(output.request_id)
        prefill = self._prefills.pop(request.core_id, None)
        if request.first_token_s is None or prefill is None:
            raise RuntimeError(f"{output.request_id} ended without a token")
        return Answer(
            tokens=tuple(output.outputs[0].token_ids),
            text=output.outputs[0].text,
            first_token_s=request.first_token_s,
            num_prompt_tokens=len(request.prompt),
            num_from_gpu=prefill.num_local_cached_tokens,
            num_from_host=prefill.num_external_cached_tokens,
            prompt_logprobs=logprobs_of(request.prompt, output.prompt_logprobs),
        )

    def ask(
        self, prompt: Sequence[int], max_tokens: int, *, prompt_logprobs: bool = False
    ) -> Answer:
        """Run one request greedily to its ``max_tokens``, alone on the engine."""
        request_id = self.submit(prompt, max_tokens, prompt_logprobs=prompt_logprobs)
        while True:
            answers = self.step()
            if request_id in answers:
                return answers[request_id]

    def settle(self, deadline_s: float = SETTLE_DEADLINE_S) -> None:
        """Step until the engine has nothing left. Raises ``TimeoutError`` past the deadline."""
        limit = time.monotonic() + deadline_s
        while self._core.scheduler.has_requests() or self._core.batch_queue:
            if time.monotonic() > limit:
                raise TimeoutError(f"the engine still had work after {deadline_s:g} s")
            self.llm.llm_engine.step()

    def forget(self, *, host_too: bool = True) -> None:
        """Empty the prefix cache and the connector's cache. Raises ``RuntimeError`` if refused."""
        self.settle()
        with_connector = host_too and self.setup.kv_transfer is not None
        if not self.llm.llm_engine.reset_prefix_cache(False, with_connector):
            raise RuntimeError("the engine refused to reset its prefix cache")
        self.settle()

    def close(self) -> None:
        """Shut the engine down and let go of its memory; may be repeated."""
        if self._llm is None:
            return
        llm, self._llm = self._llm, None
        llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def logprobs_of(prompt: Sequence[int], positions: Sequence[Any] | None) -> tuple[float | None, ...]:
    """Each prompt token's own logprob, None where vLLM gave none; empty if none were asked for."""
    return tuple(
        None if candidates is None or token not in candidates else candidates[token].logprob
        for token, candidates in zip(prompt, positions or (), strict=False)
    )
