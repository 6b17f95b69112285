"""``kv_connector_extra_config`` -> frozen, validated options.

Names follow vLLM's own connectors where the meaning is the same. Whatever is wrong is a
``ValueError`` that names the key, what was given and what is allowed, before anything is allocated.
"""

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

GIB = 1024**3

_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?I?B)\s*", re.IGNORECASE)

Integrity = Literal["full", "sample", "off"]


@dataclass(frozen=True, slots=True)
class Options:
    """What a user can set in ``kv_connector_extra_config``.

    ``cpu_bytes_to_use`` is for the whole server and is split over its ranks;
    ``cpu_bytes_to_use_per_rank`` and ``num_cpu_blocks`` (slots, of any size) win over it, in this
    order. ``integrity`` None leaves the choice to the device.
    """

    cpu_bytes_to_use: int = 8 * GIB
    cpu_bytes_to_use_per_rank: int | None = None
    num_cpu_blocks: int | None = None
    transfer_deadline_s: float = 60.0
    integrity: Integrity | None = None

    @classmethod
    def parse(cls, extra_config: Mapping[str, Any]) -> "Options":
        """Raises ValueError naming the first unknown key or bad value."""
        allowed = [field.name for field in dataclasses.fields(cls)]
        for key in extra_config:
            if key not in allowed:
                raise ValueError(
                    f"kv_connector_extra_config has the unknown key {key!r} "
                    f"(value {extra_config[key]!r}); allowed: {', '.join(sorted(allowed))}"
                )
        return cls(**{key: _PARSERS[key](key, value) for key, value in extra_config.items()})

    def bytes_per_rank(self, num_ranks: int) -> int:
        """The host memory of one rank, when ``num_cpu_blocks`` does not say it."""
        if self.cpu_bytes_to_use_per_rank is not None:
            return self.cpu_bytes_to_use_per_rank
        return self.cpu_bytes_to_use // num_ranks

    def num_slots(self, bytes_per_slot: int, num_ranks: int) -> int:
        """How many slots one rank gets. Raises ValueError when it is not even one."""
        if self.num_cpu_blocks is not None:
            return self.num_cpu_blocks
        given = self.bytes_per_rank(num_ranks)
        if given < bytes_per_slot:
            name, total = "cpu_bytes_to_use", self.cpu_bytes_to_use
            if self.cpu_bytes_to_use_per_rank is not None:
                name, total = "cpu_bytes_to_use_per_rank", self.cpu_bytes_to_use_per_rank
            raise ValueError(
                f"{name}={total} gives {given} bytes to each of {num_ranks} ranks, less than one "
                f"slot; allowed: at least {bytes_per_slot} bytes a rank"
            )
        return given // bytes_per_slot


def _refuse(key: str, value: Any, allowed: str) -> ValueError:
    return ValueError(f"kv_connector_extra_config: {key}={value!r}; allowed: {allowed}")


def parse_bytes(key: str, value: Any) -> int:
    """A size in bytes: a positive integer, or a string with a unit such as ``"64GiB"``."""
    allowed = 'a positive number of bytes, or a size such as "64GiB", "512MiB", "8GB"'
    if isinstance(value, str):
        match = _SIZE.fullmatch(value)
        if match is None:
            raise _refuse(key, value, allowed)
        size = int(float(match[1]) * _UNITS[match[2].upper()])
    elif isinstance(value, int | float) and not isinstance(value, bool) and value == int(value):
        size = int(value)  # JSON writers turn large integers into 6.4e10
    else:
        raise _refuse(key, value, allowed)
    if size <= 0:
        raise _refuse(key, value, allowed)
    return size


def _parse_count(key: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise _refuse(key, value, "a positive integer")
    return value


def _parse_seconds(key: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e6:
        raise _refuse(key, value, "a number of seconds above 0 and below 1e6")
    return float(value)


def _parse_integrity(key: str, value: Any) -> Any:
    if value not in get_args(Integrity):
        raise _refuse(key, value, ", ".join(get_args(Integrity)))
    return value


_PARSERS = {
    "cpu_bytes_to_use": parse_bytes,
    "cpu_bytes_to_use_per_rank": parse_bytes,
    "num_cpu_blocks": _parse_count,
    "transfer_deadline_s": _parse_seconds,
    "integrity": _parse_integrity,
}
