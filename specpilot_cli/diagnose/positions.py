"""Signatures in acceptance by position: shifts, collapses, a selector that chooses badly."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from specpilot_cli.diagnose.evidence import SCORED_DRAFTS, Evidence
from specpilot_cli.diagnose.outcome import Outcome, clear, not_checked
from specpilot_cli.diagnose.rates import Counts, certainly_above, combine
from specpilot_cli.replay.facts import stock_walk
from specpilot_cli.units import format_percent

Bool = npt.NDArray[np.bool_]

_SHIFTS = (-2, -1, 1, 2)
_SHIFT_GAIN = 0.10
_COLLAPSE = 0.5  # of the position before: healthy drafters lose a few percent per position
_LEAST_FIRST = 0.15  # below, nothing is left that could collapse
_SELECTOR_LOSS = 0.05
_LEAST_RECALL = 0.80  # of the first position; a drafter that fits its target has 0.95 and more
_CHANCE_RECALL = 0.15
_SURE_EXCESS = 0.10


def position_shift(evidence: Evidence) -> Outcome:
    """Do the drafts fit the output better some tokens earlier or later than they are read?"""
    code, title = "position-shift", "Drafts are read at the positions they predict"
    here = _agreement(evidence, 0)
    if not here.enough:
        return not_checked(code, title, "too few steps")
    best = max(_SHIFTS, key=lambda shift: _agreement(evidence, shift).value)
    there = _agreement(evidence, best)
    numbers = {"agreement_ratio": here.value, "shifted_agreement_ratio": there.value}
    gain = combine((1.0, there), (-1.0, here))
    if not certainly_above(gain, _SHIFT_GAIN):
        detail = (
            f"drafts agree with the output in {format_percent(here.value)} of cases, "
            f"and at best in {format_percent(there.value)} if read {_words(best)}"
        )
        return clear(code, title, detail, **numbers)
    semantics = (
        "the drafter's anchor row already predicts a token (DSpark: B inputs, B drafts), but its "
        "rows are read as if it did not (DFlash: B inputs, B - 1 drafts)"
        if best > 0
        else "the drafter's anchor row predicts nothing (DFlash: B inputs, B - 1 drafts), but its "
        "rows are read as if it did (DSpark: B inputs, B drafts)"
    )
    return Outcome(
        code, "found", f"Drafts are read {abs(best)} position{'s' * (abs(best) > 1)} off",
        f"drafts agree with the output in {format_percent(here.value)} of cases, but in "
        f"{format_percent(there.value)} if they are read {_words(best)}",
        numbers={**numbers, "shift_positions": float(best)},
        next_steps=(
            f"check the block semantics of the engine's drafter class: {semantics}",
            "check that the anchor is the last committed token, and its position is the one after "
            "the cached tokens",
        ),
    )  # fmt: skip


def _words(shift: int) -> str:
    return f"{abs(shift)} token{'s' * (abs(shift) > 1)} {'later' if shift > 0 else 'earlier'}"


def _agreement(evidence: Evidence, shift: int) -> Counts:
    """How often early drafts equal the output token `shift` after the one they stand for."""
    recording, anchors = evidence.recording, evidence.anchors
    first = 1 if evidence.n_positions > 1 else 0
    last = min(SCORED_DRAFTS, evidence.n_positions - 1)
    wanted = np.arange(first, last + 1)
    ahead = evidence.output_position[:, None] + 1 + wanted + shift
    lengths = np.diff(recording.output_offsets)[anchors.request][:, None]
    valid = (ahead >= 0) & (ahead < lengths) & evidence.known[:, wanted]
    index = recording.output_offsets[anchors.request][:, None] + np.where(valid, ahead, 0)
    same = (recording.output_ids[index] == evidence.choice[:, wanted]) & valid
    share = same.sum(axis=1) / np.maximum(valid.sum(axis=1), 1)
    whole: Bool = np.all(valid, axis=1)
    return evidence.rate(share, whole)


def collapse(evidence: Evidence, trained_block: int | None) -> Outcome:
    """Does acceptance fall off a cliff between two positions?"""
    code, title = "collapse", "Acceptance does not collapse between positions"
    rates = [evidence.at(p, evidence.hit) for p in range(evidence.n_positions)]
    usable = [rate for rate in rates if rate.enough]
    if len(rates) < 2 or not rates[0].enough or rates[0].value < _LEAST_FIRST:
        return not_checked(code, title, "too few steps accept their first draft")
    for position in range(1, len(rates)):
        earlier, now = rates[position - 1], rates[position]
        if not (earlier.enough and now.enough) or earlier.value < _LEAST_FIRST:
            break
        if certainly_above(combine((_COLLAPSE, earlier), (-1.0, now)), 0.0):
            return _collapsed(evidence, code, position, earlier, now, trained_block)
    values = ", ".join(format_percent(rate.value, digits=0) for rate in usable)
    return clear(code, title, f"right drafts after right ones, by position: {values}")


def _collapsed(
    evidence: Evidence, code: str, position: int, earlier: Counts, now: Counts, block: int | None
) -> Outcome:
    inside = evidence.at(position, evidence.in_lattice)
    before = evidence.at(position - 1, evidence.in_lattice)
    offered = inside.value >= 0.8 * before.value
    numbers = {
        "position": float(position),
        "accepted_before_ratio": earlier.value,
        "accepted_ratio": now.value,
        "in_lattice_ratio": inside.value,
    }
    steps = [
        "the true token is still among the candidates, so the choice is at fault: is the "
        "predecessor that selector or Markov head get the draft just before, by token id?"
        if offered
        else "the true token is no candidate either, so drafting is at fault: mask token id, "
        "attention inside the block (DFlash blocks are not causal), position ids of the mask rows",
        "re-record with the reference implementation of the drafter and compare: "
        "`specpilot diagnose NEW --against THIS`",
    ]
    if position > 1:
        trained = (
            f"the drafter was trained with blocks of {block}"
            if block is not None
            else "which block was the drafter trained with?"
        )
        steps.insert(0, f"draft no more than the trained block: {trained}")
    return Outcome(
        code, "found", f"Acceptance collapses after position {position - 1}",
        f"{format_percent(earlier.value)} of drafts at position {position - 1} are right, but only "
        f"{format_percent(now.value)} at position {position} after right ones; the true token is a "
        f"candidate there in {format_percent(inside.value)} of cases",
        numbers=numbers, next_steps=tuple(steps),
    )  # fmt: skip


def selector(evidence: Evidence) -> Outcome:
    """Would the candidates' own probabilities choose better than the scores that choose?"""
    code, title = "selector", "The chain chooses at least as well as the candidates' own scores"
    where = evidence.before & evidence.known & evidence.in_lattice
    where[:, 0] = False
    if evidence.n_positions < 2:
        return not_checked(code, title, "one drafted position has no predecessor")
    recording, step = evidence.recording, evidence.anchors.step
    best = recording.unary[step].argmax(axis=-1)
    plain = np.take_along_axis(recording.candidate_ids[step], best[..., None], axis=-1)[..., 0]
    chosen = _pooled(evidence, evidence.hit, where)
    alone = _pooled(evidence, plain == evidence.anchors.truth, where)
    if not chosen.enough:
        return not_checked(code, title, "too few steps accept their first draft")
    numbers = {"chosen_ratio": chosen.value, "unary_ratio": alone.value}
    evidence_text = (
        f"where the true token is offered after right drafts, the chain takes it in "
        f"{format_percent(chosen.value)} of cases, the candidates' own best in "
        f"{format_percent(alone.value)}"
    )
    if not certainly_above(combine((1.0, alone), (-1.0, chosen)), _SELECTOR_LOSS):
        return clear(code, title, evidence_text, **numbers)
    return Outcome(
        code, "found", "The selector chooses worse than no selector", evidence_text,
        numbers=numbers,
        next_steps=(
            "check the selector's inputs: predecessor and successor codebooks not swapped, rows "
            "gathered by token id, scores added to the logits before the argmax",
            "check that its weights were loaded (random codebooks look like this)",
        ),
    )  # fmt: skip


