"""Two-level verification: the paper's arithmetic, and replay against a plain walk of the cycle."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from specpilot_cli.errors import InputError
from specpilot_cli.replay.run import replay
from specpilot_cli.schema.lattice import LatticeRecording
from specpilot_cli.simulate.tlv import CycleTimes, two_level
from specpilot_kernels.trees import accepted_nodes, best_first

Recorded = Callable[..., LatticeRecording]
Flags = list[np.ndarray]

# Appendix C of the paper: one cycle of the final H100 system, in seconds.
PAPER = CycleTimes(
    draft_s=1.05e-3, q_pass_s=11.5e-3, exact_pass_s=14.9e-3,
    one_level_glue_s=0.55e-3, two_level_glue_s=1.6e-3,
)  # fmt: skip


def flags_of(recording: LatticeRecording, rate: float, seed: int = 0) -> Flags:
    rng = np.random.default_rng(seed)
    return [rng.random(len(recording.output(r))) < rate for r in range(recording.n_requests)]


def by_hand(recording: LatticeRecording, flags: Flags, nodes: int) -> int:
    """Cycles, walked with single trees: draft, Q pass, second draft, exact pass (paper §4.3)."""
    cycles, step = 0, 0
    for request in range(recording.n_requests):
        output = recording.output(request)
        position = 0
        while position < len(output) - 1:
            cycles += 1

            def accepted(at: int, budget: int, step: int = step, output=output) -> int:
                tree = best_first(
                    recording.candidate_ids[step + at], recording.edge[step + at], budget
                )
                return len(accepted_nodes(tree, output[at + 1 :]))

            chain = accepted(position, nodes) + 1
            ahead = flags[request][position + 1 : position + 1 + chain]
            if not ahead.all():
                position += int(np.argmin(ahead)) + 1
                continue
            position += chain
            if position < len(output) - 1:
                position += accepted(position, max(0, nodes - chain)) + 1
        step += len(output) - 1
    return cycles


@pytest.mark.parametrize("rate", [1.0, 0.97, 0.6, 0.0])
@pytest.mark.parametrize("nodes", [6, 32])
def test_cycles_are_those_of_a_plain_walk(rate: float, nodes: int, recorded: Recorded):
    recording = recorded(n_positions=7)
    flags = flags_of(recording, rate)
    found = two_level(recording, flags, nodes=nodes)
    tokens = recording.output_ids.size - recording.n_requests
    assert found.tau_two.value == pytest.approx(tokens / by_hand(recording, flags, nodes))
    one = replay(recording, ["best-first"], nodes=[nodes]).row("best-first", nodes)
    assert found.tau_one.value == pytest.approx(one.tau.value)


def test_two_levels_never_reach_twice_the_tokens_of_one(recorded: Recorded):
    recording = recorded(n_positions=7)
    perfect = two_level(recording, flags_of(recording, 1.0), nodes=32)
    assert 1.5 < perfect.ratio.value < 2.0
    assert perfect.first_wrong == 0
    useless = two_level(recording, flags_of(recording, 0.0), nodes=32)
    assert useless.tau_two.value == 1.0  # only the exact pass's own token
    assert useless.first_wrong == 1.0


def test_where_disagreements_fall_matters_so_a_rate_is_not_enough(recorded: Recorded):
    recording = recorded(n_positions=7, n_requests=24, tokens=120)
    flags = flags_of(recording, 1.0)
    for request in flags[::2]:
        request[10:22] = False
    found = two_level(recording, flags, nodes=32)
    assert found.agreement == pytest.approx(0.95, abs=0.01)
    # in a run of them every cycle commits one token; scattered, each spoils one cycle
    assert found.tau_two.value < 0.95 * found.tau_shuffled


def test_the_papers_cycle_and_break_even():
    """App. C: a cycle of about 30 ms, 11.67 tokens against 6.16 per exact pass."""
    assert pytest.approx(30.1e-3, abs=0.05e-3) == PAPER.cycle_s
    assert pytest.approx(16.5e-3, abs=0.01e-3) == PAPER.one_level_s
    ratio = 11.67 / 6.16
    assert PAPER.break_even_q_pass_s(ratio) == pytest.approx(12.7e-3, abs=0.1e-3)
    assert PAPER.break_even_q_pass_s(ratio) > PAPER.q_pass_s
    speedup = ratio * PAPER.one_level_s / PAPER.cycle_s
    assert speedup == pytest.approx(1.038, abs=0.002)
    # at the break-even Q pass, both take the same time per token
    even = CycleTimes(
        PAPER.draft_s, PAPER.break_even_q_pass_s(ratio), PAPER.exact_pass_s,
        PAPER.one_level_glue_s, PAPER.two_level_glue_s,
    )  # fmt: skip
    assert ratio * even.one_level_s / even.cycle_s == pytest.approx(1.0)


def test_the_speedup_uses_this_recordings_ratio(recorded: Recorded):
    recording = recorded(n_positions=7)
    found = two_level(recording, flags_of(recording, 0.98), nodes=32, times=PAPER)
    expected = found.ratio.value * PAPER.one_level_s / PAPER.cycle_s
    assert found.speedup == pytest.approx(expected)
    assert found.break_even_q_pass_s == PAPER.break_even_q_pass_s(found.ratio.value)
    assert two_level(recording, flags_of(recording, 0.98), nodes=32).speedup is None


def test_flags_of_other_outputs_are_refused(recorded: Recorded):
    recording = recorded(n_positions=7)
    flags = flags_of(recording, 1.0)
    with pytest.raises(InputError, match="request `r3`"):
        two_level(recording, [*flags[:3], flags[3][:-1], *flags[4:]], nodes=8)
    with pytest.raises(InputError, match="do not fit"):
        two_level(recording, flags[:-1], nodes=8)
