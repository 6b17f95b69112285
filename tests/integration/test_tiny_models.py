"""The tiny models are the same in every run, and vLLM groups their layers as they are named for."""

import hashlib
from pathlib import Path

import pytest
from real_runs import cut_pieces_at_states
from tiny_models import CONFIGS, build_model, shared_prefix_prompts, tiny_engine

GROUPS = {
    "llama": ["FullAttentionSpec"],
    "mistral": ["SlidingWindowSpec"],
    "gemma3": ["SlidingWindowSpec", "SlidingWindowSpec", "FullAttentionSpec"],
    "gpt_oss": ["SlidingWindowSpec", "FullAttentionSpec"],
    "mla": ["MLAAttentionSpec"],
    "granite": ["MambaSpec", "FullAttentionSpec"],
}


def digest(folder: Path) -> str:
    return hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()


@pytest.mark.parametrize("name", CONFIGS)
def test_weights_are_the_same_every_time(name: str, tmp_path: Path) -> None:
    (tmp_path / "first").mkdir()
    (tmp_path / "second").mkdir()
    first = build_model(name, tmp_path / "first")
    assert digest(first) == digest(build_model(name, tmp_path / "second"))
    assert build_model(name, tmp_path / "first") == first


@pytest.mark.parametrize("name", [name for name in CONFIGS if name != "llama"])
def test_groups_and_tokens(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers differ from prompt to prompt: a model that always says the same proves nothing."""
    cut_pieces_at_states(monkeypatch)
    prompts = shared_prefix_prompts(3, 4)
    with tiny_engine(build_model(name, tmp_path), connector=None, num_blocks=200) as engine:
        groups = engine.scheduler.kv_cache_config.kv_cache_groups
        kinds = [type(group.kv_cache_spec).__name__ for group in groups]
        answers = engine.generate(prompts)
    assert kinds == GROUPS[name]
    assert len({tuple(answer.token_ids) for answer in answers}) == len(prompts)
