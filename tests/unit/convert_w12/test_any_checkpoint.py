"""Random checkpoints of every kind: converted, verified, restored to the same bytes."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from specpilot_cli.convert_w12.convert import convert_folder, survey_folder
from specpilot_cli.convert_w12.inspect import inspect_folder
from specpilot_cli.convert_w12.plan import Selection
from specpilot_cli.convert_w12.restore import restore_folder
from specpilot_cli.convert_w12.verify import verify_folder
from specpilot_cli.io.hf_folder import open_hf_folder
from specpilot_cli.io.safetensors_stream import TensorData, tensor_nbytes, write_safetensors
from specpilot_cli.io.w12_folder import read_folder_tensors
from tests.unit.convert_w12.conftest import digests, weights

DTYPES = ["BF16", "F16", "F32", "F64", "I64", "I32", "U8", "BOOL"]
SEEDS = st.integers(0, 2**32 - 1)
LAYERS = st.builds(
    "{}layers.{}.".format,
    st.sampled_from(["model.", "model.language_model.", "mtp.", ""]),
    st.integers(0, 11),
)
LINEAR = st.sampled_from(
    ["mlp.up_proj.weight", "mlp.experts.3.w1.weight", "self_attn.q_proj.weight", "mlp.gate.weight"]
)
OTHERS = st.sampled_from(
    ["self_attn.q_proj.bias", "input_layernorm.weight", "A_log", "conv1d.weight", "up_proj.weight"]
)
ODD_NAMES = st.one_of(
    st.sampled_from(["model.embed_tokens.weight", "lm_head.weight", "norm.weight", "x"]),
    st.text('aß.é/_- 木0"\\', min_size=1, max_size=12),
)
SPECIAL = [0x0000, 0x8000, 0x0001, 0x7F80, 0x7FC1, 0xFF81, 0x7F7F]


@st.composite
def linears(draw: st.DrawFn) -> tuple[str, TensorData]:
    """A BF16 matrix or stack of experts that W12 shrinks more often than not."""
    stacked = draw(st.integers(0, 3)) == 0
    name = draw(LAYERS) + ("mlp.experts.gate_up_proj" if stacked else draw(LINEAR))
    rows = draw(st.one_of(st.sampled_from([128, 256]), st.integers(60, 300)))
    cols = draw(st.one_of(st.sampled_from([128, 192, 256]), st.integers(100, 320)))
    shape = (draw(st.integers(1, 3)), rows, cols) if stacked else (rows, cols)
    seed = draw(SEEDS)
    bits, rng = np.array(weights(seed, *shape).data), np.random.default_rng(seed)
    flat = bits.reshape(-1)
    at = rng.integers(0, bits.size, draw(st.sampled_from([0, 0, 1, 40, bits.size // 5])))
    flat[at] = rng.choice(SPECIAL, at.size)
    if draw(st.booleans()):
        bits.reshape(-1, cols)[:: draw(st.integers(2, 90))] = draw(st.sampled_from(SPECIAL))
    return name, TensorData("BF16", shape, bits)


@st.composite
def others(draw: st.DrawFn) -> tuple[str, TensorData]:
    """Any other tensor: any dtype, none to four dimensions, empty ones too."""
    name = draw(st.one_of(ODD_NAMES, st.builds(str.__add__, LAYERS, OTHERS)))
    shape = tuple(draw(st.lists(st.integers(0, 6), max_size=4)))
    dtype = draw(st.sampled_from(DTYPES))
    raw = np.random.default_rng(draw(SEEDS)).bytes(tensor_nbytes(dtype, shape))
    return name, TensorData(dtype, shape, bytes(b & 1 for b in raw) if dtype == "BOOL" else raw)


CHECKPOINTS = st.lists(
    st.one_of(linears(), linears(), others()), min_size=1, max_size=7, unique_by=lambda t: t[0]
).map(dict)
CONFIGS = st.fixed_dictionaries(
    {"model_type": st.just("x"), "note": st.text(max_size=5)},
    optional={"tie_word_embeddings": st.booleans()},
)


@contextmanager
def checkpoint(content: dict[str, TensorData], config: Any, shards: int) -> Iterator[Path]:
    """A folder `model` with the tensors dealt out to shards, in a folder that goes away."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "model"
        (folder / "sub").mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps(config, indent=3), encoding="utf-8")
        (folder / "sub" / "tokenizer.model").write_bytes(b"\x00\xff")
        if shards == 1:
            write_safetensors(folder / "model.safetensors", content)
        else:
            weight_map = {}
            for number in range(shards):
                name = f"model-{number + 1:05}-of-{shards:05}.safetensors"
                part = dict(list(content.items())[number::shards])
                if part:
                    write_safetensors(folder / name, part, {"format": "pt"})
                    weight_map.update(dict.fromkeys(part, name))
            index = {"metadata": {}, "weight_map": weight_map}
            (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        yield folder


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(CHECKPOINTS, CONFIGS, st.integers(1, 3), st.integers(1, 3))
def test_any_checkpoint_comes_back_byte_for_byte(
    content: dict[str, TensorData], config: Any, shards: int, threads: int
) -> None:
    with checkpoint(content, config, shards) as source:
        before = digests(source)
        opened, packed, back = open_hf_folder(source), source.parent / "w12", source.parent / "back"
        foreseen = survey_folder(opened, Selection(), threads=threads)
        done = convert_folder(opened, packed, Selection(), threads=threads)
        assert done.outcomes == foreseen.outcomes == inspect_folder(packed)[0]
        assert {outcome.name for outcome in done.outcomes} == set(content)
        event(f"converted: {sum(outcome.converted for outcome in done.outcomes)}")
        found = verify_folder(packed, source, threads=threads)
        assert (found.verdict, found.compared) == ("identical", len(content))
        assert found.problems == found.unknown_files == ()
        restore_folder(packed, back, threads=threads)
        assert digests(back) == digests(source) == before


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(CHECKPOINTS, st.integers(1, 3))
def test_any_checkpoint_reads_alike_from_both_folders(
    content: dict[str, TensorData], shards: int
) -> None:
    with checkpoint(content, {}, shards) as source:
        packed = source.parent / "w12"
        done = convert_folder(open_hf_folder(source), packed, Selection())
        plain, ours = (
            {name: (dtype, array.shape, array.tobytes()) for name, dtype, array in found}
            for found in map(read_folder_tensors, (source, packed))
        )
        assert plain == ours
        stored = {o.name: o for o in done.outcomes if not o.converted}
        for file in packed.glob("*.safetensors"):
            with safe_open(file, "np") as shard:
                for name in set(stored) & set(shard.keys()):
                    assert tuple(shard.get_slice(name).get_shape()) == stored[name].shape


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(CHECKPOINTS, st.data())
def test_any_selection_converts_what_it_names_and_nothing_else(
    content: dict[str, TensorData], data: st.DataObject
) -> None:
    plain = sorted(name for name in content if not set(name) & set("[]*?"))
    chosen = data.draw(st.lists(st.sampled_from(plain), unique=True)) if plain else []
    with checkpoint(content, {}, 1) as source:
        opened = open_hf_folder(source)
        free = {o.name for o in survey_folder(opened, Selection()).outcomes if o.converted}
        without = survey_folder(opened, Selection(exclude=tuple(chosen)))
        assert {o.name for o in without.outcomes if o.converted} == free - set(chosen)
        if chosen:
            only = survey_folder(opened, Selection(include=tuple(chosen)))
            assert {o.name for o in only.outcomes if o.converted} == free & set(chosen)
