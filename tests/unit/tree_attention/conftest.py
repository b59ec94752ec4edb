"""Makes `tree_attention_cases`, the inputs of the GPU tests, importable."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "gpu"))
sys.path.insert(0, str(Path(__file__).parent))  # for `triton_programs`
