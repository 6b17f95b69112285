"""What a running server's ``/metrics`` tells a plan: model, block size, prefill rate."""

import re
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

TIMEOUT_S: Final = 10.0

_LINE: Final = re.compile(r"([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)(?: \d+)?")
_LABEL: Final = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_TOKENS: Final = "vllm:request_prefill_kv_computed_tokens"
_SECONDS: Final = "vllm:request_prefill_time_seconds"


@dataclass(frozen=True, slots=True)
class Server:
    """``prefill_tokens_per_s`` is the rate of a single request, as its user sees it: tokens
    computed in prefill over the time spent there; None before the first request has ended.
    """

    model: str
    block_tokens: int | None
    cache_dtype: str | None
    prefill_tokens_per_s: float | None
    state_dtype: str | None = None


def is_address(source: str) -> bool:
    return source.startswith(("http://", "https://"))


def read_server(address: str) -> Server:
    """Ask a server. Raises ValueError when it does not answer, or not as vLLM does."""
    url = address.rstrip("/")
    url = url if url.endswith("/metrics") else f"{url}/metrics"
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT_S) as answer:  # http and https only
            text = answer.read().decode()
    except (urllib.error.URLError, OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{url} does not answer: {error}") from error
    return server_from(text, url)


def server_from(text: str, url: str) -> Server:
    """The same from the text of ``/metrics``. Raises ValueError when no vLLM wrote it."""
    model, labels, totals = "", dict[str, str](), {_TOKENS: 0.0, _SECONDS: 0.0}
    for name, found, value in _samples(text):
        if name.startswith("vllm:"):
            model = model or found.get("model_name", "")
        if name == "vllm:cache_config_info":
            labels = found
        for total in totals:
            if name == f"{total}_sum":
                totals[total] += value
    if not model:
        raise ValueError(f"{url} names no model; allowed: the /metrics of a vLLM server")
    # What the attention kernels asked for, where that is not what the user did.
    block = labels.get("effective_attention_block_size") or labels.get("block_size", "")
    rate = totals[_TOKENS] / totals[_SECONDS] if min(totals.values()) > 0 else None
    tokens = int(block) if block.isdigit() else None
    state = labels.get("mamba_ssm_cache_dtype")
    return Server(model, tokens, labels.get("cache_dtype"), rate, state)


def _samples(text: str) -> Iterator[tuple[str, dict[str, str], float]]:
    for line in text.splitlines():
        if match := _LINE.fullmatch(line.strip()):
            yield match[1], dict(_LABEL.findall(match[2] or "")), float(match[3])
