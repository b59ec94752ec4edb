"""How the prompts were made: chat template, doubled BOS, and the thinking switch."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from specpilot_cli.diagnose.evidence import Evidence
from specpilot_cli.diagnose.facts import TargetFacts, TokenizerFacts
from specpilot_cli.diagnose.outcome import Outcome, clear, not_checked
from specpilot_cli.diagnose.rates import certainly_above, combine
from specpilot_cli.units import format_percent

_OPEN, _CLOSE = "<think>", "</think>"
_MIXED = 0.1
_KEPT = 0.75
_NO_TARGET = "give the target's folder with --target"

Bool = npt.NDArray[np.bool_]


def chat_template(evidence: Evidence, target: TargetFacts | None) -> Outcome:
    """Do the prompts carry the tokens that the target's chat template writes?"""
    code, title = "chat-template", "Prompts carry the chat template's tokens"
    tokenizer = None if target is None else target.tokenizer
    if tokenizer is None:
        return not_checked(code, title, _no_tokenizer(target))
    recording = evidence.recording
    prompts = [recording.prompt(r) for r in range(recording.n_requests)]
    doubled = _doubled_bos(prompts, tokenizer)
    if doubled:
        return Outcome(
            code, "found", "Prompts begin with two BOS tokens",
            f"{doubled} of {len(prompts)} prompts do",
            numbers={"doubled_bos_requests": float(doubled)},
            next_steps=(
                "the template writes BOS and the tokenizer adds another: encode templated text "
                "with add_special_tokens=False",
            ),
        )  # fmt: skip
    if tokenizer.template is None:
        return clear(code, title, "this target has no chat template")
    ids = sorted(tokenizer.template_ids)
    if not ids:
        return not_checked(code, title, "the chat template writes no special token of its own")
    with_it = sum(bool(np.isin(prompt, ids).any()) for prompt in prompts)
    share = with_it / max(1, len(prompts))
    detail = f"{with_it} of {len(prompts)} prompts hold a special token of the template"
    if with_it == len(prompts):
        return clear(code, title, detail, templated_ratio=share)
    return Outcome(
        code, "found",
        "Prompts lack the chat template" if with_it == 0 else "Some prompts lack the template",
        detail, kind="caution", numbers={"templated_ratio": share},
        next_steps=(
            "drafters are trained on templated chats: send messages to /v1/chat/completions, or "
            "apply the template before /generate",
            "if raw text is what this deployment serves, compare only with other raw text",
        ),
    )  # fmt: skip


def _no_tokenizer(target: TargetFacts | None) -> str:
    return _NO_TARGET if target is None else f"no tokenizer.json in {target.path}"


def _doubled_bos(prompts: list[npt.NDArray[np.int32]], tokenizer: TokenizerFacts) -> int:
    bos = tokenizer.added.get(tokenizer.bos or "")
    if bos is None:
        return 0
    return sum(len(p) > 1 and int(p[0]) == bos and int(p[1]) == bos for p in prompts)


def thinking(evidence: Evidence, target: TargetFacts | None) -> Outcome:
    """Which requests think, and does the drafter follow both inside and outside?"""
    code, title = "thinking", "Thinking is the same for all requests, and drafts follow it"
    tokenizer = None if target is None else target.tokenizer
    if tokenizer is None:
        return not_checked(code, title, _no_tokenizer(target))
    if not {_OPEN, _CLOSE} <= tokenizer.added.keys():
        return clear(code, title, "this target has no thinking tokens")
    marks = (tokenizer.added[_OPEN], tokenizer.added[_CLOSE])
    recording = evidence.recording
    inside = [
        thoughts(recording.prompt(r), recording.output(r), *marks)
        for r in range(recording.n_requests)
    ]
    share = float(np.mean([mask.any() for mask in inside]))
    numbers = {"thinking_requests_ratio": share}
    detail = f"{format_percent(share, digits=0)} of the requests think"
    if _MIXED <= share <= 1 - _MIXED:
        return Outcome(
            code, "found", "Some requests think and some do not", detail, kind="caution",
            numbers=numbers,
            next_steps=(
                "set the switch once for all requests (enable_thinking of the chat template), and "
                "quote τ for one setting",
            ),
        )  # fmt: skip
    return _contrast(evidence, np.concatenate(inside), code, title, detail, numbers)


def _contrast(
    evidence: Evidence, mask: Bool, code: str, title: str, detail: str, numbers: dict[str, float]
) -> Outcome:
    at = evidence.recording.output_offsets[evidence.anchors.request] + evidence.output_position
    now = mask[at]
    within = evidence.rate(evidence.score, evidence.scored & now)
    without = evidence.rate(evidence.score, evidence.scored & ~now)
    if not (within.enough and without.enough):
        return clear(code, title, detail, **numbers)
    both = {**numbers, "inside_ratio": within.value, "outside_ratio": without.value}
    text = (
        f"{detail}; of the first drafts, {format_percent(within.value)} are accepted inside "
        f"thoughts and {format_percent(without.value)} outside"
    )
    low, high = sorted((within, without), key=lambda side: side.value)
    if not certainly_above(combine((_KEPT, high), (-1.0, low)), 0.0):
        return clear(code, title, text, **both)
    where = "inside" if low is within else "outside"
    return Outcome(
        code, "found", f"Drafts fail {where} thoughts", text, kind="caution", numbers=both,
        next_steps=(
            f"the drafter was probably trained with little text {where} thoughts: ask its card "
            "which setting of the thinking switch it expects",
            "quote τ with the setting that the deployment serves",
        ),
    )  # fmt: skip


def thoughts(
    prompt: npt.NDArray[np.int32], output: npt.NDArray[np.int32], opening: int, closing: int
) -> Bool:
    """Output tokens inside a thought, [n] bool; the closing mark is still inside.

    A prompt whose last mark opens a thought starts the output inside it.
    """
    marks = prompt[np.isin(prompt, (opening, closing))]
    now = bool(marks.size and marks[-1] == opening)
    mask = np.zeros(len(output), dtype=np.bool_)
    for index, token in enumerate(output.tolist()):
        if token == opening:
            now = True
        mask[index] = now
        if token == closing:
            now = False
    return mask
