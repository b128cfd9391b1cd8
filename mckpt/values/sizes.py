"""Parses sizes such as "5GB" and "512MiB", and times such as "30m"."""

from __future__ import annotations

import re

from mckpt.errors import UsageError, counted

# bytes; a smaller number without a unit is refused, because the unit was probably forgotten
LEAST_BARE = 1 << 20


def parse_size(text: int | str, option: str = "") -> int:
    """Returns the bytes of a size such as "5GB" or "512MiB"; a number is the bytes themselves. 2G
    is 2GB, and 2Gi is 2GiB.

    Raises UsageError, which names the option, for a text with a small number and no unit, because
    the unit was probably forgotten.
    """
    given = f"{option} {text!r}".lstrip()
    if not isinstance(text, str):
        if type(text) is not int or text < 1:
            raise UsageError(f"{given} is not a size; give a number of bytes, at least 1")
        return text
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(?:([KMGT])(I?)B?)?", text.strip().upper())
    size = 0
    if found:
        power = "KMGT".index(found[2]) + 1 if found[2] else 0
        size = int(float(found[1]) * (1024 if found[3] else 1000) ** power)
    if not found or size < 1:
        raise UsageError(f"{given} is not a size; write for example 5GB or 512MiB")
    if not found[2] and size < LEAST_BARE:
        raise UsageError(
            f"{given} without a unit is {counted(size, 'byte')}; add a unit: {found[1]}MiB"
            f" or {found[1]}GiB"
        )
    return size


def parse_duration(text: str, option: str) -> float:
    """Returns the seconds of a time such as "90s", "30m", "2h" or "1d"; a number alone is seconds.

    Raises UsageError, which names the option.
    """
    units = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smhd]?)", text.strip())
    if not found or (seconds := float(found[1]) * units[found[2]]) <= 0:
        raise UsageError(f"{option} {text!r} is not a time; write for example 90s, 30m or 2h")
    return seconds
