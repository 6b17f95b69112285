"""The hit-rate benchmark: its traces, its optimum against brute force, its command."""

import gzip
import itertools
import json
import random
from pathlib import Path

import pytest
from kvferry.engine.policy import POLICIES, make_policy
from kvferry.engine.types import Key
from kvferry.profiling.hit_rates import hit_rate, main, optimal_hit_rate
from kvferry.profiling.prefix_traces import Trace, agents, chat, read_trace


def best_by_trying(trace: Trace, num_slots: int) -> float:
    """The best hit rate over every choice of what to keep after each request."""
    contents: dict[frozenset[Key], int] = {frozenset(): 0}
    for keys in trace:
        following: dict[frozenset[Key], int] = {}
        for kept, hits in contents.items():
            gained = next((i for i, key in enumerate(keys) if key not in kept), len(keys))
            everything = sorted(kept | set(keys))
            for number in range(min(num_slots, len(everything)) + 1):
                for choice in map(frozenset, itertools.combinations(everything, number)):
                    following[choice] = max(following.get(choice, 0), hits + gained)
        contents = following
    return max(contents.values()) / sum(map(len, trace))


@pytest.mark.parametrize("seed", range(12))
def test_the_optimum_is_the_best_of_all_choices(seed: int) -> None:
    print(f"seed {seed}")
    rng = random.Random(seed)
    prompts = [[Key(b"s")], [Key(b"s"), Key(b"a")], [Key(b"s"), Key(b"b")], [Key(b"c"), Key(b"d")]]
    trace = [rng.choice(prompts) for _ in range(9)]
    for num_slots in (1, 2, 3):
        assert optimal_hit_rate(trace, num_slots) == best_by_trying(trace, num_slots)


@pytest.mark.parametrize("make", [chat, agents])
def test_generated_traces_share_prefixes_only(make: object) -> None:
    trace = make(3, num_requests=500, scans=0.2)  # type: ignore[operator]
    assert trace == make(3, num_requests=500, scans=0.2)  # type: ignore[operator]
    assert trace != make(4, num_requests=500, scans=0.2)  # type: ignore[operator]
    before: dict[Key, Key | None] = {}
    for keys in trace:
        assert len(set(keys)) == len(keys)
        for parent, key in zip([None, *keys], keys, strict=False):
            assert before.setdefault(key, parent) == parent
    assert optimal_hit_rate(trace, 10**6) > 0.1


@pytest.mark.parametrize("scans", [0.0, 0.3])
def test_no_policy_beats_the_optimum_and_two_speed_keeps_its_promise(scans: float) -> None:
    """At most half a point under LRU, and clearly above it where scans come between."""
    trace = chat(1, num_requests=2500, num_users=100, scans=scans)
    rates = {name: hit_rate(trace, 1500, make_policy(name, 1500)) for name in POLICIES}
    print(rates)
    assert max(rates.values()) <= optimal_hit_rate(trace, 1500)
    assert rates["two-speed"] >= rates["lru"] - 0.005
    if scans:
        assert rates["two-speed"] >= rates["lru"] + 0.03


@pytest.mark.parametrize("zipped", [False, True])
def test_reads_a_recorded_trace_and_prints_one_object(
    zipped: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = "".join(json.dumps({"hash_ids": ids}) + "\n" for ids in ([1, 2], [1, 2, 3], [4]))
    path = tmp_path / ("trace.jsonl.gz" if zipped else "trace.jsonl")
    path.write_bytes(gzip.compress(lines.encode()) if zipped else lines.encode())
    assert [len(keys) for keys in read_trace(path)] == [2, 3, 1]
    assert main(["--trace", str(path), "--sizes", "4", "--generated", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    assert row["trace"] == "recorded"
    assert row["rates"] == dict.fromkeys([*POLICIES, "optimum"], 2 / 6)
    assert main(["--trace", str(path), "--sizes", "4", "--generated", "--policies", "lru"]) == 0
    assert "| recorded | 4 | 33.3 | 33.3 |" in capsys.readouterr().out


@pytest.mark.parametrize(
    "wrong", [["--sizes", "0"], ["--trace", "nowhere"], ["--generated"], ["--generated", "novel"]]
)
def test_wrong_arguments_are_refused(wrong: list[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(wrong)
    assert stopped.value.code == 2
