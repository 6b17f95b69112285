"""The line at the start: layout, fragments, strategies, slots and what is left over."""

import contextlib
import logging
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from kvferry.engine.layout import Layout, group_layout
from kvferry.engine.strategy import Method, Strategy
from kvferry.engine.types import Direction, GroupId, Rank
from kvferry.integration.vllm import connector, plugin
from kvferry.integration.vllm.startup import HostMemoryFacts, size, startup_line
from tiny_models import build_model, tiny_engine


def strategy_for(group: GroupId, direction: Direction, num_blocks: int) -> Strategy:
    assert num_blocks == 64
    return Strategy(Method.PACKED if direction is Direction.STORE else Method.ZERO_COPY, 16 + group)


def test_a_layer_first_layout_and_one_with_a_smaller_group() -> None:
    """Group 0 has two layers of 96 bytes a block, 2 blocks a chunk; group 1 one layer, 1 block."""
    layers = [torch.zeros(8, 96, dtype=torch.uint8) for _ in range(3)]
    layout = Layout(
        (
            group_layout(GroupId(0), 2, [(layers[0], 96), (layers[1], 96)]),
            group_layout(GroupId(1), 1, [(layers[2], 96)]),
        )
    )
    line = startup_line(Rank(3), "LBHNC", layout, HostMemoryFacts(10, 384, 4096), strategy_for)
    assert line == (
        "kvferry rank 3: KV cache layout LBHNC; "
        "group 0: 2 fragments of 96 B a block, 2 blocks a chunk, "
        "64 blocks stored by packedx16 and loaded by zero_copyx16; "
        "group 1: 1 fragment of 96 B a block, 1 block a chunk, "
        "64 blocks stored by packedx17 and loaded by zero_copyx17; "
        "10 slots of 384 B, 4 KiB in all; unused in a slot: group 1 288 B"
    )


@pytest.mark.parametrize(
    ("num_bytes", "shown"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1 KiB"),
        (1536, "1.5 KiB"),
        (2 << 20, "2 MiB"),
        (5 << 40, "5 TiB"),
        (3 << 50, "3072 TiB"),
    ],
)
def test_sizes(num_bytes: int, shown: str) -> None:
    assert size(num_bytes) == shown


def test_a_real_engine_logs_it_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    logged: list[str] = []
    monkeypatch.setattr(connector.logger, "info", lambda text, *given: logged.append(text % given))
    with tiny_engine(build_model("llama", tmp_path), connector="KVFerryOffloadingConnector") as one:
        worker = one.worker.snapshot()
        num_slots = one.worker.get_handshake_metadata().num_slots
    (line,) = [text for text in logged if text.startswith("kvferry rank")]
    assert line.startswith("kvferry rank 0: KV cache layout LBHNC; group 0: 4 fragments of 16 KiB")
    assert re.search("64 blocks stored by (compiled|interpreted).* and loaded by ", line)
    assert f"{num_slots} slots of 64 KiB, {size(worker['arena_bytes'])} in all" in line
    assert line.endswith("unused in a slot: nothing")


@contextlib.contextmanager
def fresh_logging(root_handlers: list[logging.Handler]) -> Iterator[logging.Logger]:
    """As in a fresh process: what was set up is vLLM's logging, and ``root_handlers``."""
    ours = logging.getLogger("kvferry")
    before = ours.level
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(logging.getLogger(), "handlers", root_handlers)
        patch.setattr(ours, "handlers", [])
        yield ours
    ours.setLevel(before)


class Kept(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


def test_our_lines_are_seen_where_vllm_logs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where vLLM sets up its logging after the plugins were loaded."""
    kept, theirs = Kept(), logging.getLogger("vllm")
    with fresh_logging([]):
        plugin.register()
        plugin.register()
        monkeypatch.setattr(theirs, "handlers", [kept])
        before = theirs.level
        theirs.setLevel(logging.INFO)
        connector.logger.info("a line of %s", "ours")
        logging.getLogger("kvferry.engine.arena").debug("a detail")
        theirs.setLevel(before)
    assert kept.messages == ["a line of ours"]


def test_logging_that_was_set_up_is_left_alone() -> None:
    with fresh_logging([logging.NullHandler()]) as ours:
        plugin.register()
        assert ours.handlers == []
