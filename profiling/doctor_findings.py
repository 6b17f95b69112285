"""What a check finds, and how it is told."""

import enum
from collections.abc import Iterable
from dataclasses import dataclass


class Status(enum.StrEnum):
    """``SKIPPED`` is what could not be checked here: neither good nor bad."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"
    SKIPPED = "skip"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the diagnosis. ``advice`` says what to do; empty where nothing is to be done."""

    check: str
    status: Status
    found: str
    advice: str = ""


def ok(check: str, found: str) -> Finding:
    return Finding(check, Status.OK, found)


def warn(check: str, found: str, advice: str) -> Finding:
    return Finding(check, Status.WARN, found, advice)


def fail(check: str, found: str, advice: str) -> Finding:
    return Finding(check, Status.FAIL, found, advice)


def skipped(check: str, why: str, advice: str = "") -> Finding:
    return Finding(check, Status.SKIPPED, f"not checked: {why}", advice)


def lines_of(findings: Iterable[Finding]) -> list[str]:
    """The findings for people: one line each, the advice below it."""
    lines = []
    for one in findings:
        lines.append(f"{one.status:<4}  {one.check:<16} {one.found}")
        if one.advice:
            lines.append(f"      {'':<16} -> {one.advice}")
    return lines
