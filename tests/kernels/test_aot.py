# ruff: noqa: N803 - constexpr arguments are upper case, as in the kernels
"""The analyser on kernels made to pass and made to fail: a check that cannot fail shows nothing."""

import json
from collections.abc import Mapping
from typing import Any

import pytest
import triton
import triton.language as tl
from kvferry.kernels import aot
from kvferry.kernels.configurations import KernelConfiguration

TILE_BYTES = 16384
TYPES = {"ids_ptr": "*i64", "source_ptr": "i64", "target_ptr": "i64", "num_items": "i32"}


@triton.jit
def move(
    ids_ptr, source_ptr, target_ptr, num_items, HINT: tl.constexpr, STAGES: tl.constexpr
):  # fmt: skip
    columns = tl.arange(0, 4096)
    for item in tl.range(tl.program_id(0), num_items, tl.num_programs(0), num_stages=STAGES):
        block = tl.load(ids_ptr + item)
        source = (source_ptr + block * 16384).to(tl.pointer_type(tl.int32))
        target = (target_ptr + item * 16384).to(tl.pointer_type(tl.int32))
        source = tl.multiple_of(source, HINT)
        target = tl.multiple_of(target, HINT)
        tl.store(target + columns, tl.load(source + columns))


@triton.jit
def hold(ids_ptr, source_ptr, target_ptr, num_items, SIZE: tl.constexpr):
    """Needs every value in a register at once: the largest is subtracted from all of them."""
    columns = tl.arange(0, SIZE)
    source = tl.multiple_of((source_ptr + tl.load(ids_ptr)).to(tl.pointer_type(tl.int32)), 16)
    target = tl.multiple_of(target_ptr.to(tl.pointer_type(tl.int32)), 16)
    tile = tl.load(source + columns)
    tl.store(target + columns, tile - tl.max(tile, axis=0))


@triton.jit
def read(ids_ptr, source_ptr, target_ptr, num_items):
    tl.store(ids_ptr, tl.load(ids_ptr + num_items))


def configuration(
    kernel: Any = move,
    constexprs: Mapping[str, Any] | None = None,
    *,
    name: str = "probe",
    options: Mapping[str, int] | None = None,
    num_stages: int = 1,
    access_bytes: int = 16,
    in_flight_bytes: int = TILE_BYTES,
) -> KernelConfiguration:
    return KernelConfiguration(
        name=name,
        kernel=kernel,
        signature=TYPES,
        constexprs={"HINT": 16, "STAGES": 1} if constexprs is None else constexprs,
        aligned=(),
        options=options or {"num_warps": 4},
        num_stages=num_stages,
        access_bytes=access_bytes,
        in_flight_bytes=in_flight_bytes,
    )


NARROW = {"HINT": 4, "STAGES": 1}


@pytest.mark.parametrize("target", aot.DEFAULT_TARGETS)
def test_an_aligned_copy_passes(target: str) -> None:
    report = aot.audit(configuration(), target)
    assert report.problems == ()
    assert set(report.load_widths) == set(report.store_widths) == {16}
    num_threads = 4 * aot.TARGETS[target].warp_size
    assert report.load_widths[16] * 16 * num_threads == TILE_BYTES
    assert report.registers > 0


@pytest.mark.parametrize("target", aot.DEFAULT_TARGETS)
def test_accesses_narrower_than_the_alignment_allows_fail(target: str) -> None:
    report = aot.audit(configuration(move, NARROW), target)
    assert set(report.load_widths) == {4}
    assert [p for p in report.problems if "loads of 4 bytes where 16 are possible" in p]
    assert [p for p in report.problems if "stores of 4 bytes where 16 are possible" in p]


def test_narrow_accesses_pass_where_no_more_is_possible() -> None:
    assert aot.audit(configuration(move, NARROW, access_bytes=4), "sm_90").problems == ()


@pytest.mark.parametrize(
    ("target", "size", "options"),
    [("sm_90", 8192, {"num_warps": 4, "maxnreg": 32}), ("gfx942", 32768, {"num_warps": 1})],
)
def test_spilled_registers_fail(target: str, size: int, options: dict[str, int]) -> None:
    report = aot.audit(configuration(hold, {"SIZE": size}, options=options), target)
    assert report.spills > 0
    assert report.problems == (f"{report.spills} register spills",)


def test_the_same_kernel_with_enough_registers_does_not_spill() -> None:
    report = aot.audit(configuration(hold, {"SIZE": 8192}, options={"num_warps": 4}), "sm_90")
    assert report.spills == 0
    assert report.problems == ()


@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_100"])
def test_a_staged_loop_keeps_its_tiles_in_shared_memory(target: str) -> None:
    staged = configuration(
        move, {"HINT": 16, "STAGES": 4}, num_stages=4, in_flight_bytes=3 * TILE_BYTES
    )
    report = aot.audit(staged, target)
    assert report.problems == ()
    assert report.shared_bytes >= 3 * TILE_BYTES


def test_a_loop_that_was_not_pipelined_fails() -> None:
    promised = configuration(num_stages=4, in_flight_bytes=3 * TILE_BYTES)
    report = aot.audit(promised, "sm_90")
    assert "staged, but without asynchronous copies" in report.problems
    assert [p for p in report.problems if p.startswith(f"{3 * TILE_BYTES} bytes in flight")]


def test_a_kernel_without_a_bulk_access_fails() -> None:
    """Its one store of eight bytes is all there is, so it is taken for the bulk, and is narrow."""
    problems = aot.audit(configuration(read, {}), "sm_90").problems
    assert "no bulk access found in the IR" in problems


@pytest.fixture
def only(monkeypatch: pytest.MonkeyPatch) -> Any:
    def replace(*configurations: KernelConfiguration) -> None:
        monkeypatch.setattr(aot, "all_configurations", lambda backend: iter(configurations))

    return replace


def test_the_command_succeeds_when_everything_passes(only: Any, capsys: Any) -> None:
    only(configuration())
    assert aot.main(["--target", "sm_90", "--jobs", "1"]) == 0
    assert "1 kernels compiled, 0 failed" in capsys.readouterr().out


def test_the_command_fails_and_says_why_below_the_line(only: Any, capsys: Any) -> None:
    only(configuration(name="good"), configuration(move, NARROW, name="bad"))
    assert aot.main(["--target", "sm_90", "--jobs", "1"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == [
        "configuration", "good", "bad", "FAILED:", "FAILED:", "2"
    ]  # fmt: skip


def test_json_holds_every_report(only: Any, capsys: Any) -> None:
    only(configuration(move, NARROW))
    assert aot.main(["--target", "sm_90,gfx942", "--jobs", "1", "--json"]) == 1
    reports = json.loads(capsys.readouterr().out)
    assert [r["target"] for r in reports] == ["sm_90", "gfx942"]
    assert all(r["problems"] and r["in_flight_bytes"] == TILE_BYTES for r in reports)


def test_an_unknown_target_is_named_with_what_is_allowed(capsys: Any) -> None:
    with pytest.raises(SystemExit) as stopped:
        aot.main(["--target", "sm_90,sm_42"])
    assert stopped.value.code == 2
    told = capsys.readouterr().err
    assert "unknown target 'sm_42'" in told
    assert "sm_80, sm_86, sm_89, sm_90, sm_100" in told


def test_the_interpreter_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(SystemExit):
        aot.main([])
    assert "TRITON_INTERPRET is set" in capsys.readouterr().err
