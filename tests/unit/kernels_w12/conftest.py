"""Makes `w12_cases`, the weights of the GPU tests, and both modules of emulation importable."""

from __future__ import annotations

import sys
from pathlib import Path

_HERE = Path(__file__).parent
sys.path[:0] = [str(_HERE.parents[1] / "gpu"), str(_HERE.parent / "cuda_emulator"), str(_HERE)]
