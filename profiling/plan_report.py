"""A plan for people to read."""

from typing import TYPE_CHECKING

from .plan_model import Attention
from .plan_units import size_text

if TYPE_CHECKING:
    from .plan import Plan
    from .plan_load import Row


def lines_of(plan: "Plan") -> list[str]:
    ranks = f", each of {plan.num_ranks} ranks" if plan.num_ranks > 1 else ""
    return [
        f"{plan.model}: KV cache of {plan.dtype}{ranks}",
        "",
        *_groups(plan),
        "",
        f"token      {size_text(plan.bytes_per_token)} over all layers"
        + (" with attention" if plan.state_bytes else ""),
        *_states(plan),
        f"block      {plan.block_tokens} tokens, {size_text(plan.block_bytes)}",
        f"chunk      {plan.chunk_tokens} tokens, {size_text(plan.chunk_bytes)}",
        f"slot       {size_text(plan.slot_bytes)}"
        f" and {size_text(plan.checksum_bytes)} of checksums",
        *_waste(plan),
        f"fragments  {_fragments(plan)} in layout {plan.kv_layout}",
        f"memory     {size_text(plan.host_bytes)} in all: {plan.num_slots:,} slots a rank,"
        f" {_held(plan)} tokens",
        *_notes(plan),
        "",
        *_table(plan),
    ]


def _groups(plan: "Plan") -> list[str]:
    lines = []
    for index, group in enumerate(plan.groups):
        if group.is_recurrent:
            lines.append(
                f"group {index}    {group.num_layers} layers, {group.attention},"
                f" {group.num_heads} heads, {size_text(group.state_bytes)} a layer and state,"
                f" in a page of {size_text(group.page_bytes)}"
            )
            continue
        reach = f" of {group.reach_tokens:,} tokens" if group.reach_tokens else ""
        lines.append(
            f"group {index}    {group.num_layers} layers, {group.attention}{reach},"
            f" {group.num_heads} KV heads, {size_text(group.page_bytes)} a layer and block"
        )
    return lines


def _states(plan: "Plan") -> list[str]:
    if not plan.state_bytes:
        return []
    return [f"state      {size_text(plan.state_bytes)} over all recurrent layers, at any length"]


def _held(plan: "Plan") -> str:
    if plan.most_held_tokens == plan.held_tokens:
        return f"{plan.held_tokens:,}"
    return f"{plan.held_tokens:,} to {plan.most_held_tokens:,}"


def _waste(plan: "Plan") -> list[str]:
    if not any(plan.wasted_bytes):
        return []
    each = ", ".join(
        f"{size_text(wasted)} by group {index}"
        for index, wasted in enumerate(plan.wasted_bytes)
        if wasted
    )
    return [f"unused     of a slot: {each}"]


def _fragments(plan: "Plan") -> str:
    kinds = dict.fromkeys(zip(plan.fragments, plan.fragment_bytes, strict=True))
    return ", ".join(f"{count} a block, {size_text(size)} each" for count, size in kinds)


def _notes(plan: "Plan") -> list[str]:
    notes = []
    if plan.num_slots == 0:
        notes.append("memory     too little for one slot: give --host-memory more")
    if plan.num_ranks > 1 and any(one.attention is Attention.LATENT for one in plan.groups):
        notes.append("note       every rank holds the whole latent cache: it is stored once a rank")
    if any(one.attention in (Attention.WINDOW, Attention.CHUNKED) for one in plan.groups):
        notes.append("note       of a window or attention chunk only its end is ever loaded")
    if plan.state_bytes:
        notes.append("note       blocks are as long as vLLM makes them for a page to hold a state")
        notes.append("note       tokens held: from a state at every chunk to one a long prompt")
    return notes


def _table(plan: "Plan") -> list[str]:
    rate = plan.prefill_tokens_per_s
    lines = [
        f"Loading at {plan.link_bytes_per_s / 1e9:g} GB/s a rank and"
        f" {plan.overhead_s * 1e3:g} ms a load, against "
        + (f"a prefill of {rate:,.0f} tokens/s:" if rate else "any prefill rate:"),
        "",
        f"{'prompt':>9} {'loaded':>9} {'bytes':>10} {'load ms':>9} {'compute ms':>11}"
        f" {'even at tok/s':>14}",
        *(_row(row) for row in plan.rows),
    ]
    if rate is None:
        lines += ["", "Loading wins where prefill is slower than the last column; give"]
        lines += ["--prefill-rate, or a server with --metrics, to see where that is."]
    elif plan.break_even_tokens is None:
        lines += ["", "Loading never beats this prefill rate: do not offload over this link."]
    return lines


def _row(row: "Row") -> str:
    compute = "-" if row.compute_s is None else f"{row.compute_s * 1e3:.1f}"
    even = "-" if row.even_rate is None else f"{row.even_rate:,.0f}"
    verdict = "" if row.worth_it is None else "  load" if row.worth_it else "  recompute"
    mark = "  <- break-even" if row.is_break_even else ""
    return (
        f"{row.prompt_tokens:>9,} {row.hit_tokens:>9,} {size_text(row.load_bytes):>10}"
        f" {row.load_s * 1e3:>9.2f} {compute:>11} {even:>14}{verdict}{mark}"
    )
