"""Jobs: ranks' answers, failures, late settling, fences, and resets in between."""

import itertools
import random

import pytest
from kvferry.engine.jobs import Ended, Jobs
from kvferry.engine.ledger import Ledger, ReadLease, WriteLease
from kvferry.engine.messages import JobReport
from kvferry.engine.state import SlotState
from kvferry.engine.types import (
    NO_BLOCK,
    BlockId,
    Direction,
    GroupId,
    JobId,
    Key,
    Rank,
    RequestId,
)

G0 = GroupId(0)
KEYS = [Key(bytes([name]) * 32) for name in range(4)]
ALICE, BOB = RequestId("alice"), RequestId("bob")
STORE, LOAD = Direction.STORE, Direction.LOAD


def chunks(number: int) -> tuple[tuple[GroupId, tuple[Key, ...]], ...]:
    return ((G0, tuple(KEYS[:number])),)


def blocks(*numbers: int) -> list[BlockId]:
    return [BlockId(number) for number in numbers]


def written(ledger: Ledger, keys: list[Key]) -> WriteLease:
    lease = ledger.reserve(G0, keys)
    assert lease is not None
    return lease


def pinned(ledger: Ledger, keys: list[Key]) -> ReadLease:
    if ledger.readable(G0, keys) < len(keys):
        ledger.commit(written(ledger, keys))
    return ledger.pin(G0, keys)


def answer(
    job: JobId, direction: Direction, rank: int, error: str | None = None, settled: bool = True
) -> JobReport:
    return JobReport(job, Rank(rank), direction, error=error, settled=settled)


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_a_store_is_readable_when_the_last_rank_has_reported(num_ranks: int) -> None:
    for order in itertools.permutations(range(num_ranks)):
        ledger = Ledger(4)
        jobs = Jobs(ledger, num_ranks)
        job = jobs.start(STORE, (written(ledger, KEYS[:2]),), ALICE, blocks(7, 8))
        for rank in order[:-1]:
            assert jobs.report(answer(job, STORE, rank)) is None
            assert ledger.readable(G0, KEYS) == 0
            assert jobs.fenced(blocks(8)) == {job}
        end = jobs.report(answer(job, STORE, order[-1]))
        assert end == Ended(job, STORE, ALICE, None, settled=True, chunks=chunks(2))
        assert ledger.readable(G0, KEYS) == 2
        assert (jobs.num_jobs, jobs.num_fences, jobs.num_unanswered) == (0, 0, 0)
        assert ledger.num_leases == 0
        ledger.check()


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_one_failing_rank_fails_the_store(num_ranks: int) -> None:
    for failing in range(num_ranks):
        ledger = Ledger(4)
        jobs = Jobs(ledger, num_ranks)
        job = jobs.start(STORE, (written(ledger, KEYS[:2]),))
        ends = [
            jobs.report(answer(job, STORE, rank, "lost" if rank == failing else None))
            for rank in range(num_ranks)
        ]
        error = f"rank {failing}: lost"
        assert ends[-1] == Ended(job, STORE, None, error, settled=True, chunks=chunks(2))
        assert set(ends[:-1]) <= {None}
        assert ledger.counts()[SlotState.FREE] == 4
        ledger.check()


def test_a_failed_load_is_not_offered_again_from_the_first_failure_on() -> None:
    ledger = Ledger(4)
    jobs = Jobs(ledger, num_ranks=3)
    other = pinned(ledger, KEYS[:3])
    job = jobs.start(LOAD, (ledger.pin(G0, KEYS[:2]),), ALICE)
    assert jobs.report(answer(job, LOAD, 1, "wrong checksum")) is None
    assert ledger.readable(G0, KEYS[:3]) == 0
    assert ledger.readable(G0, KEYS[2:3]) == 1
    assert jobs.loading(ALICE)
    assert jobs.report(answer(job, LOAD, 0)) is None
    end = jobs.report(answer(job, LOAD, 2, "also wrong"))
    assert end is not None
    assert end.error == "rank 1: wrong checksum"
    assert not jobs.loading(ALICE)
    assert ledger.counts()[SlotState.DOOMED] == 2
    ledger.release(other)
    ledger.check()
    assert ledger.counts()[SlotState.FREE] == 3


