"""Log-softmax by fixed operations: as accurate as a library's, and defined where that warns."""

from __future__ import annotations

import numpy as np
import pytest

from specpilot_kernels.trees import edge_log_probs


@pytest.mark.parametrize("scale", [1e-3, 1.0, 10.0, 100.0])
@pytest.mark.parametrize("candidates", [1, 2, 16, 100])
def test_within_a_unit_in_the_last_place_of_exact(scale: float, candidates: int) -> None:
    scores = np.random.default_rng(0).normal(size=(500, candidates)) * scale
    wide = scores.astype(np.longdouble)
    shifted = wide - wide.max(axis=-1, keepdims=True)
    exact = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    found = edge_log_probs(scores)
    unit = np.spacing(np.abs(exact).astype(np.float32)).astype(np.float64)
    error = np.abs(found - exact.astype(np.float64))
    # A score just below zero is the difference of numbers near one: float64 cannot do better.
    assert np.all(error <= 0.51 * unit + 1e-15)


def test_a_row_that_is_no_distribution_is_nan() -> None:
    rows = np.array([[0.0, np.nan], [np.nan, 0.0], [np.inf, 0.0], [-np.inf, -np.inf]])
    with np.errstate(all="raise"):
        assert np.isnan(edge_log_probs(rows)).all()
        assert edge_log_probs(np.array([[-np.inf, 3.0]])).tolist() == [[-np.inf, 0.0]]
        assert edge_log_probs(np.array([-1e308, 1e308])).tolist() == [-np.inf, 0.0]


@pytest.mark.parametrize("shape", [(0,), (3, 0)])
def test_rows_without_candidates_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="no candidates"):
        edge_log_probs(np.zeros(shape))


def test_a_calibration_of_another_size_is_refused() -> None:
    with pytest.raises(ValueError, match="calibration"):
        edge_log_probs(np.zeros((4, 5, 5)), np.ones((3, 2)))
