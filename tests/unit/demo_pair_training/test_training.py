"""Both stages: interrupted runs end as uninterrupted ones, labels and figures are right."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import train_demo_pair
from demo_pair import loop, shapes, train_drafter, train_target
from demo_pair.loop import Clock
from demo_pair.train_drafter import DrafterSettings, block_figures, draw_anchors
from demo_pair.train_target import TargetSettings

TARGET = TargetSettings(
    steps=3, unlikelihood_steps=3, batch=6, length=64, warmup=2, greedy_batch=6, greedy_length=40
)
DRAFTER = DrafterSettings(
    steps=6, batch=4, anchors=3, warmup=2, greedy_batch=6, greedy_rounds=2, greedy_length=48
)
Train = Callable[[Path, Path, Any, Clock], None]


class StopAfter(Clock):
    """A clock whose minutes are over after so many steps."""

    def __init__(self, steps: int) -> None:
        super().__init__(60)
        self._left = steps

    @property
    def over(self) -> bool:
        self._left -= 1
        return self._left < 0


def saved(out: Path, name: str) -> dict[str, Any]:
    """A checkpoint without its times."""
    state = torch.load(out / f"{name}.ckpt", weights_only=False)
    del state["spent_s"]
    for entry in state["log"]:
        del entry["s"]
    return state


def assert_equal(left: Any, right: Any) -> None:
    if isinstance(left, torch.Tensor):
        assert torch.equal(left, right)
    elif isinstance(left, dict):
        assert left.keys() == right.keys()
        for key in left:
            assert_equal(left[key], right[key])
    elif isinstance(left, list):
        assert len(left) == len(right)
        for a, b in zip(left, right, strict=True):
            assert_equal(a, b)
    else:
        assert left == right


def report(out: Path, name: str) -> dict[str, Any]:
    return json.loads((out / f"{name}.json").read_text())


@pytest.mark.usefixtures("tiny")
def test_interrupted_runs_end_as_uninterrupted_ones(corpus: Path, tmp_path: Path) -> None:
    one, many = tmp_path / "one", tmp_path / "many"
    stages: list[tuple[str, Train, Any, tuple[int, ...]]] = [
        ("target", train_target.train, TARGET, (0, 2, 3, 99)),  # 2 + 3: inside the second part
        ("drafter", train_drafter.train, DRAFTER, (0, 4, 99)),
    ]
    for folder in (one, many):
        folder.mkdir()
    for name, train, settings, parts in stages:
        train(corpus, one, settings, StopAfter(99))
        for steps in parts:
            train(corpus, many, settings, StopAfter(steps))
            assert report(many, name)["done"] == (steps == 99)
        assert_equal(saved(one, name), saved(many, name))
        figures = [k for k in report(one, name) if k.startswith("held_out")]
        assert len(figures) == 1
        assert report(one, name)[figures[0]] == report(many, name)[figures[0]]
    before = (many / "target.ckpt").read_bytes()
    train_target.train(corpus, many, TARGET, StopAfter(99))
    assert (many / "target.ckpt").read_bytes() == before, "a finished stage changes nothing"


@pytest.mark.usefixtures("tiny")
def test_a_killed_drafter_run_continues_from_its_last_save(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train_target.train(corpus, tmp_path, TARGET, StopAfter(1))
    killed = tmp_path / "killed"
    killed.mkdir()
    (killed / "target.ckpt").write_bytes((tmp_path / "target.ckpt").read_bytes())
    train_drafter.train(corpus, tmp_path, DRAFTER, StopAfter(99))
    real, calls = train_drafter.draft_loss, 0

    def dies(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 4:
            raise KeyboardInterrupt
        return real(*args)

    monkeypatch.setattr(loop, "SAVE_EVERY_S", -1.0)
    monkeypatch.setattr(train_drafter, "draft_loss", dies)
    with pytest.raises(KeyboardInterrupt):
        train_drafter.train(corpus, killed, DRAFTER, StopAfter(99))
    assert saved(killed, "drafter")["step"] == 3
    # the text on disk is used: drawing it again would fail
    monkeypatch.setattr(train_drafter, "greedy_texts", None)
    train_drafter.train(corpus, killed, DRAFTER, StopAfter(99))
    assert_equal(saved(tmp_path, "drafter"), saved(killed, "drafter"))


@pytest.mark.usefixtures("tiny")
def test_other_settings_or_another_target_are_refused(corpus: Path, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="train the target first"):
        train_drafter.train(corpus, tmp_path, DRAFTER, StopAfter(1))
    train_target.train(corpus, tmp_path, TARGET, StopAfter(1))
    train_drafter.train(corpus, tmp_path, DRAFTER, StopAfter(1))
    with pytest.raises(SystemExit, match="other settings"):
        train_target.train(corpus, tmp_path, TargetSettings(steps=4), StopAfter(1))
    train_target.train(corpus, tmp_path, TARGET, StopAfter(1))
    with pytest.raises(SystemExit, match="another target"):
        train_drafter.train(corpus, tmp_path, DRAFTER, StopAfter(1))


@pytest.mark.usefixtures("tiny")
def test_held_out_figures_weigh_all_kinds_equally(corpus: Path, tmp_path: Path) -> None:
    train_target.train(corpus, tmp_path, TARGET, StopAfter(1))
    train_drafter.train(corpus, tmp_path, DRAFTER, StopAfter(1))
    for figures in report(tmp_path, "drafter")["held_out"].values():
        assert list(figures) == ["aa", "bb", "cc", "mean"]
        chains = [figures[kind]["chain"] for kind in ("aa", "bb", "cc")]
        assert figures["mean"]["chain"] == pytest.approx(sum(chains) / 3)


def test_held_out_figures_read_each_kind_from_its_own_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are grouped by kind: the first ones are all of the first kind."""
    counts = {"aa": 40, "bb": 40, "cc": 2}
    tokens = torch.cat([torch.full((n, 20), i + 1) for i, n in enumerate(counts.values())])
    rows, start = {}, 0
    for kind, n in counts.items():
        rows[kind], start = slice(start, start + n), start + n
    seen: list[tuple[int, int]] = []

    def spy(_drafter: Any, _target: Any, text: torch.Tensor, *_: Any) -> tuple[None, Any]:
        assert (text == text[0, 0]).all()
        seen.append((int(text[0, 0]), len(text)))
        return None, {"chain": float(text[0, 0])}

    monkeypatch.setattr(train_drafter, "draft_loss", spy)
    held = train_drafter.GreedyText(tokens, torch.full((len(tokens),), 5))
    found = train_drafter.held_out_figures(None, None, held, rows, DRAFTER)  # type: ignore[arg-type]
    assert seen == [(1, 32), (2, 32), (3, 2)] * 2
    assert {k: v["chain"] for k, v in found["block8"].items()} == {
        "aa": 1.0, "bb": 2.0, "cc": 3.0, "mean": 2.0,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("text", "prefix", "labels"),
    [
        ([5, 6, 7, 8, 9], 3, [9, -1, -1]),  # behind the text
        ([5, 6, 7, 0, 9], 3, [-1, -1, -1]),  # the anchor ends the text
        ([5, 6, 7, 8, 0], 3, [0, -1, -1]),  # the end token itself is drafted
        ([0, 0, 0, 8, 9], 3, [9, -1, -1]),  # an end in the prefix is none
    ],
)
def test_labels_of_the_last_anchor(text: list[int], prefix: int, labels: list[int]) -> None:
    at, found = draw_anchors(
        torch.tensor([text]), torch.tensor([prefix]), 2, 4, torch.Generator().manual_seed(0)
    )
    assert at.tolist() == [[3, 3]]  # one place to draw from: the last token but one
    assert found.tolist() == [[labels, labels]]