@pytest.mark.parametrize("direction", [STORE, LOAD])
def test_a_job_given_up_ends_at_once_and_holds_its_slots_and_fences_until_settled(
    direction: Direction,
) -> None:
    ledger = Ledger(4)
    jobs = Jobs(ledger, num_ranks=2)
    lease = written(ledger, KEYS[:2]) if direction is STORE else pinned(ledger, KEYS[:2])
    job = jobs.start(direction, (lease,), ALICE, blocks(3))
    assert jobs.report(answer(job, direction, 0)) is None
    end = jobs.report(answer(job, direction, 1, "deadline", settled=False))
    error = "rank 1: deadline"
    assert end == Ended(job, direction, ALICE, error, settled=False, chunks=chunks(2))
    assert ledger.absent(G0, KEYS[:2]) == [0, 1]
    assert ledger.counts()[SlotState.DOOMED] == 2
    assert (jobs.num_jobs, jobs.num_unanswered, jobs.loading(ALICE)) == (1, 0, False)
    assert jobs.fenced(blocks(3)) == {job}
    ledger.check()
    assert jobs.report(answer(job, direction, 1)) is None
    assert (jobs.num_jobs, jobs.num_fences, jobs.num_stray_reports) == (0, 0, 0)
    assert ledger.counts()[SlotState.FREE] == 4
    ledger.check()


def test_a_rank_may_settle_before_the_others_have_answered() -> None:
    ledger = Ledger(4)
    jobs = Jobs(ledger, num_ranks=2)
    job = jobs.start(STORE, (written(ledger, KEYS[:1]),))
    assert jobs.report(answer(job, STORE, 0, "deadline", settled=False)) is None
    assert jobs.report(answer(job, STORE, 0)) is None
    assert jobs.num_unanswered == 1
    end = jobs.report(answer(job, STORE, 1))
    assert end == Ended(job, STORE, None, "rank 0: deadline", settled=True, chunks=chunks(1))
    assert ledger.counts()[SlotState.FREE] == 4


def test_giving_up_without_a_reason_is_a_failure() -> None:
    ledger = Ledger(4)
    jobs = Jobs(ledger, num_ranks=1)
    job = jobs.start(STORE, (written(ledger, KEYS[:1]),))
    end = jobs.report(answer(job, STORE, 0, settled=False))
    assert end is not None
    assert end.error == "rank 0: given up without a reason"


def test_reports_nobody_waits_for_are_counted_and_change_nothing() -> None:
    ledger = Ledger(4)
    jobs = Jobs(ledger, num_ranks=2)
    job = jobs.start(STORE, (written(ledger, KEYS[:1]),), None, blocks(1))
    assert jobs.report(answer(job, STORE, 0)) is None
    strays = [
        answer(job, STORE, 0),  # twice
        answer(job, STORE, 0, "late", settled=False),
        answer(job, STORE, 2),  # no such rank
        answer(job, LOAD, 1),  # the other direction
        answer(JobId(99), STORE, 0),  # no such job
    ]
    for number, stray in enumerate(strays, start=1):
        assert jobs.report(stray) is None
        assert jobs.num_stray_reports == number
        assert (jobs.num_jobs, jobs.num_unanswered, jobs.num_fences) == (1, 1, 1)
        assert ledger.state_of(G0, KEYS[0]) is SlotState.WRITING
    end = jobs.report(answer(job, STORE, 1))
    assert end is not None
    assert end.error is None
    assert jobs.report(answer(job, STORE, 1)) is None
    assert jobs.num_stray_reports == len(strays) + 1
    assert "strays=6" in repr(jobs)


def test_fences_of_several_jobs_on_one_block() -> None:
    ledger = Ledger(4)
    jobs = Jobs(ledger, num_ranks=1)
    first = jobs.start(STORE, (written(ledger, KEYS[:1]),), None, blocks(1, 2, NO_BLOCK))
    second = jobs.start(STORE, (written(ledger, KEYS[1:2]),), None, blocks(2, 2, 3))
    assert second > first
    assert jobs.num_fences == 3
    assert jobs.fenced(blocks(2, 9, NO_BLOCK)) == {first, second}
    assert jobs.fenced(iter(blocks(3))) == {second}
    assert jobs.fenced(blocks(NO_BLOCK)) == set()
    jobs.report(answer(first, STORE, 0))
    assert jobs.fenced(blocks(1, 2)) == {second}
    jobs.report(answer(second, STORE, 0))
    assert jobs.fenced(blocks(1, 2, 3)) == set()


