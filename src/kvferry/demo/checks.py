"""What the demo promises, each as a check that can fail and says what it saw."""

from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from .phases import DemoRun, Phase

LOGPROB_TOLERANCE: Final = 1e-3
SLOT_STATES: Final = ("free", "writing", "ready", "reading", "doomed")
BUSY_COUNTS: Final = ("writing", "reading", "doomed", "leases", "jobs", "fences", "requests")
BUSY_WORKER_COUNTS: Final = ("jobs", "queued")


@dataclass(frozen=True, slots=True)
class Check:
    """One promise: whether it held, and what was seen."""

    name: str
    passed: bool
    detail: str


def same_tokens(phases: tuple[Phase, ...]) -> Check:
    """Every answer of the given phases is the same tokens."""
    answers = [answer.tokens for phase in phases for answer in phase.answers]
    different = sum(left != right for left, right in pairwise(answers))
    names = ", ".join(phase.name.split(" ")[0] for phase in phases)
    return Check(
        f"the answers of {names} are the same tokens",
        bool(answers) and not different,
        f"{len(answers)} answers, {len(set(answers))} distinct",
    )


def from_host(phase: Phase, block_size: int) -> Check:
    """Every full block of the prompt came from the host, and none from the GPU's cache."""
    wanted = (phase.last.num_prompt_tokens - 1) // block_size * block_size
    seen = sorted({(answer.num_from_host, answer.num_from_gpu) for answer in phase.answers})
    return Check(
        "(4) took its tokens from the host",
        seen == [(wanted, 0)],
        f"(from host, from GPU) {seen}, expected {[(wanted, 0)]}",
    )


def bypassed(run: DemoRun) -> list[Check]:
    """The connector itself declined (5), without a lookup, and nothing was read for it."""
    answer = run.bypass.last
    before, after = run.ending.before_bypass, run.ending.settled
    return [
        Check(
            "(5) was answered (0, False) by the connector itself",
            bool(run.connector_answers) and set(run.connector_answers) == {(0, False)},
            f"answers {list(run.connector_answers)}",
        ),
        Check(
            "(5) was neither looked up nor served from a cache",
            before["lookups"] == after["lookups"]
            and (answer.num_from_gpu, answer.num_from_host) == (0, 0),
            f"lookups {before['lookups']} before, {after['lookups']} after; "
            f"{answer.num_from_gpu} tokens from GPU, {answer.num_from_host} from host",
        ),
    ]


def logprobs_agree(run: DemoRun) -> list[Check]:
    """(5) has a logprob for every prompt token but the first, and they are those of (6)."""
    ours, theirs = run.bypass.last.prompt_logprobs, run.plain_logprobs.last.prompt_logprobs
    missing = [place for place, value in enumerate(ours) if value is None]
    complete = len(ours) == run.bypass.last.num_prompt_tokens and missing == [0]
    differences = [
        abs(mine - other)
        for mine, other in zip(ours, theirs, strict=False)
        if mine is not None and other is not None
    ]
    largest = max(differences, default=float("inf"))
    return [
        Check(
            "(5) has a logprob for every prompt token but the first",
            complete,
            f"{len(ours)} places, {len(missing)} empty",
        ),
        Check(
            f"the logprobs of (5) are those of (6) to {LOGPROB_TOLERANCE:g}",
            len(differences) == len(ours) - 1 and largest <= LOGPROB_TOLERANCE,
            f"largest difference {largest:.2g} over {len(differences)} tokens",
        ),
    ]


def accounted(run: DemoRun) -> Check:
    """Once nothing is left to do, every slot is free or ready and nothing is held."""
    ending = run.ending
    num_slots = sum(ending.fresh[state] for state in SLOT_STATES)
    now = sum(ending.settled[state] for state in SLOT_STATES)
    busy = {name: ending.settled[name] for name in BUSY_COUNTS if ending.settled[name]}
    busy |= {
        f"worker {name}": ending.settled_worker[name]
        for name in BUSY_WORKER_COUNTS
        if ending.settled_worker[name]
    }
    return Check(
        "all slots, leases and fences are accounted for",
        num_slots > 0 and now == num_slots and not busy,
        f"{now} of {num_slots} slots, busy: {busy or 'nothing'}",
    )


def check(run: DemoRun) -> list[Check]:
    """All checks. In bf16 vLLM's own prefix hits change tokens, so only (2) and (4) must agree."""
    exact = (run.cold, run.gpu_hit, run.host_hit, run.plain)
    lossy = (run.gpu_hit, run.host_hit)
    return [
        same_tokens(exact if run.dtype == "float32" else lossy),
        from_host(run.host_hit, run.block_size),
        *bypassed(run),
        *logprobs_agree(run),
        accounted(run),
    ]
