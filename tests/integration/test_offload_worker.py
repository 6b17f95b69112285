"""The worker's side of a connector: what orders and reports mean, with a real transfer engine."""

from collections.abc import Iterator

import pytest
import torch
from kvferry.engine import ranges
from kvferry.engine.layout import Layout, group_layout
from kvferry.engine.messages import JobOrder, Segment, StepOrders
from kvferry.engine.types import NO_JOB, BlockId, Direction, GroupId, JobId, Rank, RequestId, SlotId
from kvferry.integration.vllm.config import SimpleOptions
from kvferry.integration.vllm.worker import OffloadWorker
from kvferry.profiling.nsight_trace import recording

NUM_BLOCKS = 8


def build(*, writes_before_flush: bool) -> tuple[OffloadWorker, torch.Tensor]:
    cache = torch.arange(NUM_BLOCKS * 64, dtype=torch.float32).view(NUM_BLOCKS, 64)
    group = group_layout(GroupId(0), 1, [(cache, 256)])
    options = SimpleOptions.parse({"num_cpu_blocks": 4, "measure_s": 0})
    layout = Layout((group,), (cache,))
    worker = OffloadWorker(layout, options, Rank(0), 1, writes_before_flush=writes_before_flush)
    return worker, cache


@pytest.fixture
def late() -> Iterator[tuple[OffloadWorker, torch.Tensor]]:
    """A worker under vLLM's second model runner, which writes before it flushes."""
    worker, cache = build(writes_before_flush=True)
    yield worker, cache
    worker.close()


def order(job: int, direction: Direction, block: int, slot: int) -> JobOrder:
    segment = Segment(GroupId(0), (SlotId(slot),), (BlockId(block),), (job,))
    return JobOrder(JobId(job), direction, (segment,), RequestId(f"r{job}"))


def test_nothing_reads_any_more_when_the_next_step_begins_to_write(
    late: tuple[OffloadWorker, torch.Tensor],
) -> None:
    worker, cache = late
    before = cache[2].clone()
    step = StepOrders(stores=(order(1, Direction.STORE, 2, 0),))
    worker.begin(step)
    worker.start_loads(step)
    worker.start_stores(step)
    cache[2] = -1.0  # the next step's zeroing, before any hook of ours
    worker.drain()
    worker.take_reports()
    load = StepOrders(loads=(order(2, Direction.LOAD, 5, 0),))
    worker.begin(load)
    worker.start_loads(load)
    worker.drain()
    assert torch.equal(cache[5], before)


def test_a_store_at_finish_is_missed_when_its_blocks_are_given_away_first(
    late: tuple[OffloadWorker, torch.Tensor],
) -> None:
    worker, _ = late
    step = StepOrders(flush=(JobId(1),), prior_stores=(order(1, Direction.STORE, 2, 0),))
    worker.begin(step)
    (report,) = worker.take_reports().reports
    assert report.error is not None
    assert report.settled
    assert "overwritten" in report.error


def test_under_the_first_model_runner_that_store_is_made() -> None:
    worker, cache = build(writes_before_flush=False)
    before = cache[2].clone()
    worker.begin(StepOrders(flush=(JobId(1),), prior_stores=(order(1, Direction.STORE, 2, 0),)))
    cache[2] = -1.0  # after the flush it may be overwritten
    worker.drain()
    (report,) = worker.take_reports().reports
    assert report.error is None
    load = StepOrders(loads=(order(2, Direction.LOAD, 5, 0),))
    worker.begin(load)
    worker.start_loads(load)
    worker.drain()
    assert torch.equal(cache[5], before)
    worker.close()


def test_a_refused_load_is_reported_as_failed_with_its_blocks() -> None:
    worker, _ = build(writes_before_flush=False)
    segment = Segment(GroupId(0), (SlotId(0),) * 2, (BlockId(3), BlockId(4)), (0, 0))
    refused = JobOrder(NO_JOB, Direction.LOAD, (segment,), RequestId("r"))
    worker.start_loads(StepOrders(loads=(refused,)))
    worker.poll(StepOrders())
    assert worker.take_finished_loads() == ({"r"}, {"r"})
    assert worker.take_failed_blocks() == {3, 4}
    assert worker.take_reports().reports == ()
    worker.close()
    worker.close()


def test_a_forward_is_told_to_who_listens_and_a_step_without_one_is_not() -> None:
    worker, _ = build(writes_before_flush=False)
    with recording() as recorder:
        for orders in (StepOrders(idle=True), StepOrders(), StepOrders(idle=True)):
            worker.begin(orders)
            worker.mark_loads()  # where vLLM binds the metadata, before the forward
            with ranges.span("forward"):
                pass
            worker.start_loads(orders)
            worker.start_stores(orders)
            worker.poll(orders)
    assert [event.name for event in recorder.events] == [
        *("forward", "step"),
        *("forward", "compute", "step"),
        *("forward", "step"),
    ]
    worker.close()
