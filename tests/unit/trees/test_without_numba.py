"""The trees package without torch, and without numba."""

from __future__ import annotations

import subprocess
import sys

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
