"""The trees package without torch, and without numba."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

SCRIPT = """
import sys
{block}
import numpy as np
from specpilot_kernels.trees import best_first, best_first_batch, edge_log_probs
from specpilot_kernels.trees._jit import HAVE_NUMBA
from specpilot_kernels.trees.trace import truth_pop_index, visited_anchors
rng = np.random.default_rng(0)
scores = rng.integers(-2, 3, size=(3, 5, 4, 4)).astype(float)
scores[:, 0] = scores[:, 0, :1]
edge = edge_log_probs(scores)
ids = np.argsort(rng.random((3, 5, 9)), axis=-1)[..., :4].astype(np.int32)
one = best_first(ids[0], edge[0], 12)
batch = best_first_batch(ids, edge, 12)
index, expected = truth_pop_index(ids, edge, ids[:, :, 0], np.array([4, 12]))
visited = visited_anchors(np.array([2, 1, 1], dtype=np.int32), np.array([0]), np.array([3]))
print(HAVE_NUMBA, "torch" in sys.modules)
for array in (one.token, one.parent, one.score, batch.token, batch.score, index, visited):
    print(array.tolist())
print(np.round(expected, 12).tolist())
"""


def run(block: str) -> list[str]:
    script = SCRIPT.format(block=block)
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=120
    )
    return done.stdout.splitlines()


def test_same_trees_without_numba_and_never_torch() -> None:
    compiled = run("")
    plain = run("sys.modules['numba'] = None")
    assert compiled[0] == "True False"
    assert plain[0] == "False False"
    assert plain[1:] == compiled[1:]


def test_no_compiled_function_calls_one_of_another_file(repo: Path) -> None:
    """Numba's disk cache would serve stale code after an edit to an inlined function elsewhere."""
    folder = repo / "kernels/specpilot_kernels/trees"
    compiled: dict[str, str] = {}
    bodies: dict[str, list[ast.FunctionDef]] = {}
    for path in folder.glob("*.py"):
        functions = [
            node
            for node in ast.parse(path.read_text("utf-8")).body
            if isinstance(node, ast.FunctionDef)
            and any(isinstance(d, ast.Name) and d.id == "native" for d in node.decorator_list)
        ]
        if functions:
            bodies[path.name] = functions
            compiled |= {function.name: path.name for function in functions}
    assert set(bodies) == {"_log_softmax.py", "_native.py", "_walks.py"}
    for name, functions in bodies.items():
        used = {n.id for f in functions for n in ast.walk(f) if isinstance(n, ast.Name)}
        assert {compiled[n] for n in used if n in compiled} <= {name}


def test_warm_up_leaves_nothing_to_compile_for_real_trees() -> None:
    script = """
import numpy as np
from specpilot_kernels.trees import best_first, edge_log_probs, marginal, warm_up
from specpilot_kernels.trees._native import one_tree
warm_up()
before = len(one_tree.signatures)
rng = np.random.default_rng(0)
ids = np.arange(16 * 16).reshape(16, 16)
best_first(ids, edge_log_probs(rng.normal(size=(16, 16, 16))), 32, max_depth=15)
marginal(ids, rng.normal(size=(16, 16)), np.full(16, 9.0), 32)
print(before, len(one_tree.signatures))
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=120
    )
    assert done.stdout.split() == ["1", "1"]
