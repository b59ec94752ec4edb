"""The hand-made decode step of the Transformers measurement is greedy decoding."""

from __future__ import annotations

import measure_transformers_w12 as script
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    torch.manual_seed(5)
    config = LlamaConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=300, bos_token_id=1, eos_token_id=2,
        attn_implementation="sdpa",
    )  # fmt: skip
    made = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for weight in made.parameters():
            if weight.dim() > 1:
                weight.normal_(0.0, 0.3)  # far from ties, so that two masks cannot part
    return made


def test_steps_give_what_generate_gives(model: LlamaForCausalLM) -> None:
    prompt = torch.randint(3, 300, (1, 17), generator=torch.Generator().manual_seed(2))
    expected = model.generate(
        prompt, max_new_tokens=24, do_sample=False, eos_token_id=None, pad_token_id=0
    )[0, 17:].tolist()
    decoder = script.Decoder(model, prompt, 24)
    for _ in range(2):  # the second time on a used cache
        decoder.start()
        found = [decoder.token.item()]
        for _ in range(23):
            decoder.decode(1)
            found.append(decoder.token.item())
        assert found == expected


def test_a_prompt_in_pieces_gives_the_same_logits(model: LlamaForCausalLM) -> None:
    prompt = torch.randint(3, 300, (1, 17), generator=torch.Generator().manual_seed(2))
    decoder = script.Decoder(model, prompt, 4)
    assert 0 < script.distance(decoder.logits, decoder.start(5)) < 1e-5


class Fixed:
    """A decoder with given logits, whole and in pieces."""

    def __init__(self, whole: torch.Tensor, pieces: torch.Tensor) -> None:
        self.logits, self.pieces = whole, pieces

    def start(self, piece: int) -> torch.Tensor:
        assert piece == script.PIECE
        return self.pieces


def test_logits_that_are_no_rounding_end_the_run() -> None:
    logits = torch.linspace(-1, 1, 100)
    bf16 = Fixed(logits, logits * 1.001)
    for factor, good in ((1.0014, True), (1.0016, False), (float("nan"), False)):
        w12 = Fixed(logits * factor, logits)
        if good:
            found = script.distances(bf16, w12)
            assert found == pytest.approx({"w12": 1.4e-3, "bf16_in_pieces": 1e-3}, rel=0.01)
            continue
        with pytest.raises(SystemExit, match="too far apart"):
            script.distances(bf16, w12)


def test_every_linear_becomes_a_w12_layer_or_stays_as_it_was(
    model: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Encoded(torch.nn.Module):
        @classmethod
        def from_linear(cls, linear: torch.nn.Linear) -> torch.nn.Module:
            return linear if linear.out_features == 32 else cls()  # keys and values stay

    monkeypatch.setattr(script, "W12Linear", Encoded)
    twin, encoded, kept = script.encode(model)
    assert (encoded, kept) == (3 * 5 + 1, 3 * 2)
    assert sum(isinstance(m, Encoded) for m in twin.modules()) == encoded
    assert not any(isinstance(m, Encoded) for m in model.modules())
