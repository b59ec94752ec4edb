"""What transformers must not load from a W12 folder, and that no weight is ever made up."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModel, AutoModelForSequenceClassification
from transformers.modeling_utils import PreTrainedModel
from transformers.quantizers import HfQuantizer

from specpilot_kernels.integrations.transformers import W12Config, check_transformers
from specpilot_kernels.w12 import layout
from specpilot_kernels.w12.manifest import LOADER_NOTICE, W12FolderError
from tests.unit.convert_w12.conftest import convert
from tests.unit.integrations.conftest import MakeFolders, bits, load, shard_names

Edit = Callable[[dict[str, Any]], Any]
PROJECTION = "model.layers.1.self_attn.o_proj.weight"
NORM = "model.layers.0.input_layernorm.weight"


@pytest.fixture
def packed(folders: MakeFolders, tmp_path: Path) -> Path:
    """A W12 folder of its own, to be damaged."""
    return shutil.copytree(folders("biased")[1], tmp_path / "packed")


def edit_config(folder: Path, edit: Edit) -> None:
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    edit(config)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")


def edit_manifest(folder: Path, edit: Edit) -> None:
    """Change the manifest and seal it again."""
    path = folder / "w12_manifest.json"
    data = json.loads(path.read_text(encoding="utf-8"))
    edit(data)
    blank = json.dumps({**data, "self_sha256": ""}, indent=1)
    seal = hashlib.sha256(blank.encode()).hexdigest()
    path.write_text(blank.replace('"self_sha256": ""', f'"self_sha256": "{seal}"'), "utf-8")


def edit_tensors(folder: Path, edit: Edit, shard: str = "model.safetensors") -> None:
    tensors = {name: tensor.clone() for name, tensor in load_file(folder / shard).items()}
    edit(tensors)
    save_file(tensors, folder / shard, {"format": "pt"})


def flip_a_bit(name: str) -> Edit:
    def edit(tensors: dict[str, torch.Tensor]) -> None:
        tensors[name].view(torch.uint8).reshape(-1)[100] ^= 1

    return edit


@pytest.mark.parametrize("change", [{"layout": 99}, {"version": 7}, {"layout": None}])
def test_an_unknown_layout_or_version_is_refused_by_number(
    change: dict[str, Any], packed: Path
) -> None:
    edit_config(packed, lambda config: config["quantization_config"].update(change))
    ((key, value),) = change.items()
    read = {"version": layout.FORMAT_VERSION, "layout": layout.LAYOUT}[key]
    with pytest.raises(W12FolderError, match=f"W12 {key} {value} is unknown.* reads {read}"):
        load(packed)


def test_a_configuration_without_numbers_is_refused(packed: Path) -> None:
    edit_config(packed, lambda config: config["quantization_config"].pop("layout"))
    with pytest.raises(W12FolderError, match="layout None"):
        load(packed)


@pytest.mark.parametrize("key", ["version", "layout"])
def test_the_manifests_numbers_count_too(key: str, packed: Path) -> None:
    edit_manifest(packed, lambda data: data.update({key: 9}))
    with pytest.raises(W12FolderError, match=f"W12 {key} 9 is unknown"):
        load(packed)


def test_an_unfinished_folder_is_refused(packed: Path) -> None:
    (packed / "w12_manifest.json").unlink()
    with pytest.raises(W12FolderError, match=r"has no `w12_manifest\.json`"):
        load(packed)


@pytest.mark.parametrize(
    "edit",
    [
        lambda text: text.replace(PROJECTION, PROJECTION.replace("1", "0")),
        lambda text: text[: len(text) // 2],
        lambda text: text.replace("self_sha256", "seal"),
        lambda text: "[]",
    ],
    ids=["edited", "truncated", "unsealed", "another document"],
)
def test_an_altered_manifest_is_refused(edit: Callable[[str], str], packed: Path) -> None:
    path = packed / "w12_manifest.json"
    path.write_text(edit(path.read_text(encoding="utf-8")), encoding="utf-8")
    with pytest.raises(W12FolderError, match="w12_manifest"):
        load(packed)


@pytest.mark.parametrize(
    "part",
    [PROJECTION + suffix for suffix in ("_w12", "_w12_window", "_w12_escape_bits")]
    + [NORM, "model.layers.0.self_attn.q_proj.bias"],
)
def test_a_missing_part_is_named(part: str, packed: Path) -> None:
    edit_tensors(packed, lambda tensors: tensors.pop(part))
    with pytest.raises(W12FolderError, match=f"`{part}` is missing"):
        load(packed)


def test_a_part_that_is_left_over_is_named(packed: Path) -> None:
    edit_tensors(packed, lambda tensors: tensors.update({"extra_w12": torch.zeros(3)}))
    with pytest.raises(W12FolderError, match=r"`extra_w12`.* is not in the manifest"):
        load(packed)


@pytest.mark.parametrize("name", [PROJECTION + "_w12", PROJECTION + "_w12_window", NORM])
def test_one_flipped_bit_is_found_and_its_tensor_named(name: str, packed: Path) -> None:
    edit_tensors(packed, flip_a_bit(name))
    with pytest.raises(W12FolderError, match=f"`{name.partition('_w12')[0]}` .*is damaged"):
        load(packed)


@pytest.mark.parametrize(
    ("suffix", "change"),
    [
        ("_w12", lambda records: records[:, :1]),
        ("_w12_window", lambda window: window[:-1]),
        ("_w12_window", lambda window: torch.full_like(window, 255)),
        ("_w12_escape_ptr", lambda ptr: ptr.flip(0)),
        ("_w12_escape_ptr", lambda ptr: torch.cat([ptr, ptr])),
        ("_w12_escape_at", lambda at: torch.cat([at, at])),
        ("_w12_escape_at", lambda at: at | 1 << 31),
        ("_w12_escape_bits", lambda values: values.to(torch.int32)),
    ],
)
def test_parts_that_contradict_each_other(
    suffix: str,
    change: Callable[[torch.Tensor], torch.Tensor],
    folders: MakeFolders,
    tmp_path: Path,
) -> None:
    source = shutil.copytree(folders("biased")[0], tmp_path / "bf16")
    edit_tensors(source, lambda tensors: tensors[PROJECTION][:, 3].zero_())  # gives it escapes
    convert(source, tmp_path / "w12")

    def edit(tensors: dict[str, torch.Tensor]) -> None:
        tensors[PROJECTION + suffix] = change(tensors[PROJECTION + suffix]).contiguous()

    assert torch.equal(load(source).state_dict()[PROJECTION][:, 3], torch.zeros(128))
    assert torch.equal(bits(load(tmp_path / "w12"))[PROJECTION], bits(load(source))[PROJECTION])
    edit_tensors(tmp_path / "w12", edit)
    with pytest.raises(W12FolderError, match=f"`{PROJECTION}"):
        load(tmp_path / "w12")


def test_a_kept_tensor_of_another_dtype_is_refused(packed: Path) -> None:
    edit_tensors(packed, lambda tensors: tensors.update({NORM: tensors[NORM].float()}))
    with pytest.raises(W12FolderError, match=f"`{NORM}`.* is F32 .*the manifest says BF16"):
        load(packed)


def test_a_truncated_shard_is_named(packed: Path) -> None:
    path = packed / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(W12FolderError, match=r"cannot read `.*model\.safetensors`"):
        load(packed)


def test_a_shard_that_the_index_does_not_name(folders: MakeFolders, tmp_path: Path) -> None:
    packed = shutil.copytree(folders("biased", shard_size="200KB")[1], tmp_path / "packed")
    first = shard_names(packed)[0]
    path = packed / "model.safetensors.index.json"
    index = json.loads(path.read_text(encoding="utf-8"))
    index["weight_map"] = {n: s for n, s in index["weight_map"].items() if s != first}
    path.write_text(json.dumps(index), encoding="utf-8")
    with pytest.raises(W12FolderError, match=f"shard `{first}` is missing"):
        load(packed)


def test_a_shard_of_another_model_is_refused(folders: MakeFolders, tmp_path: Path) -> None:
    packed = shutil.copytree(folders("biased", shard_size="200KB")[1], tmp_path / "packed")
    save_file({"other.weight": torch.zeros(2)}, packed / "other.safetensors")
    path = packed / "model.safetensors.index.json"
    index = json.loads(path.read_text(encoding="utf-8"))
    index["weight_map"]["other.weight"] = "other.safetensors"
    path.write_text(json.dumps(index), encoding="utf-8")
    with pytest.raises(W12FolderError, match=r"`other\.safetensors` is not part"):
        load(packed)


def test_records_are_not_kept_yet(packed: Path) -> None:
    with pytest.raises(NotImplementedError, match="no matrix product"):
        load(packed, quantization_config=W12Config(dequantize=False))
    config = AutoConfig.from_pretrained(str(packed))
    config.quantization_config["dequantize"] = False
    with pytest.raises(NotImplementedError, match="no matrix product"):
        load(packed, config=config)


def test_transformers_does_not_encode(folders: MakeFolders) -> None:
    with pytest.raises(ValueError, match="convert-w12"):
        load(folders("biased")[0], quantization_config=W12Config())


def test_offloading_to_disk_is_refused(packed: Path, tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    places = {"model": "cpu", "lm_head": "disk"}
    with pytest.raises(ValueError, match="offloaded to disk"):
        load(packed, device_map=places, offload_folder=str(tmp_path / "offload"))


def test_a_head_that_the_folder_lacks_is_not_made_up(packed: Path) -> None:
    with pytest.raises(W12FolderError, match=r"no weights for 1 parameters.*`score\.weight`"):
        AutoModelForSequenceClassification.from_pretrained(str(packed))


def test_a_missing_lm_head_that_is_not_tied_is_not_made_up(
    folders: MakeFolders, tmp_path: Path
) -> None:
    packed = shutil.copytree(folders("tied")[1], tmp_path / "packed")
    edit_config(packed, lambda config: config.update(tie_word_embeddings=False))
    with pytest.raises(W12FolderError, match=r"`lm_head\.weight`"):
        load(packed)


def test_a_class_that_needs_fewer_weights_loads(folders: MakeFolders, packed: Path) -> None:
    expected = AutoModel.from_pretrained(str(folders("biased")[0]))
    found = AutoModel.from_pretrained(str(packed))
    assert all(torch.equal(bits(found)[name], tensor) for name, tensor in bits(expected).items())


@pytest.mark.parametrize("model", ["biased", "shipped"])
def test_without_the_integration_nothing_loads(
    model: str, folders: MakeFolders, repo: Path, tmp_path: Path
) -> None:
    """transformers alone would warn and initialise the weights at random."""
    if model == "shipped":
        packed = tmp_path / "w12"
        convert(repo / "recipes/demo-cpu/target", packed)
    else:
        packed = folders("biased")[1]
    program = (
        "import sys; from transformers import AutoModelForCausalLM as Auto;"
        "Auto.from_pretrained(sys.argv[1])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(packed)],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert LOADER_NOTICE in done.stderr.splitlines()[-1]


def loader(model: Any, state_dict: Any, checkpoint_files: Any, load_config: Any) -> None: ...


def test_this_transformers_is_known() -> None:
    check_transformers("5.20.0", PreTrainedModel._load_pretrained_model, HfQuantizer)
    check_transformers("5.20.0", loader, HfQuantizer)


def test_an_old_transformers_is_refused_by_version() -> None:
    with pytest.raises(ImportError, match=r"5\.20 or later, found 5\.9\.1"):
        check_transformers("5.9.1", loader, HfQuantizer)


@pytest.mark.parametrize("changed", [None, lambda model, checkpoint_files: None])
def test_a_loader_that_changed_is_refused(changed: Any) -> None:
    with pytest.raises(ImportError, match="`_load_pretrained_model` takes"):
        check_transformers("6.0.0", changed, HfQuantizer)


def test_a_hook_that_changed_is_refused() -> None:
    class Changed(HfQuantizer):
        def update_attn_implementation(self, model_config: Any, extra: Any) -> Any: ...

    with pytest.raises(ImportError, match="`update_attn_implementation` takes"):
        check_transformers("6.0.0", loader, Changed)
