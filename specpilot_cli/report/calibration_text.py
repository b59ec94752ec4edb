"""The answer of `specpilot replay --calibrate` for a terminal."""

from __future__ import annotations

from specpilot_cli.replay.calibration import Calibration
from specpilot_cli.report.replay_text import interval
from specpilot_cli.report.tables import Column, print_line, print_table


def print_calibration(found: Calibration) -> None:
    """Predicted against realised τ before and after, then what was fitted."""
    titles = ("nodes", "τ", "expected", "calibrated τ", "expected", "calibrated ÷ recorded")
    print_table(
        [*(Column(title, "right") for title in titles), "95 % interval"],
        [
            [
                str(before.nodes),
                f"{before.tau.value:.3f}",
                _expected(before.expected_tau),
                f"{after.tau.value:.3f}",
                _expected(after.expected_tau),
                f"{(gain := found.gain(before.nodes or 0)).value:.3f}",
                interval(gain),
            ]
            for before, after in zip(found.before.rows, found.after.rows, strict=True)
        ],
        title=f"best-first on the half that was not fitted, {found.before.mode} replay",
    )
    print_table(
        [Column("position", "right"), Column("fitted recall", "right"),
         Column("of the judged half", "right")],
        [
            [str(position + 1), f"{fitted:.4f}", f"{judged:.4f}"]
            for position, (fitted, judged) in enumerate(
                zip(found.fit.recall, found.judged_recall, strict=True)
            )
        ],
        title="true path still among the candidates",
    )  # fmt: skip
    print_line(
        f"temperature {found.fit.temperature:.3f}, from {found.fit.n_positions} true candidates; "
        f"fitted on {int(found.fitted.sum())} requests, judged on {found.before.n_requests}"
    )
    print_line(
        f"expected τ is off by {found.error_before:.1%} as recorded, by {found.error_after:.1%} "
        "calibrated (mean over the budgets)"
    )


def _expected(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
