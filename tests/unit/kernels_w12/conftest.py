"""Makes `w12_cases`, the weights of the GPU tests, importable: they are checked here, too."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "gpu"))
