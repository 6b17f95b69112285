"""Parsers of option values: (key, what was given) -> the value, or a ValueError saying what is
allowed."""

import re
from collections.abc import Callable
from typing import Any

Parser = Callable[[str, Any], Any]

_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?I?B)\s*", re.IGNORECASE)


def refusal(key: str, given: Any, allowed: str) -> ValueError:
    """The error for a bad value."""
    return ValueError(f"kv_connector_extra_config: {key}={given!r}; allowed: {allowed}")


def size(key: str, given: Any) -> int:
    """A size in bytes: a positive integer, or a string with a unit such as ``"64GiB"``."""
    allowed = 'a positive number of bytes, or a size such as "64GiB", "512MiB", "8GB"'
    if isinstance(given, str):
        match = _SIZE.fullmatch(given)
        if match is None:
            raise refusal(key, given, allowed)
        num_bytes = int(float(match[1]) * _UNITS[match[2].upper()])
    elif isinstance(given, bool) or not isinstance(given, int | float) or given != given // 1:
        raise refusal(key, given, allowed)
    else:
        num_bytes = int(given)  # JSON writers turn large integers into 6.4e10
    if num_bytes <= 0:
        raise refusal(key, given, allowed)
    return num_bytes


def count(key: str, given: Any) -> int:
    """A positive integer."""
    if isinstance(given, bool) or not isinstance(given, int) or given < 1:
        raise refusal(key, given, "a positive integer")
    return given


def count_or_zero(key: str, given: Any) -> int:
    """A non-negative integer."""
    if isinstance(given, bool) or not isinstance(given, int) or given < 0:
        raise refusal(key, given, "0, a positive integer")
    return given


def auto_or(parser: Parser) -> Parser:
    """``"auto"`` (given as None), or what ``parser`` allows."""

    def parse(key: str, given: Any) -> Any:
        if given == "auto":
            return None
        try:
            return parser(key, given)
        except ValueError as error:
            raise ValueError(f'{error} or "auto"') from None

    return parse


def seconds(key: str, given: Any) -> float:
    """A positive number of seconds."""
    if isinstance(given, bool) or not isinstance(given, int | float) or not 0 < given < 1e6:
        raise refusal(key, given, "a number of seconds above 0 and below 1e6")
    return float(given)


def seconds_or_zero(key: str, given: Any) -> float:
    """A number of seconds, 0 to do without."""
    if given == 0 and not isinstance(given, bool):
        return 0.0
    try:
        return seconds(key, given)
    except ValueError:
        raise refusal(key, given, "0, or a number of seconds below 1e6") from None


def flag(key: str, given: Any) -> bool:
    """True or False, nothing that merely looks like it."""
    if not isinstance(given, bool):
        raise refusal(key, given, "true or false")
    return given


def text(key: str, given: Any) -> str:
    """A string that is not empty."""
    if not isinstance(given, str) or not given:
        raise refusal(key, given, "a name")
    return given


def one_of(*allowed: str) -> Parser:
    """One of these strings."""

    def parse(key: str, given: Any) -> Any:
        if given not in allowed:
            raise refusal(key, given, ", ".join(allowed))
        return given

    return parse
