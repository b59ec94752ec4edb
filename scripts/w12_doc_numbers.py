"""Write the measured numbers of W12 into README.md and the pages of docs from docs/measurements.

python scripts/w12_doc_numbers.py            rewrite the pages
python scripts/w12_doc_numbers.py --check    exit 1 if a page says something else

In docs/w12.md and docs/sglang-plugin.md a text stands between `<!-- w12 NAME: begin -->` and
`<!-- w12 NAME: end -->`; in README.md the rows of the results that begin with `| W12 ` are
replaced.
"""

from __future__ import annotations

import json
import re
import sys
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench_w12_docs import tables, with_tables
from doc_marks import between_marks

REPO = Path(__file__).resolve().parent.parent
CODEC_GOAL = 2.0
"""GB of BF16 per second and core, encoding and decoding."""
COPY_GOAL = 1.5
"""Time of a conversion over that of copying the same bytes."""
GPU_GOAL = 900
"""GB of BF16 per second, encoding on an H200."""

SERVED_GOALS = {("Qwen3.8-27B", 1): 1.25, ("Qwen3.8-27B", 32): 1.18}
"""Time of a token with stock's fastest choice over that with W12, by model and requests."""
CHAIN_GOAL = 1.15
TIMED_AS = {
    "Qwen3.8-27B": "qwen-27b", "Llama-3.1-8B": "llama-8b", "Gemma-4-12B": "gemma-12b",
    "Muse-Glimmer-30B": "muse-30b",
}  # fmt: skip

Document = Mapping[str, Any]


def measured(name: str) -> Document:
    """The document NAME.json of docs/measurements."""
    text = (REPO / "docs" / "measurements" / f"{name}.json").read_text(encoding="utf-8")
    found: Document = json.loads(text)
    return found


def _goal(met: bool) -> str:
    return "met" if met else "**missed**"


def _cpu_rates(codec: Document, content: str) -> tuple[float, float]:
    """GB of BF16 per processor-second, encoding and decoding on one thread."""
    row = codec["codec"][content]["threads_1"]
    return row["encode"]["cpu_bytes_per_s"] / 1e9, row["decode"]["cpu_bytes_per_s"] / 1e9


def codec_text(codec: Document) -> str:
    """What one core encodes and decodes, beside the goal."""
    encode, decode = _cpu_rates(codec, "normal")
    zeros_encode, zeros_decode = _cpu_rates(codec, "one_percent_zeros")
    parts = codec["codec"]["normal"]
    bits = parts["bits_per_weight"]
    return (
        f"On one core of an {codec['environment']['cpu']} ({codec['date_utc']}), in GB of BF16 per "
        f"processor-second: ordinary weights {encode:.1f} to encode and {decode:.1f} to decode, at "
        f"{bits:.3f} bits per weight; with 1 % zeros among them {zeros_encode:.1f} and "
        f"{zeros_decode:.1f}. The goal is {CODEC_GOAL:.1f} for both: "
        f"{_goal(min(encode, decode) >= CODEC_GOAL)} for ordinary weights, "
        f"{_goal(min(zeros_encode, zeros_decode) >= CODEC_GOAL)} for those with zeros."
    )


def _ratio(convert: Document, step: str) -> str:
    row = convert["sharded"]["steps"][step]
    ratios = sorted(row["copy_time_ratio"])
    return f"{row['copy_time_ratio_median']:.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"


def convert_text(convert: Document) -> str:
    """How long whole commands take, in copies of the same bytes, and their memory."""
    sharded = convert["sharded"]
    steps, huge = sharded["steps"], convert["huge_tensor"]["steps"]
    median = steps["convert"]["copy_time_ratio_median"]
    peak = max(steps[step]["peak_rss_bytes"] for step in ("convert", "verify", "restore"))
    copy = steps["copy"]["bytes_per_s"] / 1e9
    return (
        f"Converting {sharded['source_bytes'] / 1e9:.1f} GB took {_ratio(convert, 'convert')} "
        f"times as long as copying it: median, least and greatest of {sharded['rounds']} rounds on "
        f"{convert['environment']['processors']} cores, the copy at {copy:.1f} GB/s. The goal is "
        f"{COPY_GOAL}: {_goal(median <= COPY_GOAL)}. Verifying the result took "
        f"{_ratio(convert, 'verify')}, restoring {_ratio(convert, 'restore')}. Peak memory was "
        f"{peak / 1e6:.0f} MB, and {huge['convert']['peak_rss_bytes'] / 1e6:.0f} MB for "
        f"{convert['huge_tensor']['checkpoint']}."
    )


