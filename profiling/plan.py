"""``kvferry plan``: what a model's KV cache takes in host memory, and when loading it pays."""

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

from .plan_groups import (
    ITEM_BYTES,
    KV_LAYOUTS,
    Group,
    block_tokens_of,
    groups_of,
    layout_of,
)
from .plan_load import LINKS_BYTES_PER_S, OVERHEAD_S, LoadCost, Prompts, Row, parse_link
from .plan_metrics import Server, is_address, read_server
from .plan_model import Layer, Model, read_model, served_dtype
from .plan_recurrent import LayerState
from .plan_units import parse_size

EXIT_USAGE: Final = 2
BLOCK_TOKENS: Final = 16
LENGTHS: Final = tuple(1 << power for power in range(8, 18))
"""Prompt lengths of the table, 256 to 131,072 tokens, as far as the model goes."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """What was asked for, with the server's answers filled in. ``state_dtype`` is that of recurrent
    heads' states, where it is not the model's own."""

    model: Model
    num_ranks: int
    dtype: str
    block_tokens: int
    blocks_per_chunk: int
    kv_layout: str
    checksums: bool
    host_bytes: int
    cost: LoadCost
    tokens_per_s: float | None
    lengths: tuple[int, ...]
    state_dtype: str | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """Sizes in bytes are of one rank, except ``host_bytes``, which all ranks share.

    ``bytes_per_token`` and ``block_bytes`` count a token once in every layer with attention,
    ``state_bytes`` one state of every recurrent layer. ``held_tokens`` is what fits when every
    chunk of every group is stored, one slot each; of a window, kvferry keeps no more than that. Of
    recurrent groups vLLM hands over few states: the fewer, the closer to ``most_held_tokens``.
    """

    model: str
    dtype: str
    num_ranks: int
    groups: tuple[Group, ...]
    bytes_per_token: int
    block_tokens: int
    block_bytes: int
    state_bytes: int
    chunk_tokens: int
    chunk_bytes: int
    slot_bytes: int
    checksum_bytes: int
    wasted_bytes: tuple[int, ...]
    kv_layout: str
    fragments: tuple[int, ...]
    fragment_bytes: tuple[int, ...]
    host_bytes: int
    num_slots: int
    held_tokens: int
    most_held_tokens: int
    link_bytes_per_s: float
    overhead_s: float
    prefill_tokens_per_s: float | None
    break_even_tokens: int | None
    rows: tuple[Row, ...]


def make_plan(wanted: Wanted) -> Plan:
    """Size it. Raises ValueError for what does not go together."""
    if wanted.block_tokens < 1 or wanted.blocks_per_chunk < 1:
        raise ValueError(
            f"blocks of {wanted.block_tokens} tokens, {wanted.blocks_per_chunk} a chunk; allowed: "
            "at least 1 each"
        )
    layers = _with_state_dtype(wanted)
    item_bytes = ITEM_BYTES[wanted.dtype]
    block_tokens = block_tokens_of(layers, wanted.block_tokens, wanted.num_ranks, item_bytes)
    groups = groups_of(layers, block_tokens, wanted.num_ranks, item_bytes)
    layout = layout_of(groups, wanted.blocks_per_chunk, wanted.kv_layout)
    bytes_per_slot = layout.bytes_per_slot(checksums=wanted.checksums)
    num_slots = wanted.host_bytes // wanted.num_ranks // bytes_per_slot
    chunk_tokens = block_tokens * wanted.blocks_per_chunk
    prompts = Prompts(groups, block_tokens, chunk_tokens, wanted.cost, wanted.tokens_per_s)
    rows = prompts.table(list(wanted.lengths), wanted.model.max_tokens)
    even = next((row.prompt_tokens for row in rows if row.is_break_even), None)
    attention = [group for group in groups if not group.is_recurrent]
    block_bytes = sum(group.block_bytes for group in attention)
    return Plan(
        wanted.model.name,
        wanted.dtype,
        wanted.num_ranks,
        groups,
        block_bytes // block_tokens,
        block_tokens,
        block_bytes,
        sum(group.chunk_bytes(1) for group in groups if group.is_recurrent),
        chunk_tokens,
        block_bytes * wanted.blocks_per_chunk,
        layout.slot_stride_bytes,
        layout.checksum_stride_bytes if wanted.checksums else 0,
        tuple(layout.wasted_bytes().values()),
        wanted.kv_layout,
        tuple(len(group.fragments) for group in layout.groups),
        tuple(group.fragments[0].num_bytes for group in layout.groups),
        wanted.host_bytes,
        num_slots,
        num_slots // len(groups) * chunk_tokens,
        num_slots // len(attention) * chunk_tokens,
        wanted.cost.bytes_per_s,
        wanted.cost.overhead_s,
        wanted.tokens_per_s,
        even,
        tuple(rows),
    )


def _with_state_dtype(wanted: Wanted) -> tuple[Layer, ...]:
    """The model's layers, with the states' type that was asked for."""
    if wanted.state_dtype is None:
        return wanted.model.layers
    return tuple(
        replace(layer, head_dtype=wanted.state_dtype) if isinstance(layer, LayerState) else layer
        for layer in wanted.model.layers
    )


def main(argv: list[str]) -> int:
    """The sub-command; 2 for a command line or a model that makes no sense."""
    options = _parser().parse_args(argv)
    try:
        plan = make_plan(_wanted(options))
    except ValueError as error:
        print(f"kvferry plan: {error}", file=sys.stderr)
        return EXIT_USAGE
    if options.json:
        print(json.dumps(as_json(plan), indent=2))
    else:
        from .plan_report import lines_of

        print("\n".join(lines_of(plan)))
    return 0


def as_json(plan: Plan) -> dict[str, Any]:
    """Plain data; sizes keep the units in their names."""
    data = asdict(plan)
    for row, made in zip(data["rows"], plan.rows, strict=True):
        row["worth_it"] = made.worth_it
    return data


def _wanted(options: argparse.Namespace) -> Wanted:
    server: Server | None = None
    address = options.model if is_address(options.model) else options.metrics
    if address:
        server = read_server(address)
    source = options.config or (server.model if server and address == options.model else None)
    model = read_model(source or options.model)
    rate = options.prefill_rate or (server.prefill_tokens_per_s if server else None)
    cost = parse_link(options.link)
    return Wanted(
        model,
        options.tp,
        cache_dtype(options.dtype, server, model),
        options.block_size or (server.block_tokens if server else None) or BLOCK_TOKENS,
        options.blocks_per_chunk,
        options.kv_layout,
        options.integrity != "off",
        parse_size("--host-memory", options.host_memory),
        LoadCost(cost.bytes_per_s, options.load_overhead_ms / 1e3),
        rate,
        tuple(options.lengths or [one for one in LENGTHS if one <= model.max_tokens]),
        state_dtype(options.mamba_ssm_cache_dtype, server),
    )


def state_dtype(asked: str, server: Server | None) -> str | None:
    """The type of recurrent heads' states: asked for, else the server's; None for the model's."""
    name = server.state_dtype if asked == "auto" and server else asked
    return None if name in (None, "auto") else name


