#!/usr/bin/env python3
"""The measured numbers of replay and simulation in README.md, docs/replay.md, docs/simulate.md.

python scripts/replay_doc_numbers.py            write them in their places
python scripts/replay_doc_numbers.py --check    exit 1 if a page says otherwise
"""

from __future__ import annotations

import re
import sys
import textwrap
from pathlib import Path
from typing import Any

from bench_doc_numbers import read, table
from doc_marks import between_marks

REPOSITORY = Path(__file__).resolve().parent.parent
README, REPLAY, SIMULATE = (
    REPOSITORY / name for name in ("README.md", "docs/replay.md", "docs/simulate.md")
)
TREE_NODES = 32


def filled(text: str, *, indent: str = "") -> str:
    """A paragraph of the width of the pages."""
    return textwrap.fill(
        text, 100, initial_indent=indent, subsequent_indent=indent, break_long_words=False,
        break_on_hyphens=False,
    )  # fmt: skip


def batch() -> str:
    """Predicted and measured tokens per second, and what is told apart."""
    found = read("batch_simulation")
    rows, parts, ratios = [], [], []
    for key, judged in found["judged"].items():
        count = key.rpartition("_")[2]
        order = sorted(judged["policies"].items(), key=lambda item: -_predicted(item[1]))
        for name, row in order:
            runs = row["measured_all"]
            ratios.append(row["predicted_over_measured_ratio"])
            rows.append(
                [
                    count, f"`{name}`", f"{_predicted(row):.0f}",
                    f"{row['measured_tokens_per_s']:.0f} ({min(runs):.0f} – {max(runs):.0f})",
                    f"{ratios[-1]:.2f}",
                ]
            )  # fmt: skip
        apart, right = judged["pairs_told_apart"], judged["told_apart_as_predicted"]
        parts.append(
            f"{apart} of {len(judged['pairs'])} pairs at {count} in flight, {right} of them in the "
            "predicted order"
        )
    head = ["in flight", "policy", "predicted tokens/s", "measured, median (all runs)", "ratio"]
    three = _three(found["judged"])
    shares = found["share_of_the_processor_ratio"]
    text = (
        f"Two policies count as told apart where one is faster in each of the {found['rounds']} "
        "rounds and the 95 % t interval of the mean ratio lies above 1: "
        f"{'; '.join(parts)}. {three} Predictions are "
        f"{min(ratios):.2f} to {max(ratios):.2f} of the medians. The process had "
        f"{shares[0]:.0%} to {shares[1]:.0%} of its processor meanwhile."
    )
    return f"{table(head, rows)}\n\n{filled(text)}"


def _predicted(row: dict[str, Any]) -> float:
    return float(row["predicted_tokens_per_s"])


def _three(judged: dict[str, Any]) -> str:
    """The three policies of the comparison in their measured order, if it can be told."""
    found = []
    for key, item in judged.items():
        rates = {n: item["policies"][n]["measured_tokens_per_s"] for n in item["three_policies"]}
        names = ", ".join(f"`{name}`" for name in sorted(rates, key=lambda n: -rates[n]))
        sure = "as predicted" if item["three_told_apart_as_predicted"] else "not all told apart"
        found.append(f"{names} at {key.rpartition('_')[2]} ({sure})")
    return f"Three of them, fastest first: {'; '.join(found)}."


def two_level() -> str:
    """What two levels commit on the demo pair."""
    found = read("two_level_demo")["two_level"][f"{TREE_NODES}_nodes"]
    return filled(
        "On the demo pair, `scripts/measure_two_level.py` takes as Q the 8-bit view that W12 nests "
        f"in its records: it agrees at {100 * found['agreement']:.1f} % of the output positions, "
        f"and {TREE_NODES} nodes commit {found['tau_two']['value']:.2f} tokens per exact pass with "
        f"two levels against {found['tau_one']['value']:.2f} with one, "
        f"{found['ratio']['value']:.2f} times as many (`measurements/two_level_demo.json`; the "
        "reference engine has no Q kernel, so there are no times). Its `--flags agreement.jsonl` "
        "writes the flags that the examples above read."
    )


def calibration() -> str:
    """Predicted against realised τ, fitted on half of the requests."""
    found = read("calibration_demo")
    rows = []
    for source, items in (("unseen prompts", found["unseen"]),
                          ("committed recordings", found["committed_recordings"])):  # fmt: skip
        for item in items:
            errors = item["prediction_error_ratio"]
            gains = [row["calibrated_over_recorded_ratio"]["value"] for row in item["rows"]]
            rows.append(
                [
                    source, str(item["block"]), f"{item['fitted']} / {item['judged']}",
                    f"{item['temperature']:.2f}", f"{100 * errors['as_recorded']:.1f} %",
                    f"{100 * errors['calibrated']:.1f} %", f"{min(gains):.3f} – {max(gains):.3f}",
                ]
            )  # fmt: skip
    head = [
        "requests", "block", "fitted / judged", "temperature", "expected τ off, as recorded",
        "calibrated", "τ calibrated over recorded",
    ]  # fmt: skip
    return table(head, rows)


