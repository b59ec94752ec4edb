"""The hand-made decode step of the Transformers measurement is greedy decoding."""

from __future__ import annotations

import copy

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


def test_logits_are_judged_by_those_in_float32(model: LlamaForCausalLM) -> None:
    prompt = torch.randint(3, 300, (1, 17), generator=torch.Generator().manual_seed(2))
    exact = script.Decoder(model, prompt, 4)
    rounded = script.Decoder(copy.deepcopy(model).bfloat16(), prompt, 4)
    found = script.errors(model, {"bf16": rounded, "w12": exact})
    assert 1e-3 < found["bf16"] < 0.2
    assert found["w12"] < 1e-5
    exact.logits = exact.logits.flip(0)
    assert script.errors(model, {"bf16": rounded, "w12": exact})["w12"] > 0.5


@pytest.mark.parametrize(("ratio", "w12", "verdict"), [
    (1.10, 0.05, "accept"), (1.09, 0.05, "reject"), (1.30, 0.051, "reject"),
    (1.30, float("nan"), "reject"),
])  # fmt: skip
def test_both_speed_and_logits_decide(ratio: float, w12: float, verdict: str) -> None:
    assert script.verdict_of(ratio, {"bf16": 0.04, "w12": w12}) == verdict


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
