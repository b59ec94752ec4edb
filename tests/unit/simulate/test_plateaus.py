"""Stairs are found where they are, and nowhere else."""

from __future__ import annotations

import numpy as np
import pytest

from specpilot_cli.errors import InputError
from specpilot_cli.simulate.plateaus import RowSamples, find_plateaus, worth_trying


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
    """A stair that noise opens falls back to the level before, which then dominates it."""
    opened = alarms = 0
    for seed in range(100):
        found = find_plateaus(stairs(seed, tile=10**6, noise=0.02))
        opened += len(found) > 1
        alarms += worth_trying(found) != (256,)
    assert opened <= 5
    assert alarms <= 1


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


def switched(
    seed: int, *, noise: float, factor: float, at: int = 144, repeats: int = 15
) -> list[RowSamples]:
    """Stairs of 32 rows and 6 % each; from `at` rows on another kernel takes `factor` times that.

    2 % of the times are outliers.
    """
    rng = np.random.default_rng(seed)
    found = []
    for sample in stairs(seed, tile=32, noise=0.0, repeats=repeats):
        level = min(sample.seconds) * (factor if sample.rows >= at else 1.0)
        times = level * (1 + noise * rng.standard_normal(repeats))
        times[rng.random(repeats) < 0.02] *= 1.5
        found.append(RowSamples(sample.rows, tuple(times.tolist())))
    return found


@pytest.mark.parametrize("noise", [0.0005, 0.01])
def test_a_faster_kernel_opens_a_plateau_and_what_it_beats_is_dropped(noise: float):
    """At 144 rows the level of 1.24 falls to 0.7 × 1.24: all stairs below cost more than that."""
    wrong = 0
    for seed in range(40):
        found = find_plateaus(switched(seed, noise=noise, factor=0.7))
        ends = [plateau.last_rows for plateau in found]
        wrong += ends != [32, 64, 96, 128, 160, 192, 224, 256]
        wrong += worth_trying(found) != (160, 192, 224, 256)
    assert wrong <= 2


def test_a_fall_spares_the_stairs_that_are_still_cheaper():
    """0.9 × 1.24 lies above the first two stairs (1, 1.06) and below the next two (1.12, 1.18)."""
    found = find_plateaus(switched(3, noise=0.001, factor=0.9))
    assert worth_trying(found) == (32, 64, 160, 192, 224, 256)
    dropped = [item for item in found if item.dominated_by is not None]
    assert [(item.last_rows, item.dominated_by) for item in dropped] == [(96, 160), (128, 192)]


def test_a_slow_kernel_between_two_equal_ones_is_no_place_to_stop():
    levels = {16: 1.0, 32: 1.0, 48: 1.3, 64: 1.0, 80: 1.0, 96: 1.2}
    found = find_plateaus([RowSamples(n, (t, t * 1.001, t * 0.999)) for n, t in levels.items()])
    assert [item.last_rows for item in found] == [32, 48, 80, 96]
    assert worth_trying(found) == (80, 96)


def test_every_falling_stair_is_found_and_only_the_last_is_worth_trying():
    samples = [
        RowSamples(rows, tuple(1e-3 * (2 - 0.05 * ((rows - 1) // 64)) * x for x in (1, 1.002, 1)))
        for rows in range(16, 257, 16)
    ]
    found = find_plateaus(samples)
    assert [item.last_rows for item in found] == [64, 128, 192, 256]
    assert worth_trying(found) == (256,)


def test_noise_that_dips_opens_nothing():
    """A fall within the scatter is none: 3 % down, where repeats scatter by 5 %."""
    rng = np.random.default_rng(5)
    samples = [
        RowSamples(rows, tuple((level * (1 + 0.05 * rng.standard_normal(15))).tolist()))
        for rows, level in ((16, 1.0), (32, 1.0), (48, 0.97), (64, 1.0))
    ]
    assert len(find_plateaus(samples)) == 1
