"""Sizes as people write them, and back."""

import re
from typing import Final

_UNITS: Final = ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"), (1, "B"))
_FACTORS: Final = {name.upper(): factor for factor, name in _UNITS} | {
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "": 1,
}
_SIZE: Final = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?i?B|)", re.IGNORECASE)


def size_text(num_bytes: int) -> str:
    """A size in the largest unit of which there is at least one."""
    unit, name = next((one for one in _UNITS if num_bytes >= one[0]), _UNITS[-1])
    return f"{num_bytes / unit:.4g} {name}"


def parse_size(name: str, text: str) -> int:
    """Bytes from ``64GiB``, ``8GB`` or a plain number, as kvferry's options take them. Raises
    ValueError, with the ``name`` of what was given, for anything else."""
    match = _SIZE.fullmatch(text.strip())
    size = int(float(match[1]) * _FACTORS[match[2].upper()]) if match else 0
    if size <= 0:
        raise ValueError(
            f'{name} {text!r}; allowed: a positive number of bytes, or a size such as "64GiB"'
        )
    return size
