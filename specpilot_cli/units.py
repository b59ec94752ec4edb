"""Text for quantities, decided once: bytes are decimal (1 MB = 10^6) unless a suffix says `i`.

Decimal because every datasheet bandwidth is decimal; mixing the two would skew a byte floor
by 7 %.
"""

from __future__ import annotations

import math
import re

from specpilot_cli.errors import InputError

_BYTE_UNITS = {
    "b": 1,
    "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
    "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40,
}  # fmt: skip
_QUANTITY = re.compile(r"\s*([0-9]*\.?[0-9]+(?:[eE][-+]?[0-9]+)?)\s*([A-Za-z]*)\s*")


def _scaled(value: float, steps: tuple[tuple[float, str], ...]) -> str:
    for factor, suffix in steps:
        if abs(value) >= factor:
            return f"{_three_digits(value / factor)} {suffix}"
    factor, suffix = steps[-1]
    return f"{_three_digits(value / factor)} {suffix}"


def _three_digits(value: float) -> str:
    if value == 0 or not math.isfinite(value):
        return "0" if value == 0 else str(value)
    digits = max(0, 2 - math.floor(math.log10(abs(value))))
    return f"{value:.{min(digits, 3)}f}"


def format_bytes(n_bytes: float) -> str:
    """`12288` → `12.3 kB` (decimal units, three digits)."""
    if abs(n_bytes) < 1000:
        return f"{int(n_bytes)} B"
    return _scaled(n_bytes, ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")))


def format_seconds(seconds: float) -> str:
    """`0.0156` → `15.6 ms`."""
    if 120 <= seconds < math.inf:
        return f"{int(seconds // 60)} min {int(seconds % 60)} s"
    return _scaled(seconds, ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns")))


def format_bandwidth(bytes_per_s: float) -> str:
    """`4.57e12` → `4.57 TB/s`."""
    return f"{format_bytes(bytes_per_s)}/s"


def format_flops(flop_per_s: float) -> str:
    """`9.89e14` → `989 TFLOP/s`."""
    return _scaled(
        flop_per_s, ((1e15, "PFLOP/s"), (1e12, "TFLOP/s"), (1e9, "GFLOP/s"), (1e6, "MFLOP/s"))
    )


def format_percent(fraction: float, *, digits: int = 1) -> str:
    """`0.125` → `12.5 %`."""
    return f"{100 * fraction:.{digits}f} %"


def parse_bytes(text: str, *, where: str | None = None) -> int:
    """`"1.5 GB"` → 1_500_000_000; `"1 GiB"` → 2**30; a bare number is bytes.

    where: the option or key that has the text. InputError for anything else.
    """
    match = _QUANTITY.fullmatch(text)
    unit = match.group(2) if match is not None else ""
    factor = _BYTE_UNITS.get(unit.lower() or "b")
    if factor is None:
        raise InputError(
            f"unknown byte unit `{unit}` in `{text}`", where=where, hint="use B, kB, MB, GB or GiB"
        )
    size = float(match.group(1)) * factor if match is not None else math.inf
    if not math.isfinite(size):
        raise InputError(
            f"`{text}` is not bytes", where=where, hint="for example `512MB` or `2GiB`"
        )
    return round(size)


def writable(text: str) -> str:
    """`text` with half surrogate pairs spelled out, as `\\udcff`: no file or stream holds them.

    They come from JSON escapes of strangers, and from file names that are not UTF-8.
    """
    return text.encode("utf-8", "backslashreplace").decode("utf-8")