def gpu_text(gpu: Document) -> str:
    """What a GPU encodes and decodes, and where it misses the goal."""
    rates = {n: row["encode"]["bf16_bytes_per_s"] / 1e9 for n, row in gpu["shapes"].items()}
    slow = {name: rate for name, rate in rates.items() if rate < GPU_GOAL}
    fast = [rate for name, rate in rates.items() if name not in slow]
    decoded = [row["decode"]["of_copy"] for n, row in gpu["shapes"].items() if n not in slow]
    model = gpu["model"]
    misses = " and ".join(
        f"{name} ({2 * gpu['shapes'][name]['rows'] * gpu['shapes'][name]['cols'] / 1e6:.0f} MB: "
        f"{rate:.0f})"
        for name, rate in slow.items()
    )
    return (
        f"On an {gpu['gpu']} ({gpu['date_utc']}) all {model['tensors']} linears, "
        f"{model['bf16_bytes'] / 1e9:.1f} GB of BF16, take {model['encode_s'] * 1e3:.1f} ms to "
        f"encode, {model['decode_s'] * 1e3:.1f} ms to decode and {model['compare_s'] * 1e3:.1f} ms "
        f"to compare. Encoding runs at {min(fast):.0f} to {max(fast):.0f} GB of BF16 per second, "
        f"decoding moves {min(decoded):.0%} to {max(decoded):.0%} of what an elementwise kernel's "
        f"copy moves. The goal for encoding, {GPU_GOAL} GB/s, is "
        f"{'missed by ' + misses if misses else 'met by all'}."
    )


def _served(document: Document, name: str) -> tuple[float, float, float]:
    """Milliseconds of stock and of W12, and their paired ratio, of one comparison."""
    timing = document["results"]["timings"][name]
    ms = timing["ms"]
    return (
        ms[timing["base"]]["median"], ms["w12"]["median"], timing["base_over"]["w12"]["ratio"]
    )  # fmt: skip


def sglang_table() -> str:
    """W12 beside stock in SGLang: what was timed, in milliseconds."""
    main, muse = measured("sglang_w12_h200"), measured("sglang_w12_muse_h200")
    pools = measured("sglang_w12_recorder_h200")["results"]["kv_pool"]["80 GB"]
    lines = ["| | stock | W12 | stock over W12 |", "|---|---|---|---|"]
    for model, source, counts in (
        ("Qwen3.8-27B", main, (1, 32)), ("Llama-3.1-8B", main, (1, 8, 32)),
        ("Gemma-4-12B", main, (1, 8, 32)), ("Muse-Glimmer-30B", muse, (1,)),
    ):  # fmt: skip
        for requests in counts:
            name = f"{TIMED_AS[model]} plain, gemv, {requests} at once"
            stock, w12, ratio = _served(source, name)
            goal = SERVED_GOALS.get((model, requests))
            said = "" if goal is None else f"; goal {goal}, {_goal(ratio >= goal)}"
            several = "one request" if requests == 1 else f"{requests} requests"
            lines.append(f"| {model}, a token, {several} | {stock:.2f} ms | {w12:.2f} ms | "
                         f"{ratio:.2f}×{said} |")  # fmt: skip
    stock, w12, ratio = _served(main, "qwen-27b chain, 1 at once")
    lines.append(f"| Qwen3.8-27B, a step of stock's DFlash2 chain of 8, one request | {stock:.2f} "
                 f"ms | {w12:.2f} ms | {ratio:.2f}×; goal {CHAIN_GOAL}, "
                 f"{_goal(ratio >= CHAIN_GOAL)} |")  # fmt: skip
    tokens = pools["tokens"]
    lines.append("| Qwen3.8-27B, KV pool with the static memory of an 80 GB card | "
                 f"{tokens['gemv-card']:,} tokens | {tokens['w12-card']:,} tokens | "
                 f"{pools['growth_ratio']:.2f}× larger |")  # fmt: skip
    return "\n".join(lines)


