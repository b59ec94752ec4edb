"""Write the trained pair as Hugging Face folders in native BF16, with reports and manifest."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import torch
from demo_pair.shapes import EOS, drafter_json, target_json
from safetensors.torch import save_file

TARGET_PREFIX = "model.language_model."


def export(data: Path, out: Path, to: Path) -> None:
    """Folders `to`/target and `to`/drafter from the checkpoints in `out`, tokenizer from `data`.

    Also `to`/training.json (both reports) and `to`/corpus_manifest.json. Raises `SystemExit` if
    the tokenizer is not the one that the manifest names.
    """
    target = torch.load(out / "target.ckpt", weights_only=False, map_location="cpu")["model"]
    drafter = torch.load(out / "drafter.ckpt", weights_only=False, map_location="cpu")["model"]
    manifest = (data / "manifest.json").read_text(encoding="utf-8")
    tokenizer = (data / "tokenizer" / "tokenizer.json").read_bytes()
    if json.loads(manifest)["tokenizer_sha256"] != hashlib.sha256(tokenizer).hexdigest():
        raise SystemExit(f"the tokenizer in {data} does not belong to its manifest.json")
    write_target(to / "target", target)
    write_folder(to / "drafter", drafter, drafter_json())
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(data / "tokenizer" / name, to / "target" / name)
    reports = {
        stage: json.loads((out / f"{stage}.json").read_text(encoding="utf-8"))
        for stage in ("target", "drafter")
    }
    _write_json(to / "training.json", reports)
    (to / "corpus_manifest.json").write_text(manifest, encoding="utf-8")


def write_target(folder: Path, state: dict[str, torch.Tensor]) -> None:
    """The target's folder from its state dict, under the public checkpoints' tensor names."""
    # the head is the embedding, and loaders of tied models want it once
    named = {TARGET_PREFIX + k: v for k, v in state.items() if k != "lm_head.weight"}
    write_folder(folder, named, target_json())
    # a list, because SGLang takes a plain 0 for no id at all
    _write_json(folder / "generation_config.json", {"eos_token_id": [EOS], "do_sample": False})


def write_folder(folder: Path, state: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
    """model.safetensors (BF16, names sorted) and config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {k: state[k].detach().to(torch.bfloat16).contiguous() for k in sorted(state)}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    _write_json(folder / "config.json", config)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
