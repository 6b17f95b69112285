"""Who a request with a failed load waits for, and that it stops waiting."""

from kvferry.engine.recovery import Recovery
from kvferry.engine.requests import NO_LIMITS, TrackedRequest
from kvferry.engine.types import RequestId

FAILED, EARLIER, LATER = RequestId("failed"), RequestId("earlier"), RequestId("later")


def tracked(*, loading: bool) -> TrackedRequest:
    return TrackedRequest([], 8, 0, NO_LIMITS, [0], loading=loading)


def test_it_stands_aside_for_the_loads_that_were_there_and_no_others() -> None:
    recovery = Recovery()
    recovery.failed(FAILED)
    assert FAILED in recovery
    assert EARLIER not in recovery
    requests = {FAILED: tracked(loading=False), EARLIER: tracked(loading=True)}
    assert recovery.match(FAILED, requests) is None
    requests[LATER] = tracked(loading=True)
    assert recovery.match(FAILED, requests) is None
    requests[EARLIER] = tracked(loading=False)
    assert recovery.match(FAILED, requests) == 0
    requests[EARLIER].loading = True  # again: that is another load
    assert recovery.match(FAILED, requests) == 0


def test_it_does_not_wait_for_itself_nor_for_who_is_gone() -> None:
    recovery = Recovery()
    recovery.failed(FAILED)
    requests = {FAILED: tracked(loading=True), EARLIER: tracked(loading=True)}
    assert recovery.match(FAILED, requests) is None
    del requests[EARLIER]
    assert recovery.match(FAILED, requests) == 0
    recovery.over(FAILED)
    recovery.over(FAILED)
    assert FAILED not in recovery
