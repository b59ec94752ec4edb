"""What single mechanisms would change about a profiled step: projections with their arithmetic.

Nothing here is a measurement. Each lever takes this step's own times, changes what the mechanism
changes, and says which numbers are borrowed from the paper (SpecPilot). A range goes from a
cautious to a favourable assumption. Whether it pays is for `replay` and `paired-bench` to show.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from specpilot_cli.ceiling.factors import Ceiling
from specpilot_cli.ceiling.speedup import SpeedupPoint, TauPoint, best_budget, step_time
from specpilot_cli.schema.step_profile import KernelClassName, StepProfile, StepTimeCurve

W12_BITS, BF16_BITS = 12.02, 16  # §4.1: 12.01-12.02 bits on eight dense models
W12_SLOWEST = 1.17  # §6.3: the least gain over cuBLAS at 32 rows, any projection
_W12_CLASSES: tuple[KernelClassName, ...] = ("target_gemm", "head")
TREE_NODES = 32
# §6.4, 8 positions: the stock chain, and a best-first tree of 32 nodes.
PAPER_CHAIN_TAU, PAPER_TREE_TAU = 4.25, 5.38
_PAPER_BLOCK = 8
# Appendix C: tokens per exact pass with one and two levels; times of one two-level cycle in ms.
ONE_LEVEL_TAU, TWO_LEVEL_TAU = 6.16, 11.67
PAPER_Q_MS, PAPER_EXACT_MS, PAPER_GLUE_MS = 11.5, 14.9, 1.6
_HANDOFFS = 3  # draft, Q pass, draft, exact pass: the glue lies between them
_TARGET_SPANS = ("VERIFY", "TARGET_VERIFY")
# §4.1: the LM head in BF16 and certified, in µs: a gain on H100, a loss on RTX PRO 6000.
HEAD_H100_US, HEAD_RTX_US = (878, 482), (1750, 2598)


@dataclass(frozen=True, slots=True)
class Lever:
    """One mechanism: speedups over the step as it is, from cautious to favourable.

    `low` and `high` are None where nothing can be said, and `arithmetic` says why.
    """

    name: str
    low: float | None
    high: float | None
    arithmetic: str
    assumes: str

    @property
    def known(self) -> bool:
        """True if there is a number."""
        return self.high is not None


def find_levers(
    profile: StepProfile,
    ceiling: Ceiling,
    *,
    tau: float | None,
    curve: StepTimeCurve | None,
    trees: Sequence[TauPoint],
    speedups: Sequence[SpeedupPoint] = (),
    now: SpeedupPoint | None = None,
) -> tuple[Lever, ...]:
    """Levers of `profile`, the largest favourable gain first, those without a number last.

    `tau` is tokens per step now, `trees` best-first trees of a replay of this deployment,
    `speedups` these trees and `now` the profile's own policy under the step times of `curve`.
    """
    found = [
        _w12(profile, ceiling),
        _tree(profile, ceiling, tau, curve, trees),
        _budget(profile, speedups, now),
        _recurrent(profile, ceiling),
        _certified_head(profile, ceiling),
        _two_level(profile, ceiling),
    ]
    return tuple(sorted(found, key=lambda lever: -(lever.high or 0.0)))


def w12_saving_s(ceiling: Ceiling) -> float:
    """Seconds a step that reading 12.02 of 16 bits saves at the rate of bytes reached now.

    A class never falls below the time of its arithmetic.
    """
    saved = 0.0
    for item in ceiling.classes:
        if item.name in _W12_CLASSES and item.bound != "measured":
            least = max(item.measured_s * W12_BITS / BF16_BITS, item.flop_s or 0.0)
            saved += max(0.0, item.measured_s - least)
    return saved


def _w12(profile: StepProfile, ceiling: Ceiling) -> Lever:
    name = "W12"
    assumes = (
        f"the linears and the head are read at the rate of bytes reached now (favourable), or "
        f"{W12_SLOWEST:g}× faster than now, the least the paper saw at 32 rows (§6.3)"
    )
    if profile.weights == "w12":
        return Lever(name, None, None, "the target's weights are W12 already", assumes)
    before = ceiling.t_step_s
    read = sum(c.measured_s for c in ceiling.classes if c.name in _W12_CLASSES)
    best = w12_saving_s(ceiling)
    if best == 0:
        return Lever(name, None, None, "no class of weights is bound by bytes here", assumes)
    least = min(best, read * (1 - 1 / W12_SLOWEST))
    return Lever(
        name,
        before / (before - least),
        before / (before - best),
        f"weights take {_ms(read)} of {_ms(before)}; {W12_BITS:g} of {BF16_BITS} bits save "
        f"{_ms(best)} → {_ms(before - best)}, or {_ms(least)} → {_ms(before - least)}",
        assumes,
    )


def _tree(
    profile: StepProfile,
    ceiling: Ceiling,
    tau: float | None,
    curve: StepTimeCurve | None,
    trees: Sequence[TauPoint],
) -> Lever:
    name, nodes = f"tree of {TREE_NODES} nodes", TREE_NODES
    assumes = "free rows (favourable); rows at the step times' slope, which holds stock's snapshots"
    if profile.mode == "ar":
        return Lever(name, None, None, "plain decoding drafts nothing to verify", assumes)
    if profile.mode == "tree" and profile.nodes >= nodes:
        return Lever(name, None, None, f"verifies {profile.nodes} nodes already", assumes)
    own = next((point.tau for point in trees if point.n_nodes == nodes), None)
    if own is not None and tau is not None:
        ratio, source = own / tau, f"τ {tau:.2f} → {own:.2f} in replay"
    elif profile.mode == "chain" and profile.draft_block == _PAPER_BLOCK:
        ratio = PAPER_TREE_TAU / PAPER_CHAIN_TAU
        source = f"τ {PAPER_CHAIN_TAU:g} → {PAPER_TREE_TAU:g} on the paper's lattices (§6.4)"
    else:
        why = "its tokens are not known: give --lattices with 32 among --nodes"
        return Lever(name, None, None, why, assumes)
    before = ceiling.t_step_s
    if curve is None:
        text = f"{source}; the added rows' time is not known: {_ratio(ratio)} if they are free"
        return Lever(name, None, ratio, text, assumes)
    there, here = step_time(curve, nodes + 1), step_time(curve, profile.rows)
    after = before + max(0.0, there.seconds - here.seconds)
    return Lever(
        name,
        ratio * before / after,
        ratio,
        f"{source}; {profile.rows} → {nodes + 1} rows: {_ms(before)} → {_ms(after)} "
        f"({there.basis}) gives {_ratio(ratio * before / after)}, free rows {_ratio(ratio)}",
        assumes,
    )


def _budget(
    profile: StepProfile, speedups: Sequence[SpeedupPoint], now: SpeedupPoint | None
) -> Lever:
    name = "node budget"
    assumes = (
        "best-first trees of this recording at the step times given; every request has its own "
        "budget (`specpilot simulate batch` shares one)"
    )
    if profile.mode == "ar":
        return Lever(name, None, None, "plain decoding drafts nothing to verify", assumes)
    if now is None or not speedups:
        why = "τ / c is not known: give --lattices and --step-times"
        return Lever(name, None, None, why, assumes)
    best = best_budget(speedups)
    gain = best.speedup / now.speedup
    return Lever(
        name,
        gain,
        gain,
        f"{now.n_nodes} → {best.n_nodes} nodes: τ {now.tau:.2f} → {best.tau:.2f}, step "
        f"{_ms(now.step_s)} ({now.basis}) → {_ms(best.step_s)} ({best.basis}); "
        f"S {now.speedup:.3f} → {best.speedup:.3f}",
        assumes,
    )


def _recurrent(profile: StepProfile, ceiling: Ceiling) -> Lever:
    name = "WY verify of recurrent layers"
    assumes = (
        "root paths are solved together from the committed state, one state read to verify, one "
        "read and write to commit, and nothing above the floor remains (favourable)"
    )
    found = next((item for item in ceiling.classes if item.name == "recurrent"), None)
    if profile.mode == "ar":
        return Lever(name, None, None, "plain decoding verifies one row: no tree to walk", assumes)
    if found is None:
        return Lever(name, None, None, "the step has no recurrent layers", assumes)
    if found.bound == "measured" or found.slack_s <= 0:
        return Lever(name, None, None, "nothing of them is known to lie above a floor", assumes)
    before, after = ceiling.t_step_s, ceiling.t_step_s - found.slack_s
    return Lever(
        name,
        None,
        before / after,
        f"recurrent layers take {_ms(found.measured_s)}, their floor is {_ms(found.floor_s)}: "
        f"{_ms(before)} → {_ms(after)}",
        assumes,
    )


def _certified_head(profile: StepProfile, ceiling: Ceiling) -> Lever:
    name = "certified head"
    (gain_from, gain_to), (loss_from, loss_to) = HEAD_H100_US, HEAD_RTX_US
    assumes = (
        f"an INT8 pass with an error bound takes {gain_to}/{gain_from} of the BF16 head's time as "
        f"on H100 (favourable), or {loss_to}/{loss_from} as on RTX PRO 6000 (§4.1); in place of "
        "W12 for the head, not beside it"
    )
    found = next((item for item in ceiling.classes if item.name == "head"), None)
    if found is None or found.bound != "bytes":
        return Lever(name, None, None, "no head bound by bytes in this profile", assumes)
    if profile.weights == "w12":
        return Lever(name, None, None, "the head of a W12 step need not be BF16", assumes)
    before, head = ceiling.t_step_s, found.measured_s
    # A second pass never beats its own arithmetic.
    best = max(head * gain_to / gain_from, found.flop_s or 0.0)
    worst = head * loss_to / loss_from
    low, high = before / (before - head + worst), before / (before - head + best)
    return Lever(
        name,
        low,
        max(low, high),
        f"the head takes {_ms(head)} of {_ms(before)}; {_ms(best)} → {_ms(before - head + best)}, "
        f"or {_ms(worst)} → {_ms(before - head + worst)}",
        assumes,
    )


def _two_level(profile: StepProfile, ceiling: Ceiling) -> Lever:
    plain = profile.weights == "plain"
    name = "TLV on top of W12" if plain else "TLV"
    assumes = (
        f"tokens per exact pass grow {ONE_LEVEL_TAU:g} → {TWO_LEVEL_TAU:g} as in the paper "
        f"(Appendix C), a Q pass takes {PAPER_Q_MS:g}/{PAPER_EXACT_MS:g} of an exact one, each of "
        f"two more hand-offs {PAPER_GLUE_MS / _HANDOFFS:.2f} ms"
    )
    verify = next((s for s in map(profile.span_s, _TARGET_SPANS) if s is not None), None)
    draft = profile.span_s("DRAFT")
    if verify is None or draft is None:
        return Lever(name, None, None, "the step has no drafting and no verify span", assumes)
    saved = w12_saving_s(ceiling) if plain else 0.0
    step, exact = ceiling.t_step_s - saved, verify - saved
    q_pass = exact * PAPER_Q_MS / PAPER_EXACT_MS
    glue = 1e-3 * PAPER_GLUE_MS * (_HANDOFFS - 1) / _HANDOFFS
    cycle = step + draft + q_pass + glue
    ratio = TWO_LEVEL_TAU / ONE_LEVEL_TAU
    gain = ratio * step / cycle
    after = " over the W12 step" if plain else ""
    return Lever(
        name,
        gain,
        gain,
        f"cycle {_ms(step)} + draft {_ms(draft)} + Q pass {_ms(q_pass)} + hand-offs {_ms(glue)} = "
        f"{_ms(cycle)}; {TWO_LEVEL_TAU:g}/{ONE_LEVEL_TAU:g} · {_ms(step)}/{_ms(cycle)} = "
        f"{_ratio(gain)}{after}",
        assumes,
    )


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.2f} ms"


def _ratio(value: float) -> str:
    return f"{value:.3f}×"