def test_loading_counts_the_loads_of_each_request() -> None:
    ledger = Ledger(4)
    jobs = Jobs(ledger, num_ranks=1)
    loads = [jobs.start(LOAD, (pinned(ledger, KEYS[:2]),), ALICE) for _ in range(2)]
    store = jobs.start(STORE, (written(ledger, KEYS[2:3]),), BOB)
    assert (jobs.loading(ALICE), jobs.loading(BOB)) == (True, False)
    jobs.report(answer(store, STORE, 0))
    jobs.report(answer(loads[0], LOAD, 0))
    assert jobs.loading(ALICE)
    jobs.report(answer(loads[1], LOAD, 0))
    assert not jobs.loading(ALICE)


def test_a_reset_in_between_hides_the_store_that_ends_well() -> None:
    ledger = Ledger(4)
    jobs = Jobs(ledger, num_ranks=2)
    store = jobs.start(STORE, (written(ledger, KEYS[:2]),))
    load = jobs.start(LOAD, (pinned(ledger, KEYS[2:]),), ALICE)
    jobs.report(answer(store, STORE, 0))
    assert ledger.invalidate_all() == 4
    for job, direction, rank in ((store, STORE, 1), (load, LOAD, 0), (load, LOAD, 1)):
        assert ledger.counts()[SlotState.DOOMED] >= 2
        end = jobs.report(answer(job, direction, rank))
    assert end is not None
    assert end.error is None
    assert ledger.absent(G0, KEYS) == [0, 1, 2, 3]
    assert ledger.counts()[SlotState.FREE] == 4
    ledger.check()


def test_the_wrong_kind_of_lease_is_refused() -> None:
    ledger = Ledger(4)
    jobs = Jobs(ledger, num_ranks=1)
    write = written(ledger, KEYS[:1])
    read = pinned(ledger, KEYS[1:2])
    for direction, leases in (
        (STORE, (read,)),
        (LOAD, (write,)),
        (STORE, ()),
        (LOAD, (read, write)),
    ):
        with pytest.raises(ValueError, match=f"a {direction} has leases"):
            jobs.start(direction, leases)
    with pytest.raises(ValueError, match="num_ranks is 0"):
        Jobs(ledger, 0)
    assert jobs.num_jobs == 0


@pytest.mark.parametrize("seed", range(30))
def test_random_schedules_account_for_every_slot(seed: int) -> None:
    """Stores, loads, failures, hung ranks and resets, in any order; all is free in the end."""
    print(f"seed {seed}")
    rng = random.Random(seed)
    num_ranks = rng.randint(1, 3)
    ledger = Ledger(6)
    jobs = Jobs(ledger, num_ranks)
    due: list[JobReport] = []
    ended: list[JobId] = []
    started: list[JobId] = []
    for _ in range(200):
        keys = rng.sample(KEYS, rng.randint(1, 3))
        action = rng.choice(["store", "load", "report", "report", "report", "reset"])
        if action == "reset" and rng.random() < 0.2:
            ledger.invalidate_all()
        elif action in ("store", "load"):
            lease: WriteLease | ReadLease | None
            if action == "store":
                lease = ledger.reserve(G0, [keys[i] for i in ledger.absent(G0, keys)])
            else:
                readable = keys[: ledger.readable(G0, keys)]
                lease = ledger.pin(G0, readable) if readable else None
            if lease is not None:
                direction = Direction(action)
                fences = [BlockId(rng.randrange(20)) for _ in keys]
                job = jobs.start(direction, (lease,), ALICE, fences)
                started.append(job)
                for rank in range(num_ranks):
                    if rng.random() < 0.1:
                        due.append(answer(job, direction, rank, "hung", settled=False))
                    error = "lost" if rng.random() < 0.1 else None
                    due.append(answer(job, direction, rank, error))
        elif due:
            # Reports of one rank on one job keep their order; everything else is shuffled.
            chosen = rng.choice(due)
            report = next(r for r in due if (r.job_id, r.rank) == (chosen.job_id, chosen.rank))
            due.remove(report)
            end = jobs.report(report)
            ended += [end.job_id] if end else []
        ledger.check()
    for report in due:
        end = jobs.report(report)
        ended += [end.job_id] if end else []
    assert sorted(ended) == started
    assert (jobs.num_jobs, jobs.num_fences, jobs.num_stray_reports) == (0, 0, 0)
    assert not jobs.loading(ALICE)
    ledger.invalidate_all()
    ledger.check()
    assert ledger.counts()[SlotState.FREE] == 6
