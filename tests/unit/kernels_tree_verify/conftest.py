"""Makes the emulator of one CTA and this folder's helpers importable."""

from __future__ import annotations

import sys
from pathlib import Path

_HERE = Path(__file__).parent
sys.path[:0] = [
    str(_HERE.parents[1] / "gpu"), str(_HERE.parent / "cuda_emulator"), str(_HERE)
]  # fmt: skip
