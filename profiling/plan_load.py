"""When loading beats recomputing: predicted load times against a prefill rate.

Both sides are straight lines, which errs on the safe side twice: a prefill slows down as its prompt
grows (attention is quadratic), and the figures of a link are what it does with large copies.
"""

from dataclasses import dataclass
from typing import Final

from .plan_groups import Group

LINKS_BYTES_PER_S: Final = {
    "pcie3x16": 12.0e9,
    "pcie4x16": 24.8e9,
    "pcie5x16": 55.6e9,
    "gh200": 346.0e9,
}
"""Host to device by the copy engine: published figures (PCIe 3: three quarters of its raw rate)."""

OVERHEAD_S: Final = 0.002
"""Assumed, not measured: a load is asked for in one engine step and noticed in a later one."""


@dataclass(frozen=True, slots=True)
class LoadCost:
    """Loading as a line: ``bytes_per_s`` of one rank's link, and what any load costs besides."""

    bytes_per_s: float
    overhead_s: float = OVERHEAD_S

    def __post_init__(self) -> None:
        if self.bytes_per_s <= 0 or self.overhead_s < 0:
            raise ValueError(f"{self}; allowed: a rate above 0, an overhead of 0 or more")


@dataclass(frozen=True, slots=True)
class Row:
    """A prompt of which ``hit_tokens`` (whole chunks) are in host memory. Bytes are of one rank.

    ``compute_s`` is None without a prefill rate. ``even_rate`` is the prefill rate, in tokens a
    second, up to which loading is the faster of the two; None where nothing can be loaded.
    """

    prompt_tokens: int
    hit_tokens: int
    load_bytes: int
    load_s: float
    compute_s: float | None
    even_rate: float | None
    is_break_even: bool = False

    @property
    def worth_it(self) -> bool | None:
        return None if self.compute_s is None else self.hit_tokens > 0 and self._faster()

    def _faster(self) -> bool:
        return self.compute_s is not None and self.load_s <= self.compute_s


@dataclass(frozen=True, slots=True)
class Prompts:
    """How a model's prompts are loaded and computed. ``tokens_per_s`` is the prefill rate."""

    groups: tuple[Group, ...]
    block_tokens: int
    chunk_tokens: int
    cost: LoadCost
    tokens_per_s: float | None

    def __post_init__(self) -> None:
        if self.tokens_per_s is not None and self.tokens_per_s <= 0:
            raise ValueError(f"a prefill rate of {self.tokens_per_s} tokens/s; allowed: above 0")

    def row(self, prompt_tokens: int) -> Row:
        """A prompt whose last token, at least, has to be computed in any case."""
        hit = max(0, prompt_tokens - 1) // self.chunk_tokens * self.chunk_tokens
        size = self._load_bytes(hit)
        load_s = self.cost.overhead_s + size / self.cost.bytes_per_s if hit else 0.0
        rate = self.tokens_per_s
        return Row(
            prompt_tokens,
            hit,
            size,
            load_s,
            None if rate is None else hit / rate,
            hit / load_s if load_s else None,
        )

    def break_even(self, max_tokens: int) -> Row | None:
        """The shortest prompt for which loading is no slower; None without a rate, or none such."""
        if self.tokens_per_s is None:
            return None
        for hit in range(self.chunk_tokens, max_tokens, self.chunk_tokens):
            row = self.row(hit + 1)
            if row.worth_it:
                return _marked(row)
        return None

    def table(self, lengths: list[int], max_tokens: int) -> list[Row]:
        """Rows for these lengths and the break-even, shortest first."""
        even = self.break_even(max_tokens)
        rows = [self.row(length) for length in lengths if not even or length != even.prompt_tokens]
        return sorted([*rows, *([even] if even else [])], key=lambda row: row.prompt_tokens)

    def _load_bytes(self, hit_tokens: int) -> int:
        """What the chunks that the engine asks for hold."""
        per_chunk = self.chunk_tokens // self.block_tokens
        return sum(
            len(group.rule(self.chunk_tokens).needed_chunks(0, hit_tokens))
            * group.chunk_bytes(per_chunk)
            for group in self.groups
        )


def _marked(row: Row) -> Row:
    return Row(
        row.prompt_tokens,
        row.hit_tokens,
        row.load_bytes,
        row.load_s,
        row.compute_s,
        row.even_rate,
        is_break_even=True,
    )


def parse_link(text: str) -> LoadCost:
    """``pcie5x16`` and the like, or a number of GB/s. Raises ValueError for anything else."""
    if text in LINKS_BYTES_PER_S:
        return LoadCost(LINKS_BYTES_PER_S[text])
    try:
        return LoadCost(float(text) * 1e9)
    except ValueError:
        raise ValueError(
            f"link {text!r}; allowed: {', '.join(LINKS_BYTES_PER_S)}, or GB/s as a number above 0"
        ) from None
