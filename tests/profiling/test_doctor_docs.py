"""The pages on sizing and diagnosis name every option, every check and every kind of status."""

import re
from pathlib import Path

import pytest
from kvferry.engine.capacity import UNLIMITED, MemoryLimits
from kvferry.profiling import doctor, plan
from kvferry.profiling.doctor_findings import Status
from kvferry.profiling.doctor_gpu import check_gpus
from kvferry.profiling.doctor_host import check_huge_pages, check_memory, check_numa
from kvferry.profiling.doctor_kernels import check_kernels
from kvferry.profiling.doctor_software import check_failure_policy, check_versions
from kvferry.profiling.doctor_trip import check_round_trip

DOCS = Path(__file__).resolve().parents[2] / "docs"


@pytest.mark.parametrize(("page", "command"), [("sizing.md", plan), ("diagnosis.md", doctor)])
def test_every_option_is_explained(page: str, command: object) -> None:
    parser = command._parser()  # type: ignore[attr-defined]
    options = {name for action in parser._actions for name in action.option_strings}
    options -= {"-h", "--help"}
    text = (DOCS / page).read_text()
    assert not {one for one in options if f"`{one}" not in text and f"{one} " not in text}


def test_every_check_is_explained() -> None:
    text = (DOCS / "diagnosis.md").read_text()
    rows = re.findall(r"^\| ([^|]+) \|", text, re.MULTILINE)
    explained = {name.strip() for row in rows for name in row.split(",")}
    found = [
        *check_versions({}.get),
        check_failure_policy(None),
        *check_gpus("none", 0),
        check_numa(),
        check_huge_pages(),
        *check_memory(MemoryLimits(1, UNLIMITED, 1), 1),
        check_kernels(None),
        *check_round_trip(1 << 20),
    ]
    assert {one.check for one in found} <= explained
    assert "plugin" in explained
    assert all(f"`{status}`" in text for status in Status)
