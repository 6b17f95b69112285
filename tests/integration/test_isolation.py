"""Isolation: what may not share blocks on the "GPU" never shares them in the host.

Cache salts are tried on the real engine. LoRA adapters and images go into the same block hashes, so
for them vLLM's real scheduler is enough: what the connector would serve is asked of it.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from real_scheduler import Engine, tokens
from tiny_models import TinyEngine, build_model, shared_prefix_prompts, tiny_engine
from vllm import SamplingParams
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.v1.core.encoder_cache_manager import EncoderCacheManager
from vllm.v1.request import Request

SEED = 23
CONNECTORS = ("KVFerryOffloadingConnector", "KVFerrySimpleConnector")
BLOCK_TOKENS = 32


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_model("llama", tmp_path_factory.mktemp("models"))


@pytest.fixture(params=CONNECTORS)
def engine(request: pytest.FixtureRequest, llama: Path) -> Iterator[TinyEngine]:
    with tiny_engine(llama, connector=request.param) as engine:
        yield engine


def ask(engine: TinyEngine, prompt: list[int], salt: str | None) -> tuple[list[int], int]:
    """The tokens of the answer, and how many of the prompt's came from the host."""
    engine.scheduler.reset_prefix_cache()  # only the "GPU": what is cached after it is the host's
    params = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True, detokenize=False)
    given: dict[str, Any] = {"prompt_token_ids": prompt}
    if salt is not None:
        given["cache_salt"] = salt
    (output,) = engine.llm.generate([given], params, use_tqdm=False)
    engine.drain()
    return list(output.outputs[0].token_ids), output.num_cached_tokens or 0


def test_another_salt_is_not_served_and_the_same_one_is(engine: TinyEngine) -> None:
    print(f"seed {SEED}")
    (prompt,) = shared_prefix_prompts(SEED, 1)
    whole = (len(prompt) - 1) // BLOCK_TOKENS * BLOCK_TOKENS
    answers, num_stored = [], []
    for salt, num_cached in [
        ("A", 0),
        ("B", 0),
        (None, 0),
        ("A", whole),
        ("B", whole),
        (None, whole),
        ("C", 0),
    ]:
        answer, cached = ask(engine, prompt, salt)
        assert cached == num_cached, f"salt {salt!r} after {num_stored}"
        answers.append(answer)
        num_stored.append(engine.connector.snapshot()["ready"])
    assert answers[1:] == answers[:-1]
    once = num_stored[0]
    assert once > 0
    # Each salt has slots of its own, filled once.
    assert num_stored == [once, 2 * once, 3 * once, 3 * once, 3 * once, 3 * once, 4 * once]
    engine.check_idle()


Marked = Callable[[Engine, str, list[int], str], Request]


def with_lora(engine: Engine, request_id: str, prompt: list[int], mark: str) -> Request:
    request = engine.request(request_id, prompt)
    lora = LoRARequest(lora_name=mark, lora_int_id=1, lora_path=f"adapters/{mark}")
    return remade(engine, request, lora_request=lora)


def with_image(engine: Engine, request_id: str, prompt: list[int], mark: str) -> Request:
    """An image over the second block: the first one is the same for all."""
    request = engine.request(request_id, prompt)
    image = MultiModalFeatureSpec(
        data=None,
        modality="image",
        identifier=mark,
        mm_position=PlaceholderRange(offset=4, length=4),
    )
    return remade(engine, request, mm_features=[image])


def remade(engine: Engine, request: Request, **extra: Any) -> Request:
    return Request(
        request_id=request.request_id,
        prompt_token_ids=list(request.prompt_token_ids or ()),
        sampling_params=request.sampling_params,
        pooling_params=None,
        block_hasher=engine._hasher,
        **extra,
    )


@pytest.mark.parametrize("connector", CONNECTORS)
@pytest.mark.parametrize(("marked", "num_shared"), [(with_lora, 0), (with_image, 4)])
def test_another_adapter_or_image_is_not_served_and_the_same_one_is(
    marked: Marked, num_shared: int, connector: str, model_config_dir: Path
) -> None:
    engine = Engine(
        model_config_dir, connector=connector, block_tokens=4, extra_config={"min_load_tokens": 0}
    )
    engine.scheduler.max_num_encoder_input_tokens = 8  # the model's text alone has it at 0
    engine.scheduler.encoder_cache_manager = EncoderCacheManager(cache_size=8)
    prompt = tokens(SEED, 17)
    stored = marked(engine, "stored", prompt, "one")
    engine.scheduler.add_request(stored)
    engine.run()
    assert engine.snapshot()["ready"] == 4

    def served(request: Request) -> int | None:
        num_tokens, _ = engine.connector.get_num_new_matched_tokens(request, 0)
        engine.connector.request_finished(request, [])
        return num_tokens

    assert served(marked(engine, "same", prompt, "one")) == 16
    assert served(marked(engine, "other", prompt, "two")) == num_shared
    assert served(engine.request("plain", prompt)) == num_shared
    engine.check_idle()