def cache_dtype(asked: str, server: Server | None, model: Model) -> str:
    """The cache's element type: asked for, the server's, or the weights' (float32 halves, as vLLM
    does on its own). Raises ValueError for a type of no known size."""
    if asked != "auto":
        return asked
    name = server.cache_dtype if server and server.cache_dtype != "auto" else None
    if name is None:
        name = served_dtype(model.dtype)
    if name not in ITEM_BYTES:
        raise ValueError(f"a KV cache of {name}; allowed: {', '.join(ITEM_BYTES)} (--dtype)")
    return name


def _at_least(
    least: float, kind: Callable[[str], int | float] = int
) -> Callable[[str], int | float]:
    def parse(text: str) -> int | float:
        try:
            value = kind(text)
        except ValueError:
            value = least - 1
        if not value >= least:
            raise argparse.ArgumentTypeError(f"{text!r}; allowed: a number from {least:g} up")
        return value

    return parse


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("kvferry plan", description=__doc__)
    add = parser.add_argument
    add("model", help="config.json, its folder, owner/name in the local cache, or a server's URL")
    add(
        "--config",
        help="with a server: its model's config.json, if not found by name",
    )
    add("--metrics", metavar="URL", help="take block size and prefill rate from this server")
    add("--tp", type=_at_least(1), default=1, help="tensor parallel size (default 1)")
    add("--dtype", choices=["auto", *ITEM_BYTES], default="auto", help="the KV cache's elements")
    add(
        "--mamba-ssm-cache-dtype",
        choices=("auto", "float32", "bfloat16", "float16"),
        default="auto",
        help="elements of recurrent heads' states, as vLLM's option (default: the model's own)",
    )
    add("--block-size", type=_at_least(1), help=f"tokens of a GPU block (default {BLOCK_TOKENS})")
    add("--blocks-per-chunk", type=_at_least(1), default=1, help="blocks of a chunk (default 1)")
    add("--kv-layout", choices=KV_LAYOUTS, default="LBHNC", help="vLLM's layout (default LBHNC)")
    add("--integrity", choices=("full", "sample", "off"), default="sample", help="checksums")
    add("--host-memory", default="64GiB", help="for the whole server (default 64GiB)")
    add(
        "--link",
        default="pcie5x16",
        help=f"each rank's: {', '.join(LINKS_BYTES_PER_S)}, or GB/s (default pcie5x16)",
    )
    add(
        "--load-overhead-ms",
        type=_at_least(0, float),
        default=OVERHEAD_S * 1e3,
        help="what a load costs beside its bytes (default %(default)s, an assumption)",
    )
    add("--prefill-rate", type=_at_least(1, float), help="tokens a second of one prefill")
    add("--lengths", type=_at_least(1), nargs="+", help="prompt lengths of the table, in tokens")
    add("--json", action="store_true", help="print the plan as JSON")
    return parser
