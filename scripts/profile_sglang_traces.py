"""Step profiles and ceilings of the trace extracts in tests/fixtures/traces, and their tables.

python scripts/profile_sglang_traces.py            write docs/measurements and both pages
python scripts/profile_sglang_traces.py --check    exit 1 if a file says something else

The traces are of SGLang 0.5.23 on one H200; the step times were taken from the same servers without
the profiler. Everything else follows, so this needs no GPU.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from doc_marks import between_marks

from specpilot_cli.ceiling.answer import answer_ceiling
from specpilot_cli.ceiling.document import ceiling_document
from specpilot_cli.ceiling.peaks import peaks_for
from specpilot_cli.ceiling.step_times import load_step_times
from specpilot_cli.models.registry import load_model
from specpilot_cli.profile.build import Deployment, profile_of_traces
from specpilot_cli.report.json_out import plain

REPO = Path(__file__).resolve().parent.parent
TRACES = REPO / "tests" / "fixtures" / "traces"
RESULT = REPO / "docs" / "measurements" / "sglang_steps_h200.json"
STEP_TIMES = "h200-qwen3.8-27b-dflash2-bf16"
SERVERS: dict[str, int | None] = {"ar": None, "df8": 8, "df16": 16}
_PARTS = ("target_gemm", "head", "recurrent", "attention", "drafter", "rest")


def measured() -> dict[str, Any]:
    """Profile, without the list of kernels, and ceiling of every server."""
    curve = load_step_times(STEP_TIMES)
    target, drafter = load_model("qwen3.8-27b"), load_model("qwen3.8-27b-dflash2")
    found: dict[str, Any] = {}
    for name, block in SERVERS.items():
        given = Deployment(target, drafter, "0.5.23", block)
        profile = profile_of_traces([TRACES / f"{name}.trace.json.gz"], given)
        answer = answer_ceiling(profile, peaks_for(profile), curve=curve)
        found[name] = {
            "profile": profile.model_dump(mode="json", exclude={"trace": {"kernels"}}),
            "ceiling": plain(ceiling_document(answer)),
        }
    return {"step_times": STEP_TIMES, "script": "scripts/profile_sglang_traces.py", **found}


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.2f}"


def profile_table(result: dict[str, Any]) -> str:
    """Where each server's step goes, in milliseconds."""
    head = ["", "step", "profiled", "target pass", "draft", *_PARTS, "no kernel", "counted once"]
    rows = [head, ["---"] * len(head)]
    for name in SERVERS:
        profile, ceiling = result[name]["profile"], result[name]["ceiling"]
        spans = {span["name"]: span["seconds"] for span in profile["spans"]}
        classes = {item["name"]: item["seconds"] for item in profile["classes"]}
        target = spans.get("VERIFY", spans.get("DECODE", 0.0))
        cells = [_ms(classes[part]) if part in classes else "–" for part in _PARTS]
        rows.append([
            f"`{name}`", _ms(ceiling["t_step_s"]), _ms(profile["t_prof_s"]), _ms(target),
            _ms(spans["DRAFT"]) if "DRAFT" in spans else "–", *cells,
            _ms(ceiling["unattributed_s"]), _ms(profile["trace"]["overlap_s"]),
        ])  # fmt: skip
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def ceiling_table(result: dict[str, Any]) -> str:
    """Factors of every server, and what the projections say."""
    names = [
        "W12", "tree of 32 nodes", "TLV on top of W12", "WY verify of recurrent layers",
        "certified head",
    ]  # fmt: skip
    head = ["", "kernels", "overhead", "step cost", *(f"{name}, projected" for name in names)]
    rows = [head, ["---"] * len(head)]
    for name in SERVERS:
        ceiling = result[name]["ceiling"]
        levers = {item["name"]: item for item in ceiling["levers"]}
        factors = ("kernel_factor_ratio", "overhead_factor_ratio", "step_cost_ratio")
        rows.append([
            f"`{name}`", *(f"{ceiling[key]:.3f}×" for key in factors),
            *(_gain(levers[lever]) for lever in names),
        ])  # fmt: skip
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _gain(lever: dict[str, Any]) -> str:
    low, high = lever["gain_low_ratio"], lever["gain_high_ratio"]
    if high is None:
        return "–"
    if low is None:
        return f"up to {high:.2f}×"
    same = f"{low:.2f}" == f"{high:.2f}"
    return f"{high:.2f}×" if same else f"{low:.2f}–{high:.2f}×"


def rendered() -> dict[Path, str]:
    """The result and both pages as they should be."""
    result = json.loads(json.dumps(measured(), allow_nan=False))
    pages = {"profile": profile_table(result), "ceiling": ceiling_table(result)}
    found = {RESULT: json.dumps(result, indent=1, ensure_ascii=False) + "\n"}
    for name, table in pages.items():
        path = REPO / "docs" / f"{name}.md"
        page = path.read_text(encoding="utf-8")
        found[path] = between_marks(page, "h200", table, word="trace")
    return found


def main() -> int:
    """Write or check."""
    stale = {
        path: text
        for path, text in rendered().items()
        if not path.exists() or path.read_text(encoding="utf-8") != text
    }
    if "--check" in sys.argv[1:]:
        for path in stale:
            sys.stderr.write(f"{path.name} is out of date: run scripts/profile_sglang_traces.py\n")
        return 1 if stale else 0
    for path, text in stale.items():
        path.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