def plugin_cost() -> str:
    """What the plugin and the recorder cost a step of a chain."""
    timing = measured("sglang_w12_recorder_h200")["results"]["timings"][
        "recorder, 24 layers, 1 at once"
    ]
    added = {name: 1 / found["ratio"] - 1 for name, found in timing["base_over"].items()}
    return (
        f"A step of {timing['ms']['absent']['median']:.2f} ms (24 layers of Qwen3.8-27B's shape, "
        f"DFlash2 chain of 8, one request) takes {added['dense']:+.2%} while dense lattices are "
        f"recorded (goal at most 10 %), {added['anchored']:+.2%} with anchored ones (goal 3 %), "
        f"and {added['inert']:+.2%} with the plugin installed and not configured, where it does "
        "nothing: that much two launches differ. "
        "[Numbers](measurements/sglang_w12_recorder_h200.json)."
    )


def pair_text() -> str:
    """The demo pair served with W12: judged by token-force, and beside the reference engine."""
    found = measured("demo_pair_sglang_w12_h200")["results"]
    audits = measured("sglang_w12_recorder_h200")["results"]["token_force"]
    verdicts = {audits[f"pair-{way}-w12"]["verdict"] for way in ("plain", "chain")}
    if verdicts != {"accept"}:
        raise SystemExit(f"error: the page says that token-force accepts, it says {verdicts}")
    served = found["sglang"]["tokens_per_step"]
    reference = found["reference"]["bfloat16"]["tokens_per_step"]
    return (
        "The [demo pair](../recipes/demo-cpu/EVIDENCE.md) with W12 weights in SGLang on the H200: "
        "token-force accepts plain decoding and stock's chain against stock. On 32 prompts the "
        f"chain commits {served:.3f} tokens a step, in the reference engine with BF16 weights "
        f"{reference:.3f} "
        "([numbers](measurements/demo_pair_sglang_w12_h200.json))."
    )


def stack_text(stack: Document) -> str:
    """What small kernels between the products cost, and what is left of it."""
    one, several = stack["rows"]["1"], stack["rows"]["32"]
    return (
        f"In a graph of 64 layers without the head ({stack['date_utc']}) the products alone take "
        f"{one['w12 alone']:.2f} ms at one row, with torch's small kernels between them "
        f"{one['w12 torch']:.2f}, with ours {one['w12 chained']:.2f}; BF16 takes "
        f"{one['bf16 alone']:.2f}, {one['bf16 torch']:.2f} and {one['bf16 chained']:.2f}. At 32 "
        f"rows ours make it slower, {several['w12 chained']:.2f} ms against "
        f"{several['w12 torch']:.2f}, probably since their many blocks fill the multiprocessors "
        "unevenly before the product's come; so the plugin uses them for up to 8 rows."
    )


