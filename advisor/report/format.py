"""Numbers as people read them: three significant digits, the unit said, base units in.

Every function answers "-" for a value that is missing or not finite.
"""

from __future__ import annotations

import math

MISSING = "-"
GIB_BYTES = 2**30

#: Powers of a thousand, largest first, with the letter counts carry.
_COUNT_LETTERS = ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K"))
#: The same with SI prefixes, for rates and work.
_SI_PREFIXES = ((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def significant(value: float | None, num_digits: int = 3) -> str:
    """Rounded to significant digits, never in exponent form, thousands separated: 0.0123, 1.23, 12.3, 1,230."""
    if value is None or not math.isfinite(value):
        return MISSING
    if value == 0:
        return "0"
    rounded = float(f"{value:.{num_digits - 1}e}")
    num_decimals = max(num_digits - 1 - math.floor(math.log10(abs(rounded))), 0)
    return f"{rounded:,.{num_decimals}f}"


def gib(value_bytes: float | None) -> str:
    """Bytes as GiB (2^30 bytes), without the unit: for table columns and sums whose unit is said once."""
    if value_bytes is not None and 0 < value_bytes < GIB_BYTES / 1000:
        return "<0.001"
    return MISSING if value_bytes is None else significant(value_bytes / GIB_BYTES)


def gib_with_unit(value_bytes: float | None) -> str:
    """Bytes as "12.3 GiB"."""
    text = gib(value_bytes)
    return text if text == MISSING else f"{text} GiB"


def seconds(value_s: float | None) -> str:
    """Seconds as "1.23 s", or "45.6 ms" below one second; what is above 0 and below a microsecond is "<0.001 ms"."""
    if value_s is None or not math.isfinite(value_s):
        return MISSING
    if 0 < value_s < 1e-6:
        return "<0.001 ms"
    if value_s == 0 or abs(value_s) >= 0.9995:
        return f"{significant(value_s)} s"
    return f"{significant(value_s * 1e3)} ms"


def percent(share: float | None) -> str:
    """A share (0 to 1) as "12.3%"; what is above 0 and below a thousandth is "<0.1%"."""
    if share is None or not math.isfinite(share):
        return MISSING
    if 0 < abs(share) < 1e-3:
        return "<0.1%"
    return f"{significant(share * 100)}%"


def interval(low_s: float | None, high_s: float | None) -> tuple[str, str]:
    """Two times whose unit is said once where it is the same: ("1.23", "4.56 s"), ("950 ms", "1.10 s")."""
    low, high = seconds(low_s), seconds(high_s)
    same = low.split(" ")[-1] == high.split(" ")[-1]
    return (low.split(" ")[0] if same else low, high)


def change(share: float | None) -> str:
    """A relative change as "+12.3%" or "-1.20%"."""
    text = percent(share)
    return f"+{text}" if share is not None and share >= 0 and text != MISSING and not text.startswith("<") else text


def count(value: float | None) -> str:
    """A count as "8.03 B", "124 M", "12.3 K" or, below a thousand, as it is."""
    if value is None or not math.isfinite(value):
        return MISSING
    for power, letter in _COUNT_LETTERS:
        if abs(value) >= power * 0.9995:
            return f"{significant(value / power)} {letter}"
    return f"{value:g}"


def per_second(value_per_s: float | None) -> str:
    """A throughput without its noun: "62,300", from a million on "1.23 M"."""
    if value_per_s is None or not math.isfinite(value_per_s):
        return MISSING
    return count(value_per_s) if value_per_s >= 1e6 else significant(value_per_s)


def with_prefix(value: float | None, unit: str) -> str:
    """A value with its SI prefix (decimal, as data sheets have it): "312 TFLOP/s", "2.04 TB/s", "25.0 GB/s"."""
    if value is None or not math.isfinite(value):
        return MISSING
    for power, prefix in _SI_PREFIXES:
        if abs(value) >= power * 0.9995:
            return f"{significant(value / power)} {prefix}{unit}"
    return f"{significant(value)} {unit}"
