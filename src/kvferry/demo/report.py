"""The demo's result for people (a table) and for programs (one JSON object)."""

from typing import Any

from .checks import Check
from .phases import DemoRun, Phase

HEADERS = ("", "first token", "from GPU", "from host", "recomputed", "prompt")


def row_of(phase: Phase) -> tuple[str, ...]:
    answer = phase.last
    counts = (
        answer.num_from_gpu,
        answer.num_from_host,
        answer.num_recomputed,
        answer.num_prompt_tokens,
    )
    return (phase.name, f"{phase.first_token_s * 1e3:.1f} ms", *map(str, counts))


def speedups(run: DemoRun) -> dict[str, float]:
    """Times to the first token of this run, as ratios of medians."""
    return {
        "host_hit_faster_than_cold": run.cold.first_token_s / run.host_hit.first_token_s,
        "host_hit_to_gpu_hit": run.host_hit.first_token_s / run.gpu_hit.first_token_s,
    }


def as_table(run: DemoRun, checks: list[Check]) -> str:
    rows = [HEADERS, *(row_of(phase) for phase in run.phases)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEADERS))]
    lines = [f"{run.model}, {run.dtype} on the {run.device}, blocks of {run.block_size} tokens", ""]
    for row in rows:
        cells = [row[0].ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        lines.append("  ".join(cells))
    ratios = speedups(run)
    lines += [
        "",
        f"(4) has its first token {ratios['host_hit_faster_than_cold']:.1f} times faster than (1), "
        f"in {ratios['host_hit_to_gpu_hit']:.2f} times the time of (2); "
        f"medians of {len(run.cold.answers)}.",
        "",
    ]
    for phase in run.phases:
        lines.append(f"{phase.name}: {phase.last.text.strip()!r}")
    lines.append("")
    for check in checks:
        lines.append(f"{'ok  ' if check.passed else 'FAIL'}  {check.name} ({check.detail})")
    return "\n".join(lines)


def as_object(run: DemoRun, checks: list[Check]) -> dict[str, Any]:
    """Plain data for ``--json``: times in seconds, counts in tokens."""
    return {
        "model": run.model,
        "device": run.device,
        "dtype": run.dtype,
        "block_size": run.block_size,
        "phases": [
            {
                "name": phase.name,
                "first_token_s": phase.first_token_s,
                "first_token_all_s": [answer.first_token_s for answer in phase.answers],
                "num_prompt_tokens": phase.last.num_prompt_tokens,
                "num_from_gpu": phase.last.num_from_gpu,
                "num_from_host": phase.last.num_from_host,
                "num_recomputed": phase.last.num_recomputed,
                "text": phase.last.text,
                "tokens": [list(answer.tokens) for answer in phase.answers],
            }
            for phase in run.phases
        ],
        **speedups(run),
        "connector_answers": [list(answer) for answer in run.connector_answers],
        "snapshot": run.ending.settled,
        "worker_snapshot": run.ending.settled_worker,
        "checks": [
            {"name": check.name, "passed": check.passed, "detail": check.detail} for check in checks
        ],
        "passed": all(check.passed for check in checks),
    }
