"""Network rates as people write them for ``tc``: decimal bits per second."""

import re

_UNITS = {"bit": 1, "kbit": 10**3, "mbit": 10**6, "gbit": 10**9}


def parse_rate(text: str) -> int:
    """Bits per second of a rate such as ``1gbit`` or ``2.5mbit``.

    Raises:
        ValueError: the text is not a positive number with one of the units bit, kbit, mbit, gbit.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(bit|kbit|mbit|gbit)", text.strip().lower())
    if match is None or float(match[1]) == 0:
        raise ValueError(f"rate {text!r} is not a positive number with a unit, such as 1gbit or 100mbit")
    return round(float(match[1]) * _UNITS[match[2]])


def format_rate(rate_bps: float) -> str:
    """A rate for people, for example ``957 Mb/s``."""
    for unit, size in (("Gb/s", 1e9), ("Mb/s", 1e6), ("kb/s", 1e3)):
        if rate_bps >= size:
            return f"{rate_bps / size:.3g} {unit}"
    return f"{rate_bps:.3g} b/s"
