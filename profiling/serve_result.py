"""The serving benchmark's result: tables, plots and sentences of its figures."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from .bench_result import Plot, Result, Series, Table
from .percentiles import percentile
from .plan_units import size_text
from .serve_figures import PERCENTILES, Figures, Run, figures_of, share_of, sources_of
from .serve_sides import PLAIN, SIDES


def result_of(run: Run) -> Result:
    """Tables, plots and sentences of one run; in ``data`` every request of every side."""
    sides = [figures_of(name, run) for name in run.asked]
    return Result(
        name="serve",
        title="Serving: chats and shared documents on a real engine",
        summary=_summary(run, sides),
        tables=_tables(run, sides),
        plots=_plots(sides),
        data=_data(run, sides),
    )


def _summary(run: Run, sides: Sequence[Figures]) -> list[str]:
    plain = next(side for side in sides if side.name == PLAIN)
    ours = [side for side in sides if SIDES[side.name].is_ours]
    own = [side for side in sides if not SIDES[side.name].is_ours and side is not plain]
    sentences = [_against(side, plain) for side in ours]
    sentences += [_against(side, other) for side in ours for other in own]
    num_answers = len(plain.all_ms)
    if run.dtype == "float32":
        sentences.append(f"All sides gave the same tokens in all {num_answers} answers.")
    else:
        sentences += [
            f"{side.label} gave the tokens of {plain.label} in {side.num_same_answers} of "
            f"{num_answers} answers; in {run.dtype} vLLM's own prefix hits change tokens too."
            for side in sides
            if side is not plain
        ]
    sentences += [
        f"{SIDES[name].label} did not run here; vLLM says: {reason}"
        for name, reason in run.refused.items()
    ]
    return sentences


def _against(side: Figures, other: Figures) -> str:
    ratios = [
        percentile(other.returning_ms, percent) / percentile(side.returning_ms, percent)
        for percent in PERCENTILES
    ]
    p50, p90, p99 = (f"{ratio:.2f}" for ratio in ratios)
    return (
        f"{side.label} against {other.label}: the first token of a returning prompt comes {p50} "
        f"times as fast at p50, {p90} at p90, {p99} at p99; all requests are served "
        f"{side.times_faster(other):.2f} times as fast."
    )


def _tables(run: Run, sides: Sequence[Figures]) -> list[Table]:
    shown = ("returning", "all")
    times: list[tuple[str | int | float, ...]] = [
        (side.label, which, len(values), *(round(percentile(values, p), 1) for p in PERCENTILES))
        for which in shown
        for side in sides
        for values in [side.returning_ms if which == "returning" else side.all_ms]
    ]
    rates = [
        (
            side.label,
            round(side.answer_tokens_per_s, 1),
            round(side.tokens_per_s, 1),
            round(side.wall_s, 2),
        )
        for side in sides
    ]
    tables = [
        Table(
            "Time to the first token",
            ("side", "prompts", "requests", *(f"p{p}, ms" for p in PERCENTILES)),
            times,
            "From asking to the first token, while others ask too. A percentile is the time of "
            "one request: the smallest that so many requests do not exceed. A returning prompt "
            "begins with an earlier one: a later turn of a chat, a document that was asked about.",
        ),
        Table(
            "Throughput",
            ("side", "answer tokens/s", "prompt and answer tokens/s", "wall time, s"),
            rates,
            "Over the time until each side has nothing left to do, its stores included.",
        ),
        Table(
            "Where the prompts' tokens came from",
            (
                "side",
                "prompt tokens",
                *(f"{source}, %" for source, _ in sources_of(sides[0])),
                "requests loaded for",
                "not worth loading for",
            ),
            [
                (
                    side.label,
                    side.num_prompt,
                    *(share_of(number, side) for _, number in sources_of(side)),
                    *(side.admitted.get(kind) for kind in ("hits", "declined")),
                )
                for side in sides
            ],
            "kvferry declines a hit that it expects to take longer to load than to compute.",
        ),
        Table("What was asked", ("what", "value"), _workload_rows(run)),
    ]
    if run.refused:
        rows = [(SIDES[name].label, reason) for name, reason in run.refused.items()]
        tables.append(Table("What did not run here", ("side", "what vLLM says"), rows))
    return tables


def _workload_rows(run: Run) -> list[tuple[str, str | int]]:
    return [
        ("model", run.model),
        ("device", f"{run.device}, {run.dtype}"),
        ("GPU pool, blocks", run.num_gpu_blocks),
        ("host memory of each side with a connector", size_text(run.host_bytes)),
        ("min_load_tokens of kvferry", run.min_load_tokens),
        ("seed", run.seed),
        ("rounds", len({wave.round for wave in run.asked[PLAIN]})),
        ("requests a round", run.workload.num_requests),
        *((name.replace("_", " "), number) for name, number in asdict(run.workload).items()),
    ]


def _plots(sides: Sequence[Figures]) -> list[Plot]:
    labels = [side.label for side in sides]
    names = [f"p{p}" for p in PERCENTILES]
    all_shares = [[share_of(number, side) for _, number in sources_of(side)] for side in sides]
    return [
        Plot(
            "serve_ttft",
            "Time to the first token of returning prompts",
            "percentile",
            "time to the first token, ms",
            [
                Series(side.label, names, [percentile(side.returning_ms, p) for p in PERCENTILES])
                for side in sides
            ],
            kind="bar",
        ),
        Plot(
            "serve_ttft_distribution",
            "Distribution of the time to the first token of returning prompts",
            "time to the first token, ms",
            "requests that had it, %",
            [_distribution(side) for side in sides],
            log_x=True,
        ),
        Plot(
            "serve_sources",
            "Where the prompts' tokens came from",
            "side",
            "prompt tokens, %",
            [
                Series(source, labels, [shares[place] for shares in all_shares])
                for place, (source, _) in enumerate(sources_of(sides[0]))
            ],
            kind="bar",
        ),
        Plot(
            "serve_throughput",
            "Tokens a second",
            "side",
            "tokens/s",
            [
                Series("prompt and answer", labels, [side.tokens_per_s for side in sides]),
                Series("answer", labels, [side.answer_tokens_per_s for side in sides]),
            ],
            kind="bar",
        ),
    ]


def _distribution(side: Figures) -> Series:
    values = sorted(side.returning_ms)
    return Series(
        side.label, values, [100 * (place + 1) / len(values) for place in range(len(values))]
    )


def _data(run: Run, sides: Sequence[Figures]) -> dict[str, Any]:
    return {
        "model": run.model,
        "device": run.device,
        "dtype": run.dtype,
        "num_gpu_blocks": run.num_gpu_blocks,
        "host_bytes": run.host_bytes,
        "min_load_tokens": run.min_load_tokens,
        "seed": run.seed,
        "workload": asdict(run.workload),
        "refused": dict(run.refused),
        "sides": {side.name: _side_data(side, run) for side in sides},
    }


def _side_data(side: Figures, run: Run) -> dict[str, Any]:
    requests = [
        {
            "round": wave.round,
            "wave": wave.wave,
            "thread": turn.thread,
            "is_return": turn.is_return,
            "first_token_s": answer.first_token_s,
            "num_prompt_tokens": answer.num_prompt_tokens,
            "num_from_gpu": answer.num_from_gpu,
            "num_from_host": answer.num_from_host,
            "tokens": list(answer.tokens),
        }
        for wave in run.asked[side.name]
        for turn, answer in zip(wave.turns, wave.played.answers, strict=True)
    ]
    return {
        "connector": SIDES[side.name].connector,
        "first_token_ms": {
            which: {f"p{p}": percentile(values, p) for p in PERCENTILES}
            for which, values in (("returning", side.returning_ms), ("all", side.all_ms))
        },
        "answer_tokens_per_s": side.answer_tokens_per_s,
        "tokens_per_s": side.tokens_per_s,
        "wall_s": list(side.round_s),
        "prompt_tokens": {
            "all": side.num_prompt,
            "gpu": side.num_from_gpu,
            "host": side.num_from_host,
            "computed": side.num_recomputed,
        },
        "num_same_answers": side.num_same_answers,
        "admitted": side.admitted,
        "requests": requests,
    }
