"""When loading pays: hand-counted bytes, and the break-even against a search over every length."""

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
from kvferry.profiling.plan import Wanted, main, make_plan
from kvferry.profiling.plan_groups import Group
from kvferry.profiling.plan_load import LoadCost, Prompts, parse_link
from kvferry.profiling.plan_model import Attention, read_model
from kvferry.profiling.plan_units import parse_size, size_text

SHAPES = Path(__file__).resolve().parents[2] / "docs" / "shapes"
GB = 1e9


def group(attention: Attention, reach_tokens: int = 0) -> Group:
    """Four layers, 1,000 bytes a layer and block."""
    return Group(attention, reach_tokens, 4, 2, 1000)


def prompts(*groups: Group, chunk_tokens: int = 16, rate: float | None = None) -> Prompts:
    return Prompts(groups, 16, chunk_tokens, LoadCost(1e6, 0.001), rate)


@pytest.mark.parametrize(
    ("attention", "reach", "chunk_tokens", "prompt_tokens", "num_blocks"),
    [
        (Attention.FULL, 0, 16, 161, 10),
        (Attention.FULL, 0, 16, 160, 9),  # the last token is computed in any case
        (Attention.FULL, 0, 64, 161, 8),  # whole chunks only
        (Attention.FULL, 0, 64, 64, 0),
        (Attention.LATENT, 0, 16, 161, 10),
        (Attention.WINDOW, 33, 16, 161, 2),  # tokens 128 to 159
        (Attention.WINDOW, 34, 16, 161, 3),  # token 127 too, and with it its block
        (Attention.WINDOW, 1024, 16, 161, 10),
        (Attention.CHUNKED, 64, 16, 161, 2),  # tokens 128 to 159 of the chunk that 160 is in
        (Attention.CHUNKED, 160, 16, 161, 0),  # token 160 begins a chunk
    ],
)
def test_a_hit_loads_what_later_tokens_read(
    attention: Attention, reach: int, chunk_tokens: int, prompt_tokens: int, num_blocks: int
) -> None:
    row = prompts(group(attention, reach), chunk_tokens=chunk_tokens).row(prompt_tokens)
    assert row.load_bytes == num_blocks * 4000
    assert row.hit_tokens == (prompt_tokens - 1) // chunk_tokens * chunk_tokens
    if row.hit_tokens:
        assert row.load_s == pytest.approx(0.001 + row.load_bytes / 1e6)
        assert row.even_rate == pytest.approx(row.hit_tokens / row.load_s)


def test_the_break_even_is_the_first_length_at_which_loading_is_no_slower() -> None:
    seed = 7
    print("seed", seed)
    chance = random.Random(seed)
    found = 0
    for _ in range(200):
        groups = [group(Attention.FULL), group(Attention.WINDOW, chance.randint(2, 400))]
        chosen = groups[: chance.randint(1, 2)]
        rate = chance.uniform(500, 30_000)
        one = prompts(*chosen, chunk_tokens=chance.choice([16, 48]), rate=rate)
        lengths = range(2, 1500)
        first = next((n for n in lengths if one.row(n).worth_it), None)
        even = one.break_even(1500)
        assert (even.prompt_tokens if even else None) == first
        found += first is not None
    assert 20 < found < 200  # both answers were seen


def test_without_a_rate_nothing_is_decided() -> None:
    one = prompts(group(Attention.FULL))
    assert one.break_even(10_000) is None
    row = one.row(1000)
    assert (row.compute_s, row.worth_it) == (None, None)


def test_the_break_even_stands_once_in_the_table() -> None:
    one = prompts(group(Attention.FULL), rate=200.0)
    even = one.break_even(1000)
    assert even is not None
    rows = one.table([8, even.prompt_tokens, 900], 1000)
    assert [row.prompt_tokens for row in rows] == [8, even.prompt_tokens, 900]
    assert [row.is_break_even for row in rows] == [False, True, False]


WANTED = Wanted(
    read_model(str(SHAPES / "llama-3.1-8b.json")),
    num_ranks=1,
    dtype="bfloat16",
    block_tokens=16,
    blocks_per_chunk=1,
    kv_layout="LBHNC",
    checksums=True,
    host_bytes=64 << 30,
    cost=LoadCost(50 * GB),
    tokens_per_s=None,
    lengths=(1024,),
)


def test_llama_8b_by_hand() -> None:
    plan = make_plan(WANTED)
    assert plan.bytes_per_token == 32 * 8 * 2 * 128 * 2 == 128 << 10
    assert (plan.block_bytes, plan.slot_bytes) == (2 << 20, 2 << 20)
    assert plan.checksum_bytes == 32 * 8
    assert plan.num_slots == (64 << 30) // ((2 << 20) + 256)
    assert plan.held_tokens == plan.num_slots * 16


def test_ranks_share_heads_and_memory() -> None:
    one, four = make_plan(WANTED), make_plan(replace(WANTED, num_ranks=4))
    assert one.slot_bytes == 4 * four.slot_bytes
    without = make_plan(replace(WANTED, num_ranks=4, checksums=False))
    assert without.held_tokens == make_plan(replace(WANTED, checksums=False)).held_tokens


def test_groups_of_a_hybrid_take_a_slot_each() -> None:
    gemma = replace(WANTED, model=read_model(str(SHAPES / "gemma-3-27b.json")))
    plan = make_plan(gemma)
    assert len(plan.groups) == 7
    assert plan.held_tokens == plan.num_slots // 7 * 16
    assert plan.slot_bytes == max(one.block_bytes for one in plan.groups)
    assert plan.wasted_bytes == tuple(plan.slot_bytes - one.block_bytes for one in plan.groups)


@pytest.mark.parametrize("name", sorted(path.stem for path in SHAPES.glob("*.json")))
def test_the_command_sizes_every_shape(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(SHAPES / f"{name}.json")
    assert main([path, "--prefill-rate", "20000", "--link", "24.8", "--lengths", "2000"]) == 0
    out = capsys.readouterr().out
    assert "<- break-even" in out
    assert main([path, "--prefill-rate", "20000", "--json", "--tp", "2"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["num_ranks"] == 2
    assert sum(row["is_break_even"] for row in data["rows"]) == 1
    assert {row["worth_it"] for row in data["rows"] if row["is_break_even"]} == {True}


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (["--tp", "3"], "tensor parallel size 3"),
        (["--link", "carrier pigeon"], "link 'carrier pigeon'; allowed: pcie3x16"),
        (["--link", "0"], "GB/s as a number above 0"),
        (["--host-memory", "much"], "--host-memory 'much'"),
    ],
)
def test_what_makes_no_sense_is_refused(
    argv: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(SHAPES / "llama-3.1-8b.json"), *argv]) == 2
    assert named in capsys.readouterr().err


def test_a_slow_link_never_pays(capsys: pytest.CaptureFixture[str]) -> None:
    path = str(SHAPES / "mistral-7b-v0.1.json")
    assert main([path, "--prefill-rate", "1000000", "--link", "0.01"]) == 0
    assert "Loading never beats this prefill rate" in capsys.readouterr().out


def test_sizes_are_written_as_they_are_read() -> None:
    for text, size in (("64GiB", 64 << 30), ("8 GB", 8 * 10**9), ("512", 512), ("1.5MiB", 3 << 19)):
        assert parse_size("size", text) == size
    assert [size_text(size) for size in (0, 1023, 1536, 3 << 30)] == [
        "0 B",
        "1023 B",
        "1.5 KiB",
        "3 GiB",
    ]
    assert parse_link("pcie4x16").bytes_per_s == parse_link("24.8").bytes_per_s
