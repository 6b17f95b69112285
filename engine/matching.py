"""The lookup: what the host cache can serve of a request, and whether to wait for more."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from .geometry import GroupGeometry, LedgerView
from .jobs import Jobs
from .ledger import Ledger
from .planner import wanted
from .requests import Patience, TrackedRequest
from .rules import longest_hit
from .types import GroupId, Key, RequestId
from .worth import LoadWorth


class Matcher:
    """Asks the ledger, and changes nothing in it. ``counts`` is for the snapshot."""

    def __init__(
        self,
        groups: Sequence[GroupGeometry],
        ledger: Ledger,
        jobs: Jobs,
        worth: LoadWorth,
        wait_s: float,
        clock: Callable[[], float],
    ) -> None:
        self._groups = groups
        self._rules = tuple(geometry.rule for geometry in groups)
        self._ledger = ledger
        self._jobs = jobs
        self._worth = worth
        self._wait_s = wait_s
        self._clock = clock
        self._patience: dict[RequestId, Patience] = {}
        self._loading: Counter[tuple[GroupId, Key]] = Counter()
        """Chunks that loads in flight read, with how many of them do."""
        self.counts = {"lookups": 0, "waits": 0}

    def match(
        self, request_id: RequestId, request: TrackedRequest, num_tokens: int, *, wait: bool
    ) -> int | None:
        """Tokens that can be loaded behind what vLLM's own cache serves; None to be asked again.

        ``num_tokens`` is the request's length; its last token is always computed, as in vLLM's own
        prefix cache, so that there are logits to sample from. With ``wait``, chunks that others are
        storing or loading right now are waited for, once and for a bounded time: what is stored
        can be loaded then, and what is loaded is in vLLM's own cache then.
        """
        self.counts["lookups"] += 1
        request.hit_tokens = start = request.num_local_tokens
        limit = min(num_tokens - 1, start + request.limits.max_load_tokens)
        if limit <= start or any(start % geometry.block_tokens for geometry in self._groups):
            return 0
        views = [LedgerView(self._ledger, group, request.hashes, start) for group in self._groups]
        ask_pending = wait and self._ledger.num_writing > 0
        hit = longest_hit(self._rules, views, start, limit, ask_pending=ask_pending)
        if wait and (hit.pending or self._is_being_loaded(request, hit.ready_tokens)):
            if self._may_wait(request_id):
                self.counts["waits"] += 1
                return None
        else:
            self._patience.pop(request_id, None)
        num_hit_tokens = hit.ready_tokens - start
        if num_hit_tokens and not self._worth.allows(num_hit_tokens):
            request.outcome = "declined"
            return 0
        request.hit_tokens = hit.ready_tokens
        request.outcome = "hits" if num_hit_tokens else "misses"
        return num_hit_tokens

    def forget(self, request_id: RequestId) -> None:
        self._patience.pop(request_id, None)

    def load_began(self, chunks: Iterable[tuple[GroupId, Key]]) -> None:
        self._loading.update(chunks)

    def load_ended(self, chunks: Iterable[tuple[GroupId, Key]]) -> None:
        self._loading.subtract(chunks)
        self._loading = +self._loading

    def _is_being_loaded(self, request: TrackedRequest, hit_tokens: int) -> bool:
        if not self._loading:
            return False
        return any(
            (part.geometry.group, key) in self._loading
            for part in wanted(self._groups, request, hit_tokens)
            for key in part.keys
        )

    def _may_wait(self, request_id: RequestId) -> bool:
        """Whether the request goes on waiting for the jobs that were there when it began to."""
        patience = self._patience.get(request_id)
        if patience is None:
            patience = Patience(self._clock(), self._jobs.next_id)
            self._patience[request_id] = patience
        oldest = self._jobs.oldest_unanswered
        waited_s = self._clock() - patience.since_s
        return oldest is not None and oldest < patience.until_job and waited_s < self._wait_s
