"""Amounts of memory: what a user writes, and what the machine has."""

from __future__ import annotations

import os
import re
from pathlib import Path

from ..engine.errors import ConfigurationError

__all__ = ["DEFAULT_FRACTION", "available_memory", "format_bytes", "parse_bytes"]

#: Share of the memory that is free after the model was loaded which the caches take when nothing else is said.
DEFAULT_FRACTION = 0.4

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


def parse_bytes(amount: int | str) -> int:
    """Bytes of an amount like 268435456, "256MB", "0.5GiB" or "2g". Raises ConfigurationError."""
    if isinstance(amount, int):
        value = float(amount)
    else:
        match = re.fullmatch(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([kmgt]?i?)b?\s*", amount, re.IGNORECASE)
        unit = _UNITS.get(match.group(2).lower()) if match else None
        if match is None or unit is None:
            raise ConfigurationError(f"'{amount}' is no amount of memory; write it like 512MB or 2GiB")
        value = float(match.group(1)) * unit
    if value < 1:
        raise ConfigurationError(f"an amount of memory must be positive, got '{amount}'")
    return int(value)


def format_bytes(amount: int) -> str:
    """An amount in the largest binary unit that keeps it at least 1."""
    value, unit = float(amount), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if value < 1024 or unit == "TiB":
            break
        value /= 1024
    return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"


def available_memory() -> int:
    """Bytes that can be allocated now without swapping."""
    meminfo = Path("/proc/meminfo")
    if meminfo.is_file():
        match = re.search(r"^MemAvailable:\s+(\d+) kB", meminfo.read_text(), re.MULTILINE)
        if match:
            return int(match.group(1)) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
