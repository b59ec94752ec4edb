"""Exported folders load in the reference engine and in transformers with the same logits."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
import torch
from demo_pair import shapes
from demo_pair.export import export, write_folder, write_target
from demo_pair.loop import initialise

from specpilot_cli.engines.reference.drafter import Drafter
from specpilot_cli.engines.reference.model import TargetModel
from specpilot_cli.engines.reference.weights import load_drafter, load_target


def random_pair() -> tuple[TargetModel, Drafter]:
    g = torch.Generator().manual_seed(5)
    torch.manual_seed(5)
    target = TargetModel(shapes.TARGET, shapes.CAPTURE)
    initialise(target, shapes.TARGET.n_layers, g)
    n_features = len(shapes.CAPTURE) * shapes.TARGET.hidden_size
    drafter = Drafter(shapes.DRAFTER, target.embed_tokens, target.lm_head, n_features)
    for module in (target, drafter):
        for p in module.parameters():
            if p.dim() > 1:
                p.data.mul_(8).add_(0.02 * torch.randn(p.shape, generator=g))
            p.data = p.data.to(torch.bfloat16).float()
    return target.requires_grad_(False), drafter.requires_grad_(False)


@pytest.mark.usefixtures("tiny")
def test_exported_weights_load_in_the_reference_engine(tmp_path: Path) -> None:
    target, drafter = random_pair()
    write_target(tmp_path / "target", target.state_dict())
    write_folder(tmp_path / "drafter", drafter.state_dict(), shapes.drafter_json())
    loaded = load_target(tmp_path / "target", capture=shapes.CAPTURE)
    assert loaded.config == shapes.TARGET
    bound = load_drafter(tmp_path / "drafter", loaded)
    assert bound.config == shapes.DRAFTER
    for ours, theirs in ((target, loaded), (drafter, bound)):
        state = theirs.state_dict()
        assert ours.state_dict().keys() == state.keys()
        assert all(torch.equal(p, state[name]) for name, p in ours.state_dict().items())


@pytest.mark.usefixtures("tiny")
def test_exported_target_has_the_same_logits_in_transformers(tmp_path: Path) -> None:
    from transformers import AutoConfig, GenerationConfig, Qwen3_5ForConditionalGeneration

    target, _ = random_pair()
    write_target(tmp_path, target.state_dict())
    theirs, found = Qwen3_5ForConditionalGeneration.from_pretrained(
        tmp_path, dtype=torch.float32, output_loading_info=True
    )
    assert not found["unexpected_keys"]
    assert all("visual" in name or name == "lm_head.weight" for name in found["missing_keys"])
    assert theirs.get_output_embeddings().weight is theirs.get_input_embeddings().weight
    tokens = torch.randint(3, shapes.TARGET.vocab_size, (2, 70))
    with torch.no_grad():
        hidden, _ = target.forward_sequences(tokens)
        ours = target.logits(hidden)
        logits = theirs.eval()(input_ids=tokens).logits
    assert ours.std() > 0.5, "flat logits would agree for nothing"
    torch.testing.assert_close(logits, ours, rtol=1e-4, atol=2e-4)
    assert AutoConfig.from_pretrained(tmp_path).text_config.eos_token_id == shapes.EOS
    # SGLang reads the end token here and drops a plain 0
    assert GenerationConfig.from_pretrained(tmp_path).eos_token_id == [shapes.EOS]


@pytest.mark.usefixtures("tiny")
def test_export_refuses_a_tokenizer_of_another_corpus(tmp_path: Path) -> None:
    data, out, to = tmp_path / "data", tmp_path / "out", tmp_path / "to"
    (data / "tokenizer").mkdir(parents=True)
    out.mkdir()
    target, drafter = random_pair()
    for name, module in (("target", target), ("drafter", drafter)):
        torch.save({"model": module.state_dict()}, out / f"{name}.ckpt")
        (out / f"{name}.json").write_text(json.dumps({"stage": name}))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (data / "tokenizer" / name).write_text("{}")
    manifest = {"tokenizer_sha256": hashlib.sha256(b"{}").hexdigest()}
    (data / "manifest.json").write_text(json.dumps(manifest))
    export(data, out, to)
    assert json.loads((to / "training.json").read_text())["drafter"] == {"stage": "drafter"}
    assert json.loads((to / "corpus_manifest.json").read_text()) == manifest
    assert load_target(to / "target").config == shapes.TARGET
    (data / "tokenizer" / "tokenizer.json").write_text("{ }")
    with pytest.raises(SystemExit, match="does not belong"):
        export(data, out, to)
