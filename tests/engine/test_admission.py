"""Loads that hold GPU blocks must leave each other enough to go on with."""

from kvferry.engine.admission import Claim, GpuPool, LoadAdmission
from kvferry.engine.geometry import GroupGeometry
from kvferry.engine.rules import GroupKind, GroupRule
from kvferry.engine.types import GroupId, RequestId

FULL = GroupGeometry(GroupRule(GroupId(0), GroupKind.FULL, 4), 4, 4)
WINDOW = GroupGeometry(GroupRule(GroupId(1), GroupKind.WINDOW, 4, window_tokens=8), 4, 4)
RECURRENT = GroupGeometry(GroupRule(GroupId(1), GroupKind.RECURRENT, 4), 4, 4)
A, B, C = map(RequestId, "abc")


def test_a_claim_is_what_is_held_and_what_is_needed_at_most() -> None:
    admission = LoadAdmission([FULL, WINDOW], GpuPool(100, step_tokens=16))
    # Full: 5 of 13 blocks. Window: 8 tokens may lie in 3 blocks, 8 + 16 in 7.
    assert admission.claim(49, 20) == Claim(5 + 3, 13 + 7)


def test_a_recurrent_group_holds_few_states_however_long_the_request() -> None:
    """One that is loaded; with 16 tokens in flight a few that are not given back yet."""
    admission = LoadAdmission([RECURRENT], GpuPool(100, step_tokens=16))
    assert admission.claim(4000, 3996) == Claim(3, 7)
    assert admission.claim(6, 4) == Claim(1, 2)


def test_a_short_request_claims_no_more_than_it_has() -> None:
    admission = LoadAdmission([FULL, WINDOW], GpuPool(100, step_tokens=16, lookahead_tokens=3))
    assert admission.claim(6, 4) == Claim(1 + 1, 3 + 3)


def test_a_window_holds_what_is_computed_ahead_too() -> None:
    """8 tokens, 13 in flight and 7 ahead: 28 may lie in 8 blocks."""
    admission = LoadAdmission([WINDOW], GpuPool(100, step_tokens=13, lookahead_tokens=7))
    assert admission.claim(400, 0) == Claim(0, 8)


def test_one_alone_is_allowed_whatever_it_claims() -> None:
    assert LoadAdmission([FULL], GpuPool(2)).allows(A, Claim(1, 3))


def test_another_is_allowed_while_each_could_have_all_it_needs() -> None:
    admission = LoadAdmission([FULL], GpuPool(20))
    admission.began(A, Claim(5, 13))
    assert admission.allows(B, Claim(7, 8))  # 5 + 7 are held, and 8 more needed at most
    assert not admission.allows(B, Claim(8, 8))
    assert not admission.allows(B, Claim(5, 16))


def test_what_is_over_claims_nothing() -> None:
    admission = LoadAdmission([FULL], GpuPool(20))
    admission.began(A, Claim(5, 13))
    admission.over(A)
    assert admission.allows(B, Claim(19, 25))


def test_without_a_pool_everything_is_allowed() -> None:
    admission = LoadAdmission([FULL], GpuPool())
    admission.began(A, Claim(1 << 40, 1 << 50))
    assert admission.allows(B, Claim(1 << 40, 1 << 50))


def test_nobody_overtakes_one_that_waits() -> None:
    admission = LoadAdmission([FULL], GpuPool(20))
    admission.began(A, Claim(5, 6))
    assert not admission.allows(B, Claim(16, 17))
    admission.step_built()
    assert not admission.allows(C, Claim(1, 2))
    assert not admission.allows(B, Claim(16, 17))
    admission.over(A)
    assert admission.allows(B, Claim(16, 17))
    admission.began(B, Claim(16, 17))
    assert admission.allows(C, Claim(1, 2))


def test_who_does_not_ask_again_holds_nobody_up() -> None:
    """It was aborted, or its hit is gone, or the scheduler does not come to it."""
    admission = LoadAdmission([FULL], GpuPool(20))
    admission.began(A, Claim(5, 6))
    assert not admission.allows(B, Claim(16, 17))
    admission.step_built()
    assert not admission.allows(C, Claim(1, 2))
    admission.step_built()
    assert admission.allows(C, Claim(1, 2))