def peers() -> str:
    """Others' builders beside ours."""
    found = {row["tree"]: row for row in read("tree_peers_cpu")["records"]}
    sglang = found["EAGLE-2, SGLang select_top_k_tokens + organize_draft_results"]
    angel = found["EAGLE-3, AngelSlim topK_genrate"]
    eagle, best = found["EAGLE-2, one call"], found["best-first, one call"]
    return filled(
        f"SGLang's functions for EAGLE-2 and AngelSlim's for EAGLE-3 take {sglang['best_us']:,.0f} "
        f"and {angel['best_us']:,.0f} µs a tree of {TREE_NODES} nodes, as their packages ship "
        f"them, beside {eagle['best_us']:.1f} for `eagle-2` and {best['best_us']:.1f} for "
        f"`best-first` by single calls. SGLang's trees are those of `eagle-2`, "
        f"{sglang['identical_trees']} of {sglang['trees']}; AngelSlim's are in "
        f"{angel['identical_trees']} of {angel['trees']}.",
        indent="  ",
    )


def speed() -> str:
    """Curves, streams, and the commands on the committed recordings."""
    found = read("replay_speed_cpu")
    curve, stream = found["curve"], found["stream"]
    slowest = max(row["processor_s"] for row in found["commands"])
    sizes = " and ".join(f"{row['lattices']:,}" for row in stream)
    peaks = " and ".join(f"{row['peak_rss_bytes'] / 1e6:.0f}" for row in stream)
    return filled(
        f"The whole curve τ(1 … {curve['nodes'][1]}) of {curve['lattices']:,} lattices takes "
        f"{curve['replay_with_intervals']['best_processor_s']:.2f} s of processor time with its "
        f"intervals; {sizes} lattices stream in {peaks} MB; `replay` and `ceiling` on the "
        f"committed recordings take {slowest:.1f} s of processor time at most, without torch.",
        indent="  ",
    )


def readme_rows() -> dict[str, str]:
    """The rows of README's results that are about replay, by how they begin."""
    builders = {
        row["builder"]: row["best_us"]
        for row in read("tree_builders_cpu")["records"]
        if row["nodes"] == TREE_NODES
    }
    batched = [builders[f"{n}, batch"] for n in ("best-first", "eagle-2", "sequoia", "opt-tree")]
    ways = ("batch", "one call per tree")
    demo = [builders[f"best-first, demo recording, {way}"] for way in ways]
    live = read("replay_live_demo")["settings"]
    speeds = read("replay_speed_cpu")
    curve, stream = speeds["curve"], speeds["stream"]
    rows = {
        "tree builders": (
            f"tree builders, {TREE_NODES} nodes on 16 × 16, one thread: best-first by single "
            "calls; in a batch best-first, EAGLE-2 (top 4), Sequoia, OPT-Tree",
            f"{builders['best-first, one call per tree']:.1f}; {batched[0]:.1f}, {batched[1]:.1f}, "
            f"{batched[2]:.1f}, {batched[3]:.0f} µs of processor a tree; best-first on the demo "
            f"pair's recording {demo[1]:.1f} and {demo[0]:.1f}",
            "tree_builders_cpu", "bench_trees.py",
        ),
        "replay against": (
            "replay against live decoding, blocks 8, 12, 16, chain and 8 / 16 / 32 / 63 nodes: "
            "steps that commit what replay said",
            f"{sum(row['equal_steps'] for row in live):,} of "
            f"{sum(row['compared_steps'] for row in live):,}",
            "replay_live_demo", "measure_replay_live.py",
        ),
        "replay: whole": (
            f"replay: whole curve τ(1 … {curve['nodes'][1]}) of {curve['lattices']:,} lattices, "
            f"with intervals; peak memory for {stream[0]['lattices'] // 1000} thousand and "
            f"{stream[1]['lattices'] // 10**6} million lattices "
            f"({stream[1]['file_bytes'] / 1e9:.1f} GB)",
            f"{curve['replay_with_intervals']['best_processor_s']:.2f} s of processor; "
            f"{stream[0]['peak_rss_bytes'] / 1e6:.0f}, {stream[1]['peak_rss_bytes'] / 1e6:.0f} MB",
            "replay_speed_cpu", "bench_replay.py",
        ),
    }  # fmt: skip
    return {
        start: f"| {what} | {result} | CPU | [{file}](docs/measurements/{file}.json), "
        f"`scripts/{script}` |"
        for start, (what, result, file, script) in rows.items()
    }


def with_rows(page: str, rows: dict[str, str]) -> str:
    """`page` with the table row that begins so, which must be there once, replaced by each."""
    for start, row in rows.items():
        pattern = rf"^\| {re.escape(start)}.*$"
        if len(re.findall(pattern, page, re.MULTILINE)) != 1:
            raise SystemExit(f"error: no row begins with `{start}`, or several do")
        page = re.sub(pattern, lambda _, row=row: row, page, flags=re.MULTILINE)
    return page


def rendered() -> dict[Path, str]:
    """All three pages as they should be."""
    pages = {page: page.read_text(encoding="utf-8") for page in (README, REPLAY, SIMULATE)}
    pages[README] = with_rows(pages[README], readme_rows())
    for page, texts in (
        (REPLAY, {"calibration": calibration(), "peers": peers(), "speed": speed()}),
        (SIMULATE, {"batch": batch(), "two-level": two_level()}),
    ):
        for name, text in texts.items():
            pages[page] = between_marks(pages[page], name, text, word="replay")
    return pages


def main() -> int:
    """Write or check."""
    pages = rendered()
    if "--check" not in sys.argv[1:]:
        for page, text in pages.items():
            page.write_text(text, encoding="utf-8")
        return 0
    stale = [p.name for p, text in pages.items() if p.read_text(encoding="utf-8") != text]
    if stale:
        print(f"{', '.join(stale)}: not what was measured; run scripts/replay_doc_numbers.py",
              file=sys.stderr)  # fmt: skip
    return int(bool(stale))


if __name__ == "__main__":
    sys.exit(main())
