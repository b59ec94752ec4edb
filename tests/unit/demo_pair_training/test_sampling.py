"""The batch decoder writes what the engine would write; repetition is found where it is."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from demo_pair import shapes
from demo_pair.data import TokenMixture
from demo_pair.export import write_target
from demo_pair.loop import learning_rate
from demo_pair.sampling import BatchGreedy, repeated_ngrams, until_end
from demo_pair.train_target import TargetSettings

from specpilot_cli.engines.base import GenerateRequest
from specpilot_cli.engines.reference.engine import ReferenceEngine
from specpilot_cli.engines.reference.model import TargetModel

PREFIX, LENGTH = 9, 60


def random_target() -> TargetModel:
    """Weights large enough that greedy text wanders instead of repeating one token."""
    g = torch.Generator().manual_seed(3)
    model = TargetModel(shapes.TARGET, shapes.CAPTURE)
    for name, p in model.named_parameters():
        if p.dim() > 1:
            p.data.normal_(0, 0.5 if "conv1d" in name else 0.25, generator=g)
        p.data = p.data.to(torch.bfloat16).float()
    return model.requires_grad_(False)


@pytest.mark.usefixtures("tiny")
def test_batch_decoder_equals_the_engine(tmp_path: Path) -> None:
    model = random_target()
    prefixes = torch.randint(
        3, shapes.TARGET.vocab_size, (4, PREFIX), generator=torch.Generator().manual_seed(0)
    )
    decoder = BatchGreedy(model, batch=4, length=LENGTH)
    tokens = decoder(prefixes)
    write_target(tmp_path, model.state_dict())
    requests = [
        GenerateRequest(str(i), tuple(row), LENGTH - PREFIX, ignore_eos=True)
        for i, row in enumerate(prefixes.tolist())
    ]
    answers = ReferenceEngine(tmp_path, None).generate(requests)
    expected = [[*r.prompt_ids, *r.output_ids] for r in answers]
    assert tokens.tolist() == expected
    assert len({t for row in expected for t in row[PREFIX:]}) > 10
    assert torch.equal(decoder(prefixes), tokens), "a second call starts afresh"


@pytest.mark.parametrize(
    ("text", "start", "n", "marked"),
    [
        ([1, 2, 3, 1, 2, 3], 0, 3, [5]),
        ([1, 2, 3, 1, 2, 4], 0, 3, []),
        ([7, 7, 7, 7], 0, 2, [2, 3]),  # occurrences may overlap
        ([1, 2, 1, 2, 1, 2], 2, 2, [5]),  # the first pair lies in the prompt
        ([1, 2, 1, 2], 2, 2, []),
        ([1, 2, 9, 1, 2, 9, 1, 2], 0, 2, [4, 5, 6, 7]),
        ([2, 1, 1, 2], 0, 2, []),  # order counts
    ],
)
def test_repeated_ngrams(text: list[int], start: int, n: int, marked: list[int]) -> None:
    found = repeated_ngrams(torch.tensor([text, list(range(len(text)))]), start, n)
    assert found[0].nonzero().flatten().tolist() == marked
    assert not found[1].any()


def test_text_is_live_up_to_its_first_end_token() -> None:
    tokens = torch.tensor([[0, 5, 6, 0, 7, 0], [5, 5, 5, 5, 5, 5], [5, 5, 0, 5, 5, 5]])
    live = until_end(tokens, 2, eos=0)
    assert live.tolist() == [[True] * 4 + [False] * 2, [True] * 6, [True] * 3 + [False] * 3]


def test_learning_rate_warms_up_then_falls_to_the_floor() -> None:
    rate = [learning_rate(s, steps=100, warmup=10, peak=1.0) for s in range(101)]
    assert rate[:10] == pytest.approx([(s + 1) / 10 for s in range(10)])
    assert rate[10] == 1.0
    assert rate[55] == pytest.approx(0.02 + 0.98 * 0.5)
    assert rate[100] == pytest.approx(0.02)
    assert rate[10:] == sorted(rate[10:], reverse=True)


def test_unlikelihood_steps_fall_linearly_from_a_tenth_of_the_peak() -> None:
    s = TargetSettings(steps=20, unlikelihood_steps=4, warmup=5, peak_lr=1.0)
    assert s.total == 24
    assert [s.rate(step) for step in range(20, 24)] == pytest.approx([0.1, 0.075, 0.05, 0.025])
    assert s.rate(12) == learning_rate(12, steps=20, warmup=5, peak=1.0)


@pytest.mark.parametrize("count", [3, 8, 10])
def test_windows_are_grouped_by_kind(corpus: Path, count: int) -> None:
    data = TokenMixture(corpus, "train", torch.device("cpu"), eos=shapes.EOS)
    windows = data.windows(count, 40, torch.Generator().manual_seed(1))
    assert windows.shape == (count, 40)
    rows = data.rows_by_kind(count)
    assert sum(s.stop - s.start for s in rows.values()) == count
    for remainder, (kind, chosen) in enumerate(rows.items()):
        assert kind == data.kinds[remainder]
        assert math.ceil(count / 3) >= chosen.stop - chosen.start >= count // 3
        text = windows[chosen]
        assert (text[text != shapes.EOS] % 3 == remainder).all()


def test_every_other_window_starts_a_document(corpus: Path) -> None:
    data = TokenMixture(corpus, "train", torch.device("cpu"), eos=shapes.EOS)
    windows = data.windows(12, 30, torch.Generator().manual_seed(2))
    for tokens, starts, rows in zip(
        data.tokens, data.starts, data.rows_by_kind(12).values(), strict=True
    ):
        usable = starts[starts < len(tokens) - 30]
        openings = {tuple(tokens[s : s + 30].tolist()) for s in usable.tolist()}
        assert all(tuple(row) in openings for row in windows[rows][::2].tolist())


def test_a_missing_split_is_named(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="no heldout tokens"):
        TokenMixture(tmp_path, "heldout", torch.device("cpu"), eos=0)
