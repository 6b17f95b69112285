"""A request whose load has failed: it computes, behind those that hold blocks for loads of theirs.

vLLM keeps requests that load in a queue of their own and takes them from its head only. One whose
load failed altogether has given its blocks back and needs new ones; were it to ask for them at the
head, while what is free is not enough, those behind it would never be looked at again, and the
blocks that they hold never be freed: the engine would step for ever. So it stands aside until the
loads that were there when it failed are over. It is not offered the host cache again either: its
next load could fail too, and vLLM would hold blocks back for it twice.
"""

from collections.abc import Iterable, Mapping

from .requests import TrackedRequest
from .types import RequestId


class Recovery:
    """Requests whose load failed and that have not gone on to compute, with whom they wait for."""

    def __init__(self) -> None:
        self._waits_for: dict[RequestId, set[RequestId] | None] = {}

    def __contains__(self, request_id: RequestId) -> bool:
        return request_id in self._waits_for

    def failed(self, request_id: RequestId) -> None:
        self._waits_for[request_id] = None

    def over(self, request_id: RequestId) -> None:
        """It computes, or has ended."""
        self._waits_for.pop(request_id, None)

    def match(
        self, request_id: RequestId, requests: Mapping[RequestId, TrackedRequest]
    ) -> int | None:
        """None while it stands aside, then 0."""
        waits_for = self._waits_for[request_id]
        others: Iterable[RequestId] = requests if waits_for is None else waits_for
        still = {
            other
            for other in others
            if other != request_id and other in requests and requests[other].loading
        }
        self._waits_for[request_id] = still
        return None if still else 0
