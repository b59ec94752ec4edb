"""Task accuracy beside the verdict: grading, pairing, and an interval that keeps its width."""

from __future__ import annotations

import json

import numpy as np
import pytest

from specpilot_cli.schema.outputs import OutputRecord
from specpilot_cli.stats import (
    binomial_interval,
    frequency_ratio_interval,
    paired_proportion_difference,
    wilson_interval,
)
from specpilot_cli.token_force.accuracy import accuracy_change, is_right
from tests.unit.token_force.cli import flags, run


@pytest.mark.parametrize(
    ("output", "answer", "right"),
    [
        ("So 3 + 4 = 7 apples.\n#### 7", "7", True),
        ("So 3 + 4 = 7 apples, not 8", "7", False),
        ("He pays $1,234.50", "1234.5", True),
        ("The answer is 12.", "12", True),
        (r"Thus \boxed{\frac{1}{2}} holds.", r"\frac{1}{2}", True),
        (r"First \boxed{1}, then \boxed{ 2 }", "2", True),
        (r"open \boxed{7", "7", True),
        ("It was built in\nPinecross.", "pinecross", True),
        ("It was built in\nRedwick", "Pinecross", False),
        ("", "7", False),
        ("", "word", False),
    ],
)
def test_grading(output, answer, right):
    assert is_right(output, answer) is right


class Text:
    """Token ids are digits."""

    def decode(self, ids):
        return "".join(str(i) for i in ids)


def record(name, *ids):
    return OutputRecord(
        request_id=name, benchmark="b", prompt_ids=(1,), output_ids=ids, finish_reason="stop"
    )


def test_both_systems_are_graded_on_the_prompts_that_have_an_answer():
    system = [record("a", 7), record("b", 8), record("c", 1), record("d", 5)]
    stock = [record("d", 5), record("c", 1), record("b", 9), record("a", 7)]
    answers = {"a": "7", "b": "9", "c": "2"}
    found = accuracy_change(system, stock, answers, Text())
    assert (found.n, found.system, found.stock) == (3, 1, 2)
    assert found.change == pytest.approx(-1 / 3)
    assert found.interval.low < -1 / 3 < found.interval.high
    assert not found.decides
    assert accuracy_change(system, stock, {}, Text()) is None


def test_equal_systems_have_no_interval_of_width_zero():
    interval = paired_proportion_difference(80, 0, 0, 20)
    assert interval.low < -0.01 < 0 < 0.01 < interval.high


def test_the_interval_is_newcombes():
    # Newcombe, Statistics in Medicine 17 (1998), method 10 on 36, 12, 2 and 0 pairs.
    interval = paired_proportion_difference(36, 12, 2, 0)
    assert (interval.low, interval.high) == pytest.approx((0.0569, 0.3404), abs=1e-3)


def test_the_paired_interval_covers_a_true_change():
    rng = np.random.default_rng(5)
    truth = np.array([0.62, 0.05, 0.08, 0.25])  # both, system only, stock only, neither
    covered = 0
    for _ in range(1500):
        cells = rng.multinomial(80, truth)
        covered += paired_proportion_difference(*(int(c) for c in cells)).contains(-0.03)
    assert 0.935 <= covered / 1500 <= 0.985


def test_wilson_and_exact_intervals():
    # Agresti and Coull (1998): 0 of 10 gives Wilson's 0.2775 and Clopper-Pearson's 0.3085.
    assert wilson_interval(0, 10).high == pytest.approx(0.2775, abs=1e-4)
    assert binomial_interval(0, 10).high == pytest.approx(0.3085, abs=1e-4)
    assert binomial_interval(0, 0).low == 0.0
    assert binomial_interval(0, 0).high == 1.0
    both = binomial_interval(3, 10)
    assert (both.low, both.high) == pytest.approx((0.0667, 0.6525), abs=1e-4)


def test_the_ratio_interval_agrees_with_the_test():
    """One-sided 5 % rejects exactly where the two-sided 90 % interval lies above 1."""
    from specpilot_cli.stats import more_frequent_p_value

    for events in range(1, 12):
        for base in range(5):
            interval = frequency_ratio_interval(events, 3.0, base, 4.0, confidence=0.90)
            rejects = more_frequent_p_value(events, 3.0, base, 4.0) < 0.05
            assert (interval.low > 1.0) == rejects
    assert frequency_ratio_interval(3, 1.0, 0, 1.0).high == float("inf")


def test_the_command_shows_accuracy_beside_the_verdict(servers, prompts, tmp_path):
    """The tokenizer is the one beside the scorer's model; every answer is stock's last token."""
    from tokenizers import Tokenizer, models

    vocabulary = {str(i): i for i in range(64)}
    model = tmp_path / "model"
    model.mkdir()
    Tokenizer(models.WordLevel(vocabulary, unk_token="0")).save(str(model / "tokenizer.json"))
    good = servers["scorer"].script

    def script(exchange):
        if exchange.path == "/server_info":
            exchange.reply({"version": "toy", "model_path": str(model)})
        else:
            good(exchange)

    servers["scorer"].script = script
    saved = tmp_path / "answers"
    args = [*flags(servers, "faulty"), "--prompts", prompts]
    run(*args, "--save-outputs", saved, cwd=tmp_path)
    last = {}
    for line in (saved / "stock.jsonl").read_text().splitlines():
        row = json.loads(line)
        last[row["request_id"]] = str(row["output_ids"][-1])
    rows = [json.loads(line) for line in prompts.read_text().splitlines()]
    rows = [row | {"answer": last[row["request_id"]]} for row in rows]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = run(*args, "--json", cwd=tmp_path)
    found = json.loads(done.stdout)["results"]["accuracy"]
    assert (found["n_prompts"], found["stock_pct"]) == (10, 100.0)
    assert found["change_low_pct"] <= found["change_pct"] < found["change_high_pct"] < 0
    shown = run(*args, cwd=tmp_path).stdout
    assert "task accuracy, which decides nothing here: -" in shown
    assert "before" in shown
