"""Stairs are found where they are, and nowhere else."""

from __future__ import annotations

import numpy as np
import pytest

from specpilot_cli.errors import InputError
from specpilot_cli.simulate.plateaus import RowSamples, find_plateaus


def stairs(
    seed: int, *, tile: int, noise: float, rise: float = 0.06, repeats: int = 15
) -> list[RowSamples]:
    """Times of 16 … 256 rows that rise by `rise` per tile; 2 % of them are outliers."""
    rng = np.random.default_rng(seed)
    found = []
    for rows in range(16, 257, 16):
        true = 1e-3 * (1 + rise * ((rows - 1) // tile))
        times = true * (1 + noise * rng.standard_normal(repeats))
        times[rng.random(repeats) < 0.02] *= 1.5
        found.append(RowSamples(rows, tuple(times.tolist())))
    return found


@pytest.mark.parametrize("tile", [32, 64, 128])
@pytest.mark.parametrize("noise", [0.001, 0.01])
def test_every_stair_is_found_and_no_other(tile: int, noise: float):
    wrong = 0
    for seed in range(40):
        ends = [p.last_rows for p in find_plateaus(stairs(seed, tile=tile, noise=noise))]
        wrong += ends != list(range(tile, 257, tile))
    assert wrong <= 1


def test_flat_times_are_one_plateau_even_when_noisy():
    alarms = 0
    for seed in range(100):
        samples = stairs(seed, tile=10**6, noise=0.02)
        alarms += len(find_plateaus(samples)) > 1
    assert alarms <= 2


def test_a_slow_ramp_opens_plateaus_that_never_exceed_the_tolerance():
    samples = [RowSamples(n, (1 + n / 1000,) * 5) for n in range(1, 101)]
    for plateau in find_plateaus(samples):
        first, last = 1 + plateau.first_rows / 1000, 1 + plateau.last_rows / 1000
        assert last / first <= 1.031


def test_the_next_measured_rows_bound_the_true_end():
    samples = [RowSamples(8, (1.0,) * 3), RowSamples(24, (1.0,) * 3), RowSamples(40, (2.0,) * 3)]
    first, second = find_plateaus(samples)
    assert (first.first_rows, first.last_rows, first.next_rows) == (8, 24, 40)
    assert (second.last_rows, second.next_rows, second.seconds) == (40, None, 2.0)


@pytest.mark.parametrize(
    ("samples", "match"),
    [
        ([], "ascending"),
        ([RowSamples(-8, (1.0,) * 3)], "ascending"),
        ([RowSamples(8, (1.0,) * 3), RowSamples(8, (1.0,) * 3)], "ascending"),
        ([RowSamples(8, (1.0, 1.0))], "measured 2 times"),
        ([RowSamples(8, (1.0, 0.0, 1.0))], "positive"),
        ([RowSamples(8, (1.0, float("nan"), 1.0))], "positive"),
    ],
)
def test_measurements_that_say_nothing_are_refused(samples: list[RowSamples], match: str):
    with pytest.raises(InputError, match=match):
        find_plateaus(samples)
