"""The summary of an nsys export that the test builds with nsys's own tables."""

import sqlite3
import sys
from pathlib import Path

import pytest
from kvferry.profiling.nsight import KERNELS, main, sections_of
from kvferry.profiling.nsight_export import Export

sys.path.insert(0, str(Path(__file__).parent))
from nsys_export import ExportFile

MIB = 1 << 20


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "kvferry.sqlite"


def two_workers(path: Path) -> None:
    """Two processes whose ids of domains, threads and launches are the same, and one stranger.

    Process 100 stores by a kernel and by copies, process 200 loads; domain 1 is ours in the one,
    somebody else's in the other.
    """
    file = ExportFile(path)
    file.domain("kvferry", 1, 100)
    file.domain("torch", 1, 200)
    file.domain("kvferry", 2, 200, registered=True)

    file.span("submit job=1 direction=store bytes=4096 strategy=packed", 1000, 1100, process=100)
    file.call(1010, 7, process=100)
    file.kernel("pack_pages_kernel", 2000, 2500, 7, process=100)
    file.call(1020, 8, process=100)
    file.copy(2500, 3000, 4096, 8, process=100, kind=2)
    file.call(1100, 9, process=100)  # begins when the range has ended: not its own
    file.copy(4000, 9000, 1 << 20, 9, process=100, kind=8)

    file.span(
        "submit job=2 direction=load strategy=copy_engine",
        1000,
        1400,
        process=200,
        domain=2,
        registered=True,
    )
    file.call(1050, 7, process=200)
    file.copy(5000, 6000, MIB, 7, process=200, kind=1)
    file.copy(6000, 7000, MIB, 7, process=200, kind=1)  # one call can make many copies
    file.kernel("attention", 0, 10, 12, process=200)

    file.span("submit job=9 direction=load", 1000, 1500, process=200, domain=1)  # torch's
    file.span("submit job=3 direction=load", 2000, None, process=100)  # never ended
    file.span("flush jobs=2 bytes=64", 3000, 3300, process=100, kind=60, thread=8)
    file.close()


def test_ranges_are_ours_and_know_what_the_gpu_did(path: Path) -> None:
    two_workers(path)
    ranges = {one.kind: one for one in sections_of(Export(path))["range"]}
    assert set(ranges) == {"submit store packed", "submit load copy_engine", "flush"}
    store = ranges["submit store packed"]
    assert (store.count, store.total_s, store.num_bytes) == (1, 100e-9, 4096)
    assert store.device_s == pytest.approx(1000e-9)  # 500 of the kernel, 500 of the copy
    assert store.bytes_per_s == pytest.approx(4096 / 1000e-9)
    load = ranges["submit load copy_engine"]
    assert load.num_bytes == 2 * MIB  # from the copies: the message does not say
    assert load.bytes_per_s == pytest.approx(2 * MIB / 2000e-9)
    assert ranges["flush"].bytes_per_s is None  # a wait says nothing about speed


def test_copies_and_kernels_have_sections_of_their_own(path: Path) -> None:
    two_workers(path)
    sections = sections_of(Export(path))
    copies = {one.kind: (one.count, one.num_bytes) for one in sections["copy"]}
    assert copies == {
        "copy host to device": (2, 2 * MIB),
        "copy device to host": (1, 4096),
        "copy on the device": (1, MIB),
    }
    assert [one.kind for one in sections["kernel"]] == ["pack_pages_kernel"]


def test_percentiles_are_of_all_ranges_of_a_kind(path: Path) -> None:
    file = ExportFile(path)
    file.domain("kvferry", 1, 100)
    for number in range(200):
        start = number * 10_000
        file.span(f"plan job={number} direction=store", start, start + number + 1, process=100)
    file.close()
    (plan,) = sections_of(Export(path))["range"]
    assert (plan.count, plan.p50_s, plan.p99_s) == (200, 100e-9, 198e-9)
    assert plan.total_s == pytest.approx(sum(range(1, 201)) * 1e-9)


@pytest.mark.parametrize(
    "missing",
    ["CUPTI_ACTIVITY_KIND_MEMCPY", "CUPTI_ACTIVITY_KIND_KERNEL", "CUPTI_ACTIVITY_KIND_RUNTIME"],
)
def test_tables_that_recorded_nothing_may_be_absent(path: Path, missing: str) -> None:
    file = ExportFile(path, without=(missing,))
    file.domain("kvferry", 1, 100)
    file.span("flush jobs=1 bytes=64", 10, 20, process=100)
    file.close()
    assert [one.kind for one in sections_of(Export(path))["range"]] == ["flush"]


def test_a_profile_without_our_ranges_says_so(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ExportFile(path, without=("NVTX_EVENTS",)).close()
    assert main(["summary", str(path)]) == 0
    assert "no range of kvferry's was recorded" in capsys.readouterr().out


def test_a_file_that_is_no_export_is_refused(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["summary", str(path)]) == 2
    path.write_bytes(b"not a database, and long enough to be looked at" * 40)
    assert main(["summary", str(path)]) == 2
    path.unlink()
    with sqlite3.connect(path) as file:
        file.execute("CREATE TABLE other (id INTEGER)")
    assert main(["summary", str(path)]) == 2
    error = capsys.readouterr().err
    assert "no export at" in error
    assert "cannot be read" in error
    assert "no table StringIds" in error


def test_the_table_names_what_was_measured(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    two_workers(path)
    assert main(["summary", str(path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    row = next(line for line in lines if line.startswith("submit store packed"))
    assert row.split()[3:] == ["1", "0.00", "0.1", "0.1", "0.00", "4", "KiB", "4.10"]


def test_the_kernels_are_those_that_the_launchers_choose() -> None:
    from kvferry.kernels.configurations import all_configurations

    assert {one.kernel.__name__ for one in all_configurations()} == set(KERNELS)
