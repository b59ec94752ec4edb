#!/usr/bin/env python3
"""Two-level verification on the demo pair: does an 8-bit view of the weights agree, and what then?

    OMP_NUM_THREADS=1 python scripts/measure_two_level.py

The Q pass reads the view that W12 nests in its records (paper §4.3): sign, exponent and three
mantissa bits of every projection, the four dropped bits at their midpoint. Outputs come from the
exact weights; the view's argmax is taken at every output position with the exact output before it.
Writes docs/measurements/two_level_demo.json: agreement, tokens per exact pass with one and with two
levels, and what as many disagreements at random places would give; no times, because the reference
engine has no Q kernel. `--flags FILE.jsonl` keeps the flags for `specpilot simulate tlv`. Run it
from the repository's root; about a minute on one core.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from diagnose_pair.real import copy_with

from specpilot_cli.engines.reference.engine import ReferenceEngine
from specpilot_cli.engines.reference.record import record_dense
from specpilot_cli.io.atomic import atomic_write_text
from specpilot_cli.io.prompts_file import read_prompts
from specpilot_cli.report.json_out import build_envelope, render_json
from specpilot_cli.schema.lattice import LatticeRecording
from specpilot_cli.simulate.tlv import two_level

PAIR = Path("recipes/demo-cpu")
OUTPUT = Path("docs/measurements/two_level_demo.json")
NODES = (16, 32, 63)
BLOCK = 16


def low_precision_view(config: dict[str, Any], tensors: dict[str, npt.NDArray[Any]]) -> None:
    """Drop the four low mantissa bits of every projection; embeddings and norms stay."""
    for name, array in tensors.items():
        if array.dtype == np.uint16 and array.ndim == 2 and "embed" not in name:
            tensors[name] = (array & np.uint16(0xFFF0)) | np.uint16(0x0008)


def agreement(engine: ReferenceEngine, recording: LatticeRecording) -> list[npt.NDArray[np.bool_]]:
    """Per request, whether the engine's argmax is the recorded token, [n] bool."""
    found = []
    for request in range(recording.n_requests):
        prompt, output = recording.prompt(request), recording.output(request)
        ids = [*prompt.tolist(), *output.tolist()]
        scores = engine.score(ids, len(prompt) - 1, top_k=1)
        best = np.array([row[0] for row in scores.top_ids])
        found.append(np.asarray(best == output, dtype=np.bool_))
    return found


def main() -> None:
    """Record, score with the view, replay."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-o", "--output", type=Path, default=OUTPUT)
    parser.add_argument("--flags", type=Path, default=None)
    parser.add_argument("--every", type=int, default=3, help="take every so many-th dev prompt")
    options = parser.parse_args()
    prompts = list(read_prompts(PAIR / "prompts" / "dev.jsonl"))[:: options.every]
    recording = record_dense(
        ReferenceEngine(PAIR / "target", PAIR / "drafter"), prompts, BLOCK
    ).recording
    with tempfile.TemporaryDirectory() as folder:
        view = copy_with(Path(folder) / "view", PAIR / "target", low_precision_view)
        flags = agreement(ReferenceEngine(view, None), recording)
    exact = agreement(ReferenceEngine(PAIR / "target", None), recording)
    results = {
        "requests": len(prompts),
        "output_tokens": int(recording.output_ids.size),
        "exact_weights_agree_ratio": float(np.concatenate(exact).mean()),
        "two_level": {
            f"{nodes}_nodes": asdict(two_level(recording, flags, nodes=nodes)) for nodes in NODES
        },
    }
    atomic_write_text(
        options.output, render_json(build_envelope("measure_two_level", results)), force=True
    )
    if options.flags is not None:
        lines = [
            json.dumps(
                {"request_id": prompt.request_id, "agrees": "".join("01"[int(b)] for b in row)}
            )
            for prompt, row in zip(prompts, flags, strict=True)
        ]
        atomic_write_text(options.flags, "\n".join(lines) + "\n", force=True)


if __name__ == "__main__":
    main()