def _pooled(evidence: Evidence, values: Bool, where: Bool) -> Counts:
    """One rate over all positions at once; anchors weigh by how many positions they reach."""
    anchor, position = np.nonzero(where)
    request = evidence.anchors.request[anchor]
    n_requests = evidence.recording.n_requests
    right = values[anchor, position].astype(np.float64)
    return Counts(
        np.bincount(request, weights=right, minlength=n_requests).astype(np.float64),
        np.bincount(request, minlength=n_requests).astype(np.float64),
    )


def recall(evidence: Evidence, within: Bool | None = None) -> Outcome:
    """Is the target's token even among the first position's candidates (of anchors `within`)?"""
    code, title = "recall", "The target's token is nearly always among the candidates"
    first = evidence.at(0, evidence.in_lattice, within)
    if not first.enough:
        return not_checked(code, title, "too few steps")
    detail = (
        f"it is among the {evidence.recording.n_candidates} candidates of the first position in "
        f"{format_percent(first.value)} of steps"
    )
    if not certainly_above(combine((-1.0, first)), -_LEAST_RECALL):
        return clear(code, title, detail, first_recall_ratio=first.value)
    nothing = first.value < _CHANCE_RECALL
    steps = (
        "is it this target's drafter, with the same tokenizer and vocabulary?",
        "are the captured layers those of `target_layer_ids` (engines count from before or after "
        "a layer), in that order, and is the mask token id right?",
    )
    return Outcome(
        code, "found",
        "Drafter and target have nothing in common" if nothing
        else "The drafter often does not offer the target's token",
        detail, numbers={"first_recall_ratio": first.value},
        next_steps=steps if nothing else (
            *steps[1:],
            "is the target the one the drafter was trained on, in revision and precision?",
            "does the text fit the drafter: chat template, thinking, language, domain?",
        ),
    )  # fmt: skip


