"""Parses sizes such as "5GB" and "512MiB", and times such as "30m"."""

from __future__ import annotations

import re

from mckpt.errors import UsageError, counted

# bytes; a smaller number without a unit is refused, because the unit was probably forgotten
LEAST_BARE = 1 << 20
# Bytes of buffers for each thread. A block of fp8 needs 256 KiB, and a comparison has half of the
# memory. To cast a model of 365 MB took 1.6 s with 64 MiB, 3.7 s with 256 KiB, 12 s with 16 KiB and
# 174 s with 1 kB.
LEAST_MEMORY = 512 << 10


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


def refuse_little(max_memory: int, threads: int) -> None:
    """Raises UsageError for less memory than the buffers of the threads need. threads: 0 means that
    their number is chosen to fit.
    """
    least = LEAST_MEMORY * max(1, threads)
    if max_memory < least:
        fewer = f", or lower --threads {threads}" * (threads > 1)
        raise UsageError(
            f"--max-memory {max_memory:,} bytes is too little: each thread needs"
            f" {LEAST_MEMORY >> 10}KiB; give {least >> 10}KiB or more{fewer}"
        )


def parse_duration(text: str, option: str) -> float:
    """Returns the seconds of a time such as "90s", "30m", "2h" or "1d"; a number alone is seconds.

    Raises UsageError, which names the option.
    """
    units = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smhd]?)", text.strip())
    if not found or (seconds := float(found[1]) * units[found[2]]) <= 0:
        raise UsageError(f"{option} {text!r} is not a time; write for example 90s, 30m or 2h")
    return seconds
