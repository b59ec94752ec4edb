"""Which replays count, and by what they are divided; the clock itself needs a GPU."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from specpilot_kernels import timing  # noqa: E402


def test_works_take_turns_and_a_time_is_one_piece_s(monkeypatch: pytest.MonkeyPatch) -> None:
    replays: list[int] = []

    def replayed(pieces: int) -> float:
        replays.append(pieces)
        return float(len(replays))

    monkeypatch.setattr(timing, "captured", len)
    monkeypatch.setattr(timing, "replayed", replayed)
    works = {"one": [print], "two": [print, print]}
    found = timing.samples(works, 3, warm_up=1)
    assert replays == [1, 2] * 4
    assert found == {"one": [3.0, 5.0, 7.0], "two": [4.0 / 2, 6.0 / 2, 8.0 / 2]}
    replays.clear()
    assert timing.in_turns(works, 3, warm_up=1) == {"one": 5.0, "two": 3.0}