def test_labels_are_the_tokens_after_the_anchor_up_to_an_end() -> None:
    g = torch.Generator().manual_seed(1)
    text = torch.randint(0, 6, (5, 30), generator=g)
    prefix = torch.tensor([0, 5, 12, 20, 28])
    at, labels = draw_anchors(text, prefix, 40, 8, g)
    assert (at >= prefix.unsqueeze(1)).all()
    assert at.max() <= 28
    for row, places, found in zip(text.tolist(), at.tolist(), labels.tolist(), strict=True):
        for place, got in zip(places, found, strict=True):
            expected = []
            for j in range(place + 1, place + 8):
                ended = shapes.EOS in row[place : min(j, len(row))]
                expected.append(-1 if j >= len(row) or ended else row[j])
            assert got == expected


def test_block_figures_on_a_hand_case() -> None:
    """Two blocks: one right in its first three places, one that has no label at all."""
    labels = torch.tensor([[1, 2, 3, 4, 5, 6, 7], [-1] * 7])
    unary = torch.zeros(2, 7, 40)
    unary[:, :, 20:] = 1.0  # the candidates
    unary[0, 0, 1] = 2.0  # the true token is one of them in the first place only
    pair = torch.zeros(2, 7, 40)
    for place in range(3):
        pair[0, place, place + 1] = 1.0
    pair[0, 3, 9] = 1.0
    figures = block_figures(unary, pair, labels)
    assert figures == {"chain": 1 + 3 / 2, "recall1": 1.0, "recall7": 0.0}
    empty = block_figures(unary, pair, torch.full((2, 7), -1))
    assert empty == {"chain": 1.0}


def test_settings_from_the_command_line() -> None:
    parsed = train_demo_pair.parse_settings(TargetSettings, ["steps=5", "peak_lr=1e-2"])
    assert parsed == TargetSettings(steps=5, peak_lr=0.01)
    with pytest.raises(SystemExit, match="no setting `stepps`"):
        train_demo_pair.parse_settings(TargetSettings, ["stepps=5"])
    with pytest.raises(SystemExit, match="steps=five"):
        train_demo_pair.parse_settings(TargetSettings, ["steps=five"])


def test_shipped_settings_are_the_defaults(repo: Path) -> None:
    runs = json.loads((repo / "recipes" / "demo-cpu" / "training.json").read_text())
    assert train_demo_pair.parse_settings(TargetSettings, []) == TargetSettings(
        **runs["target"]["settings"]
    )
    assert DrafterSettings(**runs["drafter"]["settings"]) == DrafterSettings()
    assert runs["target"]["done"]
    assert runs["drafter"]["done"]
