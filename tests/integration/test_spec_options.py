"""The options: of vLLM's two connectors, all of them, in ours and in the docs; and of the spec."""

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest
from kvferry.integration.vllm import config, foreign_options
from kvferry.integration.vllm.foreign_options import FOREIGN_OPTIONS, Treatment, without_foreign
from kvferry.integration.vllm.spec import (
    OPTIONS,
    VLLM_OPTIONS,
    KVFerryOffloadingManager,
    KVFerryOffloadingSpec,
)
from vllm.config import CacheConfig, KVTransferConfig, VllmConfig
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec
from vllm.v1.kv_offload.factory import OffloadingSpecFactory
from vllm_sources import NEXT_FOLDER, NO_NEXT, installed_folder, option_names

DOCS = Path(__file__).resolve().parents[2] / "docs" / "choosing.md"

CONNECTOR_FILES = (
    "distributed/kv_transfer/kv_connector/v1/offloading_connector.py",
    "distributed/kv_transfer/kv_connector/v1/offloading/*.py",
    "distributed/kv_transfer/kv_connector/v1/simple_cpu_offload_connector.py",
    "v1/simple_kv_offload/*.py",
    "v1/kv_offload/*.py",
    "v1/kv_offload/cpu/**/*.py",
    "v1/kv_offload/tiering/*.py",
)
"""What reads ``kv_connector_extra_config``; each second tier's own settings are a level below."""

SAME = "same meaning"


def table() -> dict[str, tuple[str, str]]:
    """The options of ``docs/choosing.md``: what becomes of each, and the remark."""
    rows = re.findall(
        r"^\| `(\w+)` \| [^|]+ \| ([^|]+) \|([^|]*)\|$", DOCS.read_text(), re.MULTILINE
    )
    found = {name: (treatment.strip(), remark.strip()) for name, treatment, remark in rows}
    assert len(found) == len(rows), "an option stands in the table twice"
    return found


@pytest.fixture(
    params=[
        "installed",
        pytest.param("next", marks=pytest.mark.skipif(not NEXT_FOLDER.exists(), reason=NO_NEXT)),
    ]
)
def folder(request: pytest.FixtureRequest) -> Path:
    return installed_folder() if request.param == "installed" else NEXT_FOLDER


def test_every_option_of_vllms_connectors_stands_in_the_table(folder: Path) -> None:
    read: set[str] = set()
    for pattern in CONNECTOR_FILES:
        paths = list(folder.glob(pattern))
        assert paths, f"vLLM has no {pattern} any more"
        for path in paths:
            read |= option_names(path)
    assert {"cpu_bytes_to_use", "lazy_offload", "block_size", "spec_name"} <= read
    assert read - set(table()) == set()


def test_the_table_has_no_option_that_vllm_does_not_have() -> None:
    if not NEXT_FOLDER.exists():
        pytest.skip(NO_NEXT)
    both = (installed_folder(), NEXT_FOLDER)
    read = {
        name
        for root in both
        for pattern in CONNECTOR_FILES
        for path in root.glob(pattern)
        for name in option_names(path)
    }
    assert set(table()) - read == set()


def test_the_table_says_what_the_code_does() -> None:
    differing = {name: told for name, (told, _) in table().items() if told != SAME}
    assert differing == {name: str(f.treatment) for name, f in FOREIGN_OPTIONS.items()}


@pytest.mark.parametrize("name", [name for name, (told, _) in table().items() if told == SAME])
def test_what_means_the_same_is_an_option_of_ours(name: str) -> None:
    kinds = [kind for kind in vars(config).values() if dataclasses.is_dataclass(kind)]
    fields = {field.name for kind in kinds for field in dataclasses.fields(kind)}
    if name not in fields:
        pytest.xfail(f"{name} is not an option of ours yet")


