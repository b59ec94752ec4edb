#!/usr/bin/env python3
"""Does calibration of the demo pair's drafter predict requests that it was not fitted on?

    OMP_NUM_THREADS=1 python scripts/measure_calibration.py

Records the 192 unseen prompts densely on the reference engine, at blocks 8 and 16, and writes
docs/measurements/calibration_demo.json: what `specpilot replay --calibrate` says with 96 of them
fitted and 96 judged. The same from the committed recordings, where four requests are fitted and
four of other kinds of text judged, stands beside it. Nothing is timed, so a busy machine gives the
same numbers. Run it from the repository's root; about three minutes on one core.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from specpilot_cli.engines.reference.engine import ReferenceEngine
from specpilot_cli.engines.reference.record import record_dense
from specpilot_cli.io.atomic import atomic_write_text
from specpilot_cli.io.lattice_file import read_lattice
from specpilot_cli.io.prompts_file import read_prompts
from specpilot_cli.replay.calibration import calibrate
from specpilot_cli.replay.document import calibration_document
from specpilot_cli.report.json_out import build_envelope, render_json
from specpilot_cli.schema.lattice import LatticeRecording

PAIR = Path("recipes/demo-cpu")
PROMPTS = PAIR / "prompts" / "unseen.jsonl"
OUTPUT = Path("docs/measurements/calibration_demo.json")
UNSEEN_BLOCKS, COMMITTED_BLOCKS = (8, 16), (8, 12, 16)
# the ids of 192 requests and what a recording is would be most of the file
LEFT_OUT = ("fitted_requests", "judged_requests", "recording")


def measured(recording: LatticeRecording) -> dict[str, Any]:
    """The answer of `replay --calibrate`, and how many requests were fitted and judged."""
    found = calibrate(recording)
    document = calibration_document(found, recording)
    counts = {
        "block": recording.metadata.block,
        "fitted": len(document["fitted_requests"]),
        "judged": len(document["judged_requests"]),
    }
    return counts | {key: value for key, value in document.items() if key not in LEFT_OUT}


def main() -> None:
    """Record, calibrate, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("-o", "--output", type=Path, default=OUTPUT)
    options = parser.parse_args()
    engine = ReferenceEngine(PAIR / "target", PAIR / "drafter", threads=1)
    prompts = list(read_prompts(PROMPTS))
    unseen = []
    for block in UNSEEN_BLOCKS:
        unseen.append(measured(record_dense(engine, prompts, block).recording))
        sys.stderr.write(f"block {block}: {unseen[-1]['prediction_error_ratio']}\n")
    committed = [
        measured(read_lattice(PAIR / "recordings" / f"block-{block}.safetensors"))
        for block in COMMITTED_BLOCKS
    ]
    results = {"unseen": unseen, "committed_recordings": committed}
    inputs = [PAIR / "target", PAIR / "drafter", PROMPTS]
    envelope = build_envelope("scripts/measure_calibration.py", results, inputs=inputs)
    atomic_write_text(options.output, render_json(envelope), force=True)


if __name__ == "__main__":
    main()
