"""Options and settings: what is wrong is refused by name, with what is allowed."""

from pathlib import Path
from typing import Any

import pytest
from kvferry.integration.vllm import support
from kvferry.integration.vllm.config import GIB, OffloadingOptions, Options, SimpleOptions
from real_scheduler import Engine


@pytest.mark.parametrize(
    ("given", "key", "allowed"),
    [
        ({"cpu_bytes": 1}, "'cpu_bytes'", "cpu_bytes_to_use"),
        ({"cpu_bytes_to_use": -1}, "cpu_bytes_to_use=-1", "positive"),
        ({"cpu_bytes_to_use": 0}, "cpu_bytes_to_use=0", "positive"),
        ({"cpu_bytes_to_use": "lots"}, "cpu_bytes_to_use='lots'", "64GiB"),
        ({"cpu_bytes_to_use": "64"}, "cpu_bytes_to_use='64'", "64GiB"),
        ({"cpu_bytes_to_use": "-1GiB"}, "cpu_bytes_to_use='-1GiB'", "64GiB"),
        ({"cpu_bytes_to_use": True}, "cpu_bytes_to_use=True", "bytes"),
        ({"cpu_bytes_to_use": 1.5}, "cpu_bytes_to_use=1.5", "bytes"),
        ({"cpu_bytes_to_use": None}, "cpu_bytes_to_use=None", "bytes"),
        ({"cpu_bytes_to_use_per_rank": "x"}, "cpu_bytes_to_use_per_rank='x'", "64GiB"),
        ({"num_cpu_blocks": 0}, "num_cpu_blocks=0", "positive integer"),
        ({"num_cpu_blocks": "8"}, "num_cpu_blocks='8'", "positive integer"),
        ({"transfer_deadline_s": 0}, "transfer_deadline_s=0", "seconds above 0"),
        ({"transfer_deadline_s": "10"}, "transfer_deadline_s='10'", "seconds above 0"),
        ({"integrity": "some"}, "integrity='some'", "full, sample, off"),
        ({"kv_cache_layout": "NHD"}, "kv_cache_layout='NHD'", "LBHNC"),
    ],
)
@pytest.mark.parametrize("options", [SimpleOptions, OffloadingOptions])
def test_a_bad_option_names_the_key_the_value_and_what_is_allowed(
    options: type[Options], given: dict[str, Any], key: str, allowed: str
) -> None:
    with pytest.raises(ValueError, match="kv_connector_extra_config") as raised:
        options.parse(given)
    assert key in str(raised.value)
    assert allowed in str(raised.value)


@pytest.mark.parametrize(
    ("given", "key", "allowed"),
    [
        ({"block_size": -4}, "block_size=-4", "positive integer"),
        ({"blocks_per_chunk": 1.0}, "blocks_per_chunk=1.0", "positive integer"),
        ({"block_size": 64, "blocks_per_chunk": 2}, "block_size=64", "one of them"),
        ({"offload_prompt_only": "yes"}, "offload_prompt_only='yes'", "true or false"),
        ({"eviction_policy": 3}, "eviction_policy=3", "name"),
        ({"store_threshold": -1}, "store_threshold=-1", "positive integer"),
    ],
)
def test_a_bad_option_of_the_general_connector(
    given: dict[str, Any], key: str, allowed: str
) -> None:
    with pytest.raises(ValueError, match="kv_connector_extra_config") as raised:
        OffloadingOptions.parse(given)
    assert key in str(raised.value)
    assert allowed in str(raised.value)


@pytest.mark.parametrize(
    ("given", "num_bytes"),
    [
        ("64GiB", 64 * GIB),
        ("1.5 gib", 3 * GIB // 2),
        ("8GB", 8 * 10**9),
        ("512MiB", 2**29),
        (4096, 4096),
        (6.4e10, 64 * 10**9),
    ],
)
def test_sizes(given: Any, num_bytes: int) -> None:
    assert SimpleOptions.parse({"cpu_bytes_to_use": given}).cpu_bytes_to_use == num_bytes


def test_the_whole_servers_memory_is_split_over_its_ranks() -> None:
    assert SimpleOptions.parse({"cpu_bytes_to_use": 1000}).num_slots(100, num_ranks=2) == 5
    both = SimpleOptions.parse({"cpu_bytes_to_use": 1000, "cpu_bytes_to_use_per_rank": 800})
    assert both.num_slots(100, num_ranks=2) == 8
    counted = SimpleOptions.parse({"cpu_bytes_to_use": 1000, "num_cpu_blocks": 3})
    assert counted.num_slots(100, num_ranks=2) == 3


def test_less_than_one_slot_is_refused(model_config_dir: Path) -> None:
    with pytest.raises(ValueError, match=r"cpu_bytes_to_use=100 .* at least \d+ bytes a rank"):
        Engine(model_config_dir, extra_config={"cpu_bytes_to_use": 100})


def test_an_unknown_key_stops_the_start(model_config_dir: Path) -> None:
    with pytest.raises(ValueError, match="unknown key 'cpu_byte_to_use'"):
        Engine(model_config_dir, extra_config={"cpu_byte_to_use": 100})


@pytest.mark.parametrize("role", ["kv_producer", "kv_consumer"])
def test_another_role_is_refused_with_a_reason(model_config_dir: Path, role: str) -> None:
    with pytest.raises(ValueError, match=f"kv_role='{role}': kvferry is a cache.*'kv_both'"):
        Engine(model_config_dir, kv_role=role)


@pytest.mark.parametrize("version", ["0.31.2", "0.34.0", "1.0", "dev"])
def test_a_vllm_that_it_was_not_written_for_is_refused(version: str) -> None:
    with pytest.raises(ValueError, match=version):
        support.check_vllm(version)


@pytest.mark.parametrize("version", ["0.32.0", "0.32.1+cpu", "0.33.0", "0.33.2rc1"])
def test_a_vllm_that_it_was_written_for(version: str) -> None:
    support.check_vllm(version)


def test_chunks_must_be_whole_blocks(model_config_dir: Path) -> None:
    with pytest.raises(ValueError, match=r"block_size=6; allowed: a multiple of 4"):
        Engine(
            model_config_dir,
            connector="KVFerryOffloadingConnector",
            extra_config={"block_size": 6},
        )


def test_an_unknown_policy_is_refused(model_config_dir: Path) -> None:
    with pytest.raises(ValueError, match=r"eviction policy 'best' .*allowed: arc, lru"):
        Engine(
            model_config_dir,
            connector="KVFerryOffloadingConnector",
            extra_config={"eviction_policy": "best"},
        )