@pytest.mark.parametrize("name", FOREIGN_OPTIONS)
def test_what_is_not_ours_is_ignored_or_refused_by_name(name: str) -> None:
    foreign = FOREIGN_OPTIONS[name]
    given = {name: "something", "cpu_bytes_to_use": "1GiB"}
    if foreign.treatment is Treatment.REFUSED:
        with pytest.raises(ValueError, match=f"{name}='something': "):
            without_foreign(given)
    else:
        assert without_foreign(given) == {"cpu_bytes_to_use": "1GiB"}
    if foreign.harmless is not None:
        assert without_foreign({name: foreign.harmless}) == {}


def test_an_ignored_option_is_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    warned: list[str] = []
    monkeypatch.setattr(
        foreign_options.logger, "warning_once", lambda text, *args: warned.append(text % args)
    )
    without_foreign({"disk_path": "/data", "kv_offload_backend": "cpu", "unknown": 1})
    assert len(warned) == 1
    assert "disk_path is ignored: there is no disk tier" in warned[0]


@pytest.mark.parametrize("number", range(3))
def test_the_commands_in_the_docs_are_ones_that_vllm_takes(number: int) -> None:
    found = re.findall(r"--kv-transfer-config '(\{.*?\})'\n", DOCS.read_text(), re.DOTALL)
    assert len(found) == 3
    transfer = KVTransferConfig(**json.loads(found[number]))
    extra = transfer.kv_connector_extra_config
    assert transfer.kv_role == "kv_both"
    if transfer.kv_connector and transfer.kv_connector.startswith("KVFerry"):
        assert transfer.kv_load_failure_policy == "recompute"
        assert config.Options.parse(extra).cpu_bytes_to_use == 64 * config.GIB
    else:
        extra = {"cpu_bytes_to_use": "64GiB", **extra}  # --kv-offloading-size adds it
        assert OffloadingSpecFactory.create_spec(offloading_config(extra)).num_chunks > 0


# The spec's own.


def offloading_config(extra: dict[str, Any], **more: Any) -> OffloadingConfig:
    """What vLLM makes for a model of one group with 1,000 bytes a block."""
    parallel = {
        "rank": 0,
        "world_size": 1,
        "tp_size": 1,
        "pp_size": 1,
        "pcp_size": 1,
        "dcp_size": 1,
    }
    parallel |= {"data_parallel_index": 0, "data_parallel_size": 1}
    parallel |= {"data_parallel_rank_local": None, "is_parallelism_agnostic": True}
    parallel |= more.pop("parallel", {})
    return OffloadingConfig(
        groups=(OffloadingGroupConfig(16, ("layer",), 0),),
        worker_kv_bytes_per_block=1000,
        enable_kv_cache_events=False,
        extra_config={"spec_name": "KVFerryOffloadingSpec", **extra},
        engine_id="engine",
        model=OffloadingModelConfig("model", "float32"),
        cache=OffloadingCacheConfig(16, 2),
        parallel=OffloadingParallelConfig(**parallel),
        **more,
    )


@pytest.mark.parametrize(
    ("extra", "num_ranks", "num_chunks"),
    [
        ({"cpu_bytes_to_use": 2048 * 10}, 1, 10),  # 2 x 1,000 bytes, rounded up to 64: 2,048
        ({"cpu_bytes_to_use": "20KiB"}, 1, 10),
        ({"cpu_bytes_to_use": 2048 * 10 + 0.5}, 1, 10),  # as --kv-offloading-size gives it
        ({"cpu_bytes_to_use": 2048 * 10}, 4, 2),
        ({"cpu_bytes_to_use": 1, "cpu_bytes_to_use_per_rank": 2048 * 3}, 4, 3),
        ({"cpu_bytes_to_use": 1, "num_cpu_blocks": 7}, 4, 7),
    ],
)
def test_the_size_of_the_host_cache(extra: dict[str, Any], num_ranks: int, num_chunks: int) -> None:
    spec = KVFerryOffloadingSpec(offloading_config(extra, parallel={"world_size": num_ranks}))
    assert spec.num_chunks == num_chunks
    assert spec.get_manager() is spec.get_manager()
    assert isinstance(spec.get_manager(), KVFerryOffloadingManager)


