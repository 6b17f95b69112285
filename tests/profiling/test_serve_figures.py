"""The serving benchmark's figures, from answers that are made up."""

from dataclasses import replace

import pytest
from kvferry.profiling.percentiles import percentile
from kvferry.profiling.serve_client import Played
from kvferry.profiling.serve_figures import Asked, Run, figures_of
from kvferry.profiling.serve_result import result_of
from kvferry.profiling.serve_sides import PLAIN
from kvferry.profiling.serve_workload import QUICK, Turn

from kvferry.demo.engine import Answer

REASON = "Exception: only on GPUs"


def asked(round_: int, ms: list[int], wall_s: float, num_from_host: int, token: int = 5) -> Asked:
    """One wave: every second prompt is a returning one; 100 prompt tokens each, 20 from the GPU."""
    turns = tuple(Turn(f"chat {n}", (1,), (2,), n % 2 == 1) for n in range(len(ms)))
    answers = tuple(
        Answer((4, token), "", time / 1e3, 100, 20, num_from_host if turn.is_return else 0, ())
        for time, turn in zip(ms, turns, strict=True)
    )
    admitted = {"hits": len(ms) // 2, "misses": 1, "declined": 0} if num_from_host else {}
    return Asked(round_, 0, turns, Played(answers, wall_s, admitted))


def run_of(dtype: str = "float32", token: int = 5) -> Run:
    slow, fast = list(range(2, 202, 2)), list(range(1, 101))
    return Run(
        model="m",
        device="cpu",
        dtype=dtype,
        num_gpu_blocks=44,
        host_bytes=1 << 30,
        min_load_tokens="auto",
        seed=1,
        workload=QUICK,
        asked={
            PLAIN: [asked(0, slow, 2.0, 0), asked(1, slow, 8.0, 0)],
            "kvferry-simple": [asked(0, fast, 1.0, 60, token), asked(1, fast, 2.0, 60, token)],
        },
        refused={"vllm-simple": REASON},
    )


@pytest.mark.parametrize(
    ("percent", "expected"), [(50, 50), (90, 90), (99, 99), (100, 100), (0.1, 1)]
)
def test_a_percentile_is_one_of_the_values(percent: float, expected: float) -> None:
    values = [float(value) for value in range(100, 0, -1)]
    assert percentile(values, percent) == expected
    assert percentile([7.0], percent) == 7.0


def test_figures_come_from_the_answers() -> None:
    ours, plain = figures_of("kvferry-simple", run_of()), figures_of(PLAIN, run_of())
    assert ours.all_ms == tuple(float(ms) for ms in range(1, 101)) * 2
    assert ours.returning_ms == tuple(float(ms) for ms in range(2, 101, 2)) * 2
    assert (ours.num_prompt, ours.num_answer) == (20_000, 400)
    assert (ours.num_from_gpu, ours.num_from_host, ours.num_recomputed) == (4000, 6000, 10_000)
    assert ours.admitted == {"hits": 100, "misses": 2, "declined": 0}
    assert ours.tokens_per_s == 20_400 / 3
    assert ours.times_faster(plain) == 3.0  # the median of 2 / 1 and 8 / 2, not 10 / 3
    assert ours.num_same_answers == 200


def test_the_result_says_how_sides_compare() -> None:
    result = result_of(run_of())
    assert result.summary[0] == (
        "kvferry simple against without: the first token of a returning prompt comes 2.00 times as "
        "fast at p50, 2.00 at p90, 2.00 at p99; all requests are served 3.00 times as fast."
    )
    assert "the same tokens in all 200 answers" in result.summary[1]
    assert result.summary[2] == f"vLLM simple did not run here; vLLM says: {REASON}"
    times = result.tables[0].rows
    assert times[0] == ("without", "returning", 100, 100.0, 180.0, 200.0)
    assert times[1] == ("kvferry simple", "returning", 100, 50.0, 90.0, 100.0)
    assert result.tables[2].rows == [
        ("without", 20_000, 20.0, 0.0, 80.0, None, None),
        ("kvferry simple", 20_000, 20.0, 30.0, 50.0, 100, 0),
    ]
    requests = result.data["sides"]["kvferry-simple"]["requests"]
    assert len(requests) == 200
    shown = result.data["sides"]["kvferry-simple"]["first_token_ms"]["returning"]
    raw = [one["first_token_s"] * 1e3 for one in requests if one["is_return"]]
    assert shown == {"p50": percentile(raw, 50), "p90": percentile(raw, 90), "p99": max(raw)}


def test_every_plot_has_every_side() -> None:
    plots = {plot.name: plot for plot in result_of(run_of()).plots}
    assert len(plots) == 4
    for name in ("serve_ttft", "serve_ttft_distribution"):
        assert [line.label for line in plots[name].series] == ["without", "kvferry simple"]
    ours = plots["serve_ttft_distribution"].series[1]
    assert (ours.x[-1], ours.y[-1]) == (100.0, 100.0)
    for name in ("serve_sources", "serve_throughput"):
        assert all(list(bars.x) == ["without", "kvferry simple"] for bars in plots[name].series)
    assert [sum(bars.y[side] for bars in plots["serve_sources"].series) for side in (0, 1)] == [
        100.0,
        100.0,
    ]


def test_where_tokens_may_differ_they_are_counted() -> None:
    summary = result_of(run_of("bfloat16", token=6)).summary
    assert "gave the tokens of without in 0 of 200 answers" in summary[1]
    assert not any("the same tokens in all" in sentence for sentence in summary)


def test_vllms_own_connector_is_compared_where_it_ran() -> None:
    run = run_of()
    both = replace(run, asked={**run.asked, "vllm-simple": run.asked[PLAIN]}, refused={})
    assert result_of(both).summary[1].startswith("kvferry simple against vLLM simple: ")
