"""Tiny models with random weights of normal scale, and vLLM's real engine on them, in process.

With vLLM's own dummy weights a corrupted cache moves logprobs by 1e-5 and a comparison of tokens
proves nothing; with these it changes tokens (``test_real_engine`` holds that).
"""

import contextlib
import gc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers
from vllm import LLM, SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory
from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

BLOCK_TOKENS = 32
VOCABULARY = 256
WINDOW_TOKENS = 64

_COMMON = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 2048,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def _llama() -> transformers.PretrainedConfig:
    return transformers.LlamaConfig(**_COMMON)


def _mistral() -> transformers.PretrainedConfig:
    """One group, every layer with a window."""
    return transformers.MistralConfig(**_COMMON, sliding_window=WINDOW_TOKENS)


def _gemma3() -> transformers.PretrainedConfig:
    """Windows and full attention, four layers to two: three groups."""
    return transformers.Gemma3TextConfig(
        **{**_COMMON, "num_hidden_layers": 6},
        layer_types=_kinds("ssfssf"),
        sliding_window=WINDOW_TOKENS,
        query_pre_attn_scalar=32,
    )


def _gpt_oss() -> transformers.PretrainedConfig:
    """Windows and full attention in turn, with attention sinks and experts: two groups."""
    return transformers.GptOssConfig(
        **_COMMON,
        layer_types=_kinds("sfsf"),
        sliding_window=WINDOW_TOKENS,
        num_local_experts=4,
        num_experts_per_tok=2,
    )


def _mla() -> transformers.PretrainedConfig:
    """One latent for all heads. vLLM's CPU backend wants the sizes of DeepSeek's latent, takes
    blocks of 16 tokens, and turns its own prefix cache off for it."""
    return transformers.DeepseekV2Config(
        **{**_COMMON, "num_key_value_heads": 4, "head_dim": 64},
        kv_lora_rank=512,
        q_lora_rank=None,
        qk_rope_head_dim=64,
        qk_nope_head_dim=32,
        v_head_dim=32,
        first_k_dense_replace=4,
        n_routed_experts=4,
        n_shared_experts=1,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
    )


def _granite() -> transformers.PretrainedConfig:
    """Mamba-2 and full attention in turn: a group of states and one of attention. vLLM makes their
    blocks 64 tokens long, so that the pages are of one size."""
    return transformers.GraniteMoeHybridConfig(
        **_COMMON,
        layer_types=["mamba", "attention"] * 2,
        mamba_n_heads=8,
        mamba_d_head=32,
        mamba_n_groups=1,
        mamba_d_state=16,
        mamba_expand=2,
        mamba_chunk_size=32,
        num_local_experts=0,
        shared_intermediate_size=256,
        position_embedding_type="rope",
    )


def _kinds(letters: str) -> list[str]:
    return [{"s": "sliding_attention", "f": "full_attention"}[letter] for letter in letters]


CONFIGS: dict[str, Callable[[], transformers.PretrainedConfig]] = {
    "llama": _llama,
    "mistral": _mistral,
    "gemma3": _gemma3,
    "gpt_oss": _gpt_oss,
    "mla": _mla,
    "granite": _granite,
}


def build_model(name: str, folder: Path) -> Path:
    """Write the model ``name`` to ``folder / name``, the same weights every time."""
    target = folder / name
    if (target / "config.json").exists():
        return target
    config = CONFIGS[name]()
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.3, generator=generator)
        if config.tie_word_embeddings:
            # At full scale a token would predict itself, whatever the cache holds.
            model.get_input_embeddings().weight.mul_(0.05)
    model.save_pretrained(target)
    _write_tokenizer(target)
    return target


def _write_tokenizer(folder: Path) -> None:
    """One word a token id: vLLM wants a tokenizer for what it says of prompt logprobs."""
    vocabulary = {f"t{token}": token for token in range(VOCABULARY)}
    model = tokenizers.models.WordLevel(vocabulary, unk_token="t0")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="t1", eos_token="t2", pad_token="t0"
    ).save_pretrained(folder)


@dataclass
class Answer:
    """What came back for one request."""

    token_ids: list[int]
    num_cached_tokens: int
    prompt_logprobs: list[dict[int, float] | None] | None