@pytest.mark.parametrize(
    ("extra", "more", "told"),
    [
        ({}, {}, "names no size; allowed: cpu_bytes_to_use"),
        ({"cpu_bytes_to_use": 2047}, {}, "less than one chunk on each of 1 ranks"),
        ({"cpu_bytes_to_use": "much"}, {}, "cpu_bytes_to_use='much'; allowed"),
        ({"num_cpu_blocks": 0}, {}, "num_cpu_blocks=0; allowed: an integer from 1 on"),
        ({"cpu_bytes_to_use": 1 << 20, "nope": 1}, {}, "the key 'nope'"),
        ({"cpu_bytes_to_use": 1 << 20, "secondary_tiers": []}, {}, "the key 'secondary_tiers'"),
        ({"cpu_bytes_to_use": 1 << 20}, {"canonical_layout": True}, "canonical_layout is not"),
        ({"cpu_bytes_to_use": 1 << 20}, {"parallel": {"pp_size": 2}}, "pipeline parallelism"),
    ],
)
def test_what_the_spec_refuses(extra: dict[str, Any], more: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=re.escape(told)):
        KVFerryOffloadingSpec(offloading_config(extra, **more))


@pytest.mark.parametrize(
    ("option", "told"),
    [
        ({"store_threshold": "2"}, "store_threshold='2'; allowed: an integer from 0 on"),
        ({"max_tracker_size": -1}, "max_tracker_size=-1; allowed"),
        ({"eviction_policy": "mru"}, "eviction policy 'mru' is not known"),
    ],
)
def test_what_the_manager_is_not_made_with(option: dict[str, Any], told: str) -> None:
    spec = KVFerryOffloadingSpec(offloading_config({"cpu_bytes_to_use": 1 << 20, **option}))
    with pytest.raises(ValueError, match=re.escape(told)):
        spec.get_manager()


def test_metrics_are_declared_as_vllms() -> None:
    extra = {"store_threshold": 2}
    declared = KVFerryOffloadingSpec.build_metric_definitions(extra)
    assert declared == CPUOffloadingSpec.build_metric_definitions(extra)
    manager = KVFerryOffloadingManager(4, store_threshold=2)
    assert set(manager.get_stats().reduce()) <= set(declared)


def test_the_spec_knows_every_option_of_the_table() -> None:
    """An option of vLLM's is either known to the spec, or refused by its name."""
    unknown = set(table()) - OPTIONS - VLLM_OPTIONS
    for name in unknown - {"canonical_layout"}:
        with pytest.raises(ValueError, match=f"the key {name!r}"):
            KVFerryOffloadingSpec(offloading_config({"cpu_bytes_to_use": 1 << 20, name: 1}))


def test_vllm_finds_the_spec_by_its_module_path() -> None:
    extra = {"spec_module_path": "kvferry.integration.vllm.spec", "cpu_bytes_to_use": "1MiB"}
    spec = OffloadingSpecFactory.create_spec(offloading_config(extra))
    assert isinstance(spec, KVFerryOffloadingSpec)


def test_the_offloading_size_flag_keeps_the_spec_and_overwrites_a_name() -> None:
    """What the docs tell those who use --kv-offloading-size."""
    extra = {"spec_name": "KVFerryOffloadingSpec"}
    vllm_config = VllmConfig(
        cache_config=CacheConfig(kv_offloading_size=0.3),
        kv_transfer_config=KVTransferConfig(
            kv_role="kv_both",
            kv_connector="KVFerrySimpleConnector",
            kv_connector_extra_config=dict(extra),
        ),
    )
    transfer = vllm_config.kv_transfer_config
    assert transfer is not None
    assert transfer.kv_connector == "OffloadingConnector"
    assert transfer.kv_connector_extra_config == {**extra, "cpu_bytes_to_use": 0.3 * (1 << 30)}
    spec = KVFerryOffloadingSpec(offloading_config(transfer.kv_connector_extra_config))
    assert spec.num_chunks == int(0.3 * (1 << 30)) // 2048