def confidence(evidence: Evidence, within: Bool | None = None) -> Outcome:
    """Is the drafter sure of first drafts that are wrong (at anchors `within`)?"""
    code, title = "confidence", "The drafter is as often right as it thinks"
    right, own = (evidence.at(0, values, within) for values in (evidence.hit, evidence.own))
    if not right.enough:
        return not_checked(code, title, "too few steps")
    numbers = {"accepted_ratio": right.value, "own_probability_ratio": own.value}
    detail = (
        f"it gives its first draft {format_percent(own.value)} on average, and "
        f"{format_percent(right.value)} are right"
    )
    if not certainly_above(combine((1.0, own), (-1.0, right)), _SURE_EXCESS):
        return clear(code, title, detail, **numbers)
    return Outcome(
        code, "found", "The drafter is sure, and wrong", detail, numbers=numbers,
        next_steps=(
            "hard text makes a drafter unsure; being sure and wrong means that it sees another "
            "target than it was trained on: quantised or fine-tuned weights, another revision, "
            "another chat template or system prompt, wrong captured layers",
            "record the same prompts with the target it was trained on and compare: "
            "`specpilot diagnose THIS --against THAT`",
        ),
    )  # fmt: skip


def hard_text(evidence: Evidence) -> Outcome:
    """Is acceptance low while the drafter knows it? Then nothing is broken."""
    code, title = "hard-text", "The first draft is mostly right"
    right, own = (evidence.at(0, values) for values in (evidence.hit, evidence.own))
    if not right.enough:
        return not_checked(code, title, "too few steps")
    detail = f"{format_percent(right.value)} of first drafts are right"
    low = right.value < 0.6 and abs(own.value - right.value) < 0.1
    if not low:
        return clear(code, title, detail, accepted_ratio=right.value)
    return Outcome(
        code, "found", "The text is hard for this drafter, and it knows", kind="note",
        detail=f"{detail}, and it expected {format_percent(own.value)}",
        numbers={"accepted_ratio": right.value, "own_probability_ratio": own.value},
        next_steps=(
            "nothing looks broken: a tree spends its nodes where the drafter is unsure "
            "(`specpilot replay`), or train the drafter on such text",
        ),
    )  # fmt: skip


def chain_walk(evidence: Evidence) -> Outcome:
    """Is the recorded chain the walk over the recorded scores?

    DSpark chooses over the whole vocabulary, so only its chains that stay in the lattice can say.
    """
    code, title = "chain-walk", "The recorded chain follows the recorded scores"
    inside, away = stock_walk(evidence.anchors)
    offered = np.asarray(inside.all(axis=1), dtype=np.bool_)
    dspark = evidence.recording.metadata.drafter_kind == "dspark"
    off = evidence.rate(away, offered if dspark else np.ones_like(offered))
    if off.n_trials == 0:
        return not_checked(code, title, "no chain stays among the candidates")
    outside = 1.0 - float(offered.mean())
    numbers = {"off_walk_ratio": off.value, "outside_lattice_ratio": outside}
    detail = f"it leaves the best walk in {format_percent(off.value)} of steps"
    if not (off.enough and certainly_above(combine((1.0, off)), 0.01)):
        return clear(code, title, detail, **numbers)
    return Outcome(
        code, "found", "Stock's chain is not what its own scores choose",
        f"{detail}, and takes a token that is no candidate in {format_percent(outside)}",
        kind="caution", numbers=numbers,
        next_steps=(
            "a drafter that chooses over the whole vocabulary leaves the candidates now and then: "
            "its recording should say so (`--drafter-kind dspark`)",
            "otherwise the engine's walk and its scores disagree: compare both with the drafter's "
            "reference implementation",
        ),
    )  # fmt: skip