class TinyEngine:
    """An ``LLM`` in process and the two halves of its connector (None without one)."""

    def __init__(self, llm: LLM) -> None:
        self.llm = llm
        self.core = llm.llm_engine.engine_core.engine_core
        self.scheduler = self.core.scheduler
        self.connector: Any = self.scheduler.connector
        # With several ranks the workers live in processes of their own.
        self.worker: Any = get_kv_transfer_group() if has_kv_transfer_group() else None
        self.num_preemptions = 0
        self._count_preemptions()

    def _count_preemptions(self) -> None:
        preempt = self.scheduler._preempt_request

        def counted(*args: Any, **kwargs: Any) -> None:
            self.num_preemptions += 1
            preempt(*args, **kwargs)

        self.scheduler._preempt_request = counted

    def generate(
        self, prompts: Sequence[Sequence[int]], *, max_tokens: int = 8, **sampling: Any
    ) -> list[Answer]:
        params = SamplingParams(
            max_tokens=max_tokens, temperature=0, ignore_eos=True, detokenize=False, **sampling
        )
        inputs: Any = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        outputs = self.llm.generate(inputs, params, use_tqdm=False)
        return [
            Answer(
                list(output.outputs[0].token_ids),
                output.num_cached_tokens or 0,
                _prompt_logprobs(output.prompt_logprobs),
            )
            for output in outputs
        ]

    def drain(self, max_steps: int = 100_000) -> None:
        """Step the core until it has nothing left: ``generate`` stops with its last request."""
        for _ in range(max_steps):
            if not (self.scheduler.has_requests() or self.core.batch_queue):
                return
            self.core.step_fn()  # with async scheduling a step's output comes a step late
        raise AssertionError(f"not idle after {max_steps} steps: {self.connector!r}")

    def check_idle(self) -> None:
        """Every slot, lease and fence is accounted for when nothing is going on."""
        self.drain()
        self.connector._manager.core.check()
        scheduler = self.connector.snapshot()
        worker = self.worker.snapshot() if self.worker is not None else {"jobs": 0, "queued": 0}
        names = ("writing", "reading", "doomed", "leases", "jobs", "fences", "requests")
        left = {name: scheduler[name] for name in names if scheduler[name]}
        left |= {name: worker[name] for name in ("jobs", "queued") if worker[name]}
        assert not left, left


def _prompt_logprobs(logprobs: Any) -> list[dict[int, float] | None] | None:
    if logprobs is None:
        return None
    return [
        None if entry is None else {token: value.logprob for token, value in entry.items()}
        for entry in logprobs
    ]


@contextlib.contextmanager
def tiny_engine(
    model: Path,
    *,
    connector: str | None = "KVFerrySimpleConnector",
    num_blocks: int = 40,
    policy: str = "recompute",
    extra_config: dict[str, Any] | None = None,
    **overrides: Any,
) -> Iterator[TinyEngine]:
    """vLLM's engine on ``model`` with a GPU pool of ``num_blocks`` blocks of 32 tokens; closed at
    the end, so that the next one can start in the same process."""
    if connector is not None:
        overrides["kv_transfer_config"] = {
            "kv_connector": connector,
            "kv_role": "kv_both",
            "kv_load_failure_policy": policy,
            "kv_connector_extra_config": {
                "cpu_bytes_to_use": "64MiB",
                "min_load_tokens": 0,
                **(extra_config or {}),
            },
        }
    settings: dict[str, Any] = {
        "max_model_len": 1024,
        "enforce_eager": True,
        "dtype": "float32",
        "block_size": BLOCK_TOKENS,
        "seed": 0,
        **overrides,
    }
    if model.name == "mla":
        # With AMX vLLM takes another backend unless told, and that one takes no float32.
        settings["attention_backend"] = "CPU_MLA"
    llm = LLM(model=str(model), num_gpu_blocks_override=num_blocks, **settings)
    try:
        yield TinyEngine(llm)
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()
        cleanup_dist_env_and_memory()


def shared_prefix_prompts(
    seed: int, count: int, *, num_families: int = 6, longest: int = 400
) -> list[list[int]]:
    """``count`` prompts in families that share a prefix of a random length."""
    generator = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high, (1,), generator=generator))

    def some(length: int) -> list[int]:
        drawn: list[int] = torch.randint(3, VOCABULARY, (length,), generator=generator).tolist()
        return drawn

    families = [some(longest) for _ in range(num_families)]
    return [
        families[draw(0, num_families)][: draw(longest // 4, longest)] + some(draw(1, 40))
        for _ in range(count)
    ]
