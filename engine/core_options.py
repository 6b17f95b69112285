"""How the scheduling core decides."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CoreOptions:
    """How the core decides.

    ``store_threshold``: a chunk is stored the n-th time that it is offered, of the
    ``max_tracked_offers`` chunks whose offers are remembered. ``min_load_tokens``: a
    shorter hit is not loaded; None decides by measured rates (see ``worth``). ``wait_s`` bounds how
    long a request waits for others' transfers. ``journal``: keep what becomes readable and stops
    being so, for ``take_changes``.
    """

    policy: str = "lru"
    prompt_only: bool = False
    store_threshold: int = 1
    max_tracked_offers: int = 64_000
    min_load_tokens: int | None = 0
    wait_s: float = 5.0
    journal: bool = False
