"""Numbers as people write them."""

import re

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def parse_number(text: str) -> int:
    """Reads 4096, 4k (4,000), 4K (4,096), 2GiB, 2GB (decimal) or 1.5GiB. Raises ValueError."""
    match = re.fullmatch(r"\s*(-?\d+(?:\.\d+)?)\s*([kKmMgGT]?)(iB|B|)\s*", text)
    if not match:
        raise ValueError(f"{text!r} is not a number; write it like 4096, 4k, 4K, 512MiB or 2GiB")
    number, unit, suffix = match.groups()
    scale = _UNITS[unit.upper()] if suffix == "iB" else _UNITS[unit.lower()] if suffix == "B" else _UNITS[unit]
    if scale == 1 and "." in number:
        raise ValueError(f"{text!r} is not a whole number")
    return int(float(number) * scale)
