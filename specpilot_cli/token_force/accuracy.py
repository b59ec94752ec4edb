"""The paired change of task accuracy, where the prompts hold answers.

It stands beside the verdict and never decides it: its interval is wider than the damage of a fault
that token forcing rejects (paper §6.2, Figure 2c).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from specpilot_cli.schema.outputs import OutputRecord
from specpilot_cli.stats import Interval, paired_proportion_difference
from specpilot_cli.token_force.text import TextDecoder

_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
_MARKED = re.compile(r"(?:####|answer is:?|answer:)\s*([^\n]+)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class AccuracyChange:
    """Right answers of both systems to the same prompts.

    n: prompts with an answer. system, stock: right ones. change, interval: difference of the two
    shares, system minus stock, with its 95 % interval, as fractions.
    """

    n: int
    system: int
    stock: int
    change: float
    interval: Interval

    @property
    def decides(self) -> bool:
        """Whether the interval leaves out no change at all."""
        return not self.interval.contains(0.0)


def accuracy_change(
    system: Sequence[OutputRecord],
    stock: Sequence[OutputRecord],
    answers: Mapping[str, str],
    text: TextDecoder,
) -> AccuracyChange | None:
    """Grade both systems' outputs, decoded by `text`; None where no request has an answer."""
    other = {record.request_id: record for record in stock}
    cells = dict.fromkeys(((True, True), (True, False), (False, True), (False, False)), 0)
    for record in system:
        answer = answers.get(record.request_id)
        if answer is not None and record.request_id in other:
            pair = (record, other[record.request_id])
            one, two = (is_right(text.decode(item.output_ids), answer) for item in pair)
            cells[one, two] += 1
    n = sum(cells.values())
    if n == 0:
        return None
    both, only_system, only_stock = cells[True, True], cells[True, False], cells[False, True]
    return AccuracyChange(
        n=n,
        system=both + only_system,
        stock=both + only_stock,
        change=(only_system - only_stock) / n,
        interval=paired_proportion_difference(both, only_system, only_stock, cells[False, False]),
    )


def is_right(output: str, answer: str) -> bool:
    """Whether an output's final answer is `answer`.

    The final answer is the last `\\boxed{...}`, else what follows the last `####` or `answer is`,
    else, for a number, the last number, else the last line. Numbers are compared as numbers, other
    text without spaces, dollar signs, a final full stop and case.
    """
    wanted = _number(answer)
    found = _boxed(output)
    if found is None:
        marked = _MARKED.findall(output)
        found = marked[-1] if marked else None
    if wanted is not None:
        numbers = _NUMBER.findall(output if found is None else found)
        return bool(numbers) and _number(numbers[-1]) == wanted
    if found is None:
        lines = [line for line in output.splitlines() if line.strip()]
        found = lines[-1] if lines else ""
    return _plain(found) == _plain(answer)


def _number(text: str) -> float | None:
    stripped = text.strip().strip("$").replace(",", "")
    return float(stripped) if re.fullmatch(r"-?\d+(\.\d+)?", stripped) else None


def _plain(text: str) -> str:
    return re.sub(r"[\s$]", "", text).rstrip(".").lower()


def _boxed(output: str) -> str | None:
    """Content of the last `\\boxed{...}` with its braces balanced."""
    start = output.rfind("\\boxed{")
    if start < 0:
        return None
    depth, begin = 0, start + len("\\boxed")
    for index in range(begin, len(output)):
        depth += {"{": 1, "}": -1}.get(output[index], 0)
        if depth == 0:
            return output[begin + 1 : index]
    return None