def readme_rows() -> list[str]:
    """The rows of README's results that are about W12."""
    codec, convert, bits = (measured(f"w12_{n}") for n in ("codec_cpu", "convert", "bits"))
    gpu = measured("w12_gpu_codec_h200")
    means = {row["rows"]: row["ratio_mean"] for row in measured("w12_gemm_h200")["means"]}
    sglang = measured("sglang_w12_h200")
    served = [_served(sglang, f"qwen-27b {what} at once")[2]
              for what in ("plain, gemv, 1", "plain, gemv, 32", "chain, 1")]  # fmt: skip
    growth = measured("sglang_w12_recorder_h200")["results"]["kv_pool"]["80 GB"]["growth_ratio"]
    encode, decode = _cpu_rates(codec, "normal")
    found, normal = bits["all_checkpoints"], bits["normal_0.02"]["bits_per_weight"]
    ratio, model = convert["sharded"]["steps"]["convert"]["copy_time_ratio_median"], gpu["model"]
    size, checkpoints = model["bf16_bytes"] / 1e9, len(bits["checkpoints"])
    rows = [
        ("bits per weight: N(0, 0.02); all large weights of "
         f"{checkpoints} small checkpoints, within their bar",
         f"{normal:.3f}; {found['bits_per_weight']:.3f}, {found['meet_bar']} of "
         f"{found['large_tensors']}", "any", "w12_bits", "bench_w12_bits.py"),
        ("codec, N(0, 0.02), one thread, per CPU second: encode, decode",
         f"{encode:.1f}, {decode:.1f} GB of BF16", "CPU", "w12_codec_cpu", "bench_w12_codec.py"),
        ("conversion of 4 GB, time over that of copying it, median (goal 1.5)",
         f"{ratio:.2f}×", f"{convert['environment']['processors']} CPU cores", "w12_convert",
         "bench_w12_convert.py"),
        (f"codec on a GPU, the linears of Qwen3.8-27B ({size:.1f} GB): encode, decode",
         f"{model['encode_s'] * 1e3:.1f}, {model['decode_s'] * 1e3:.1f} ms", "one H200",
         "w12_gpu_codec_h200", "bench_w12_gpu_codec.py"),
        ("products, linears of Qwen3.8-27B, 1 / 8 / 16 / 32 / 64 rows: time of cuBLAS with BF16 "
         "over W12's, mean (goals 1.42 to 1.25 missed)",
         " / ".join(f"{means[rows]:.2f}" for rows in (1, 8, 16, 32, 64)) + "×", "one H200",
         "w12_gemm_h200", "bench_w12.py"),
        ("in SGLang 0.5.23, shape of Qwen3.8-27B, random weights, time of stock over W12's: a "
         "token at 1 and 32 requests against gemv (goals 1.25, 1.18 missed), a step of the DFlash2 "
         "chain; KV pool on 80 GB",
         f"{served[0]:.2f}×, {served[1]:.2f}×, {served[2]:.2f}×; {growth:.2f}×",
         "one H200", "sglang_w12_h200", "measure_sglang_w12.py"),
    ]  # fmt: skip
    return [
        f"| W12 {what} | {result} | {where} | [{file}](docs/measurements/{file}.json), "
        f"`scripts/{script}` |"
        for what, result, where, file, script in rows
    ]


def with_texts(page: str, texts: Mapping[str, str]) -> str:
    """`page` with every text of `texts` between its marks, which must be there once."""
    for name, text in texts.items():
        page = between_marks(page, name, textwrap.fill(text, 100))
    return page


def with_rows(page: str, rows: list[str]) -> str:
    """`page` with its rows about W12, which must follow each other, replaced by `rows`."""
    found = re.findall(r"(?:^\| W12 .*\n)+", page, re.MULTILINE)
    if len(found) != 1:
        raise SystemExit("error: the rows about W12 do not follow each other")
    return page.replace(found[0], "".join(f"{row}\n" for row in rows))


def rendered() -> dict[Path, str]:
    """Both pages as they should be."""
    texts = {
        "codec": codec_text(measured("w12_codec_cpu")),
        "convert": convert_text(measured("w12_convert")),
        "gpu codec": gpu_text(measured("w12_gpu_codec_h200")),
        "stack": stack_text(measured("w12_stack_h200")),
    }
    page, readme = REPO / "docs" / "w12.md", REPO / "README.md"
    plugin = REPO / "docs" / "sglang-plugin.md"
    return {
        plugin: between_marks(
            with_texts(
                plugin.read_text(encoding="utf-8"),
                {"plugin cost": plugin_cost(), "pair": pair_text()},
            ),
            "sglang",
            sglang_table(),
        ),
        page: with_tables(
            with_texts(page.read_text(encoding="utf-8"), texts),
            tables(dict(measured("w12_gemm_h200")), dict(measured("w12_counters_h200"))),
        ),
        readme: with_rows(readme.read_text(encoding="utf-8"), readme_rows()),
    }


def main() -> int:
    """Write or check the pages."""
    stale = {p: text for p, text in rendered().items() if p.read_text(encoding="utf-8") != text}
    if "--check" in sys.argv[1:]:
        for path in stale:
            sys.stderr.write(f"{path.name} is out of date: run scripts/w12_doc_numbers.py\n")
        return 1 if stale else 0
    for path, text in stale.items():
        path.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
