"""Known ways in which weight converters hurt their users, each held by a test of its own name.

The numbers are this project's list. `test_pitfall_NN_...` in this folder is the test of number
NN; its first line says what the user sees where it goes wrong. The list:

values      1 zero signs and NaN in comparisons · 2 NaN payloads in casts · 3 meaningless test
            data · 4 silent casts to BF16 · 5 tensors that must stay FP32 · 6 escape lists that
            overflow · 7 tensors full of zeros that grow
shapes      8 odd shapes and shards of them · 9 very small matrices · 10 strided views ·
            11 more than 2^31 elements · 12 fused projections
names       13 tied embeddings · 14 mixture of experts · 15 names that contain each other ·
            16 unknown prefixes · 17 extra prediction layers
files       18 index and shards disagree · 19 stray weight files · 20 truncated shards ·
            21 interruption · 22 full disks · 23 links into a cache · 24 edits of the source ·
            25 targets that hold something else · 26 the quantisation key in config.json
running     27 a GPU needed to import · 28 native code that fails · 29 no command to convert one's
            own model · 30 cache hints of one GPU generation (kernels, not the converter) ·
            31 more threads than processors
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

_NOT_THE_CONVERTERS = {30}


def test_every_pitfall_has_a_test_that_says_what_the_user_sees() -> None:
    found: dict[int, str] = {}
    for file in Path(__file__).parent.glob("test_*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef):
                named = re.match(r"test_pitfall_(\d\d)_\w{12,}$", node.name)
                if named is not None:
                    found.setdefault(int(named[1]), ast.get_docstring(node) or "")
    assert set(found) == set(range(1, 32)) - _NOT_THE_CONVERTERS
    assert [number for number, text in found.items() if len(text) < 40] == []
