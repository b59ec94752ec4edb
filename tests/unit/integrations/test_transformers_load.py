"""A W12 folder in transformers is the BF16 checkpoint: every bit, logit and token."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.unit.convert_w12.conftest import convert, digests
from tests.unit.integrations.conftest import (
    KINDS,
    MakeFolders,
    bits,
    converted,
    load,
    shard_names,
)

PROMPT = torch.tensor([[5, 17, 100, 3, 44, 201, 9, 77]])


def assert_same_model(plain: Any, packed: Any) -> None:
    expected, found = bits(plain), bits(packed)
    assert found.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(expected[name], found[name])] == []
    assert type(packed) is type(plain)
    for ours, theirs in zip(packed.modules(), plain.modules(), strict=True):
        assert type(ours) is type(theirs)
    with torch.inference_mode():
        assert torch.equal(packed(PROMPT).logits, plain(PROMPT).logits)


@pytest.mark.parametrize("kind", KINDS)
def test_every_bit_logit_and_token(kind: str, folders: MakeFolders) -> None:
    source, packed = folders(kind)
    assert KINDS[kind][2] in converted(packed)
    plain, ours = load(source), load(packed)
    assert ours.dtype == torch.bfloat16
    assert_same_model(plain, ours)
    options = {"max_new_tokens": 24, "do_sample": False, "attention_mask": torch.ones_like(PROMPT)}
    assert torch.equal(ours.generate(PROMPT, **options), plain.generate(PROMPT, **options))


@pytest.mark.parametrize("kind", ["biased", "experts-apart", "experts-stacked"])
def test_float32_is_the_upcast_of_the_same_bits(kind: str, folders: MakeFolders) -> None:
    source, packed = folders(kind)
    ours = load(packed, dtype=torch.float32)
    assert ours.dtype == torch.float32
    assert_same_model(load(source, dtype=torch.float32), ours)


@pytest.mark.parametrize("kind", ["biased", "experts-apart", "experts-stacked"])
def test_sharded_folders(kind: str, folders: MakeFolders) -> None:
    source, packed = folders(kind, shard_size="200KB")
    assert len(shard_names(packed)) > 2
    assert_same_model(load(source), load(packed))


def test_experts_of_which_only_some_are_converted_keep_their_order(folders: MakeFolders) -> None:
    source, packed = folders("experts-apart", exclude=("*.experts.1.*", "*.experts.2.up_proj.*"))
    names = converted(packed)
    assert "model.layers.0.mlp.experts.2.gate_proj.weight" in names
    assert "model.layers.0.mlp.experts.1.gate_proj.weight" not in names
    assert_same_model(load(source), load(packed))


def test_tied_embeddings_stay_one_tensor(folders: MakeFolders) -> None:
    ours = load(folders("tied")[1])
    assert ours.lm_head.weight is ours.model.embed_tokens.weight


@pytest.mark.parametrize("device_map", ["cpu", {"": "cpu"}, "auto"])
def test_device_map(device_map: Any, folders: MakeFolders) -> None:
    pytest.importorskip("accelerate")
    source, packed = folders("experts-apart")
    assert_same_model(load(source), load(packed, device_map=device_map))


def test_the_shipped_target(repo: Path, tmp_path: Path) -> None:
    """A composite configuration: the class loaded belongs to its text part."""
    source = repo / "recipes/demo-cpu/target"
    convert(source, tmp_path / "w12")
    plain, ours = load(source), load(tmp_path / "w12")
    assert_same_model(plain, ours)
    options = {"max_new_tokens": 32, "do_sample": False, "attention_mask": torch.ones_like(PROMPT)}
    assert torch.equal(ours.generate(PROMPT, **options), plain.generate(PROMPT, **options))


@pytest.mark.parametrize("kind", ["tied", "experts-apart", "experts-renamed"])
def test_saving_gives_a_plain_checkpoint(kind: str, folders: MakeFolders, tmp_path: Path) -> None:
    """The same files as saving the BF16 model, with nothing of W12 left in them."""
    source, packed = folders(kind)
    load(source).save_pretrained(tmp_path / "plain")
    load(packed).save_pretrained(tmp_path / "ours")
    assert digests(tmp_path / "ours") == digests(tmp_path / "plain")
    config = json.loads((tmp_path / "ours" / "config.json").read_text(encoding="utf-8"))
    assert not {"quantization_config", "transformers_weights"} & config.keys()


def test_saving_the_shipped_target_leaves_no_notice_in_its_text_part(
    repo: Path, tmp_path: Path
) -> None:
    convert(repo / "recipes/demo-cpu/target", tmp_path / "w12")
    load(tmp_path / "w12").save_pretrained(tmp_path / "ours")
    assert "w12" not in (tmp_path / "ours" / "config.json").read_text(encoding="utf-8").lower()
    assert_same_model(load(repo / "recipes/demo-cpu/target"), load(tmp_path / "ours"))


def test_other_checkpoints_load_as_before(folders: MakeFolders) -> None:
    """The loader's function is wrapped for every model: it must pass the others through."""
    model = load(folders("biased")[0])
    assert not getattr(model, "is_quantized", False)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    again = type(model).from_pretrained(None, config=model.config, state_dict=state)
    assert_same_model(model, again)


def test_the_callers_configuration_is_not_changed(folders: MakeFolders) -> None:
    packed = folders("biased")[1]
    config = AutoConfig.from_pretrained(str(packed))
    before = config.to_dict()
    assert_same_model(load(packed), load(packed, config=config))
    assert config.to_dict() == before


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/status")
def test_no_second_copy_of_the_model_is_made(tmp_path: Path) -> None:
    config = AutoConfig.for_model(
        "llama", hidden_size=1024, intermediate_size=4096, num_hidden_layers=6,
        num_attention_heads=8, num_key_value_heads=8, vocab_size=512, tie_word_embeddings=False,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "bf16")
    convert(tmp_path / "bf16", tmp_path / "w12")
    done = subprocess.run(
        [sys.executable, "-c", PEAK_PROGRAM, str(tmp_path / "w12")],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    peak_bytes, model_bytes = map(int, done.stdout.split())
    assert model_bytes > 150e6
    assert peak_bytes < 1.3 * model_bytes


# Memory that belongs to no file, sampled while loading: the encoded parts are mapped.
PEAK_PROGRAM = """
import re, sys, threading, time
import specpilot_kernels.integrations.transformers
from transformers import AutoModelForCausalLM

def own_bytes():
    return 1024 * int(re.search(r"RssAnon:\\s+(\\d+)", open("/proc/self/status").read())[1])

before, samples, loaded = own_bytes(), [], threading.Event()

def watch():
    while not loaded.is_set():
        samples.append(own_bytes())
        time.sleep(0.001)

thread = threading.Thread(target=watch)
thread.start()
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
loaded.set()
thread.join()
print(max(samples) - before, sum(p.numel() * p.element_size() for p in model.parameters()))
"""
