"""Write the trained pair as Hugging Face folders in native BF16, with a model card each."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from demo_pair.card import drafter_card, target_card
from demo_pair.shapes import drafter_json, target_json
from safetensors.torch import save_file

TARGET_PREFIX = "model.language_model."


def export(data: Path, out: Path, to: Path) -> None:
    """Folders `to`/target and `to`/drafter from the checkpoints in `out`."""
    target = torch.load(out / "target.ckpt", weights_only=False, map_location="cpu")["model"]
    drafter = torch.load(out / "drafter.ckpt", weights_only=False, map_location="cpu")["model"]
    target.pop("lm_head.weight")  # tied to the embedding
    write_folder(to / "target", {TARGET_PREFIX + k: v for k, v in target.items()}, target_json())
    write_folder(to / "drafter", drafter, drafter_json())
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(data / "tokenizer" / name, to / "target" / name)
    generation = {"eos_token_id": 0, "do_sample": False}
    (to / "target" / "generation_config.json").write_text(json.dumps(generation, indent=1) + "\n")
    reports = {s: json.loads((out / f"{s}.json").read_text()) for s in ("target", "drafter")}
    manifest = json.loads((data / "manifest.json").read_text())
    (to / "target" / "README.md").write_text(target_card(reports["target"], manifest))
    (to / "drafter" / "README.md").write_text(drafter_card(reports["drafter"]))


def write_folder(folder: Path, state: dict[str, torch.Tensor], config: dict[str, object]) -> None:
    """model.safetensors (BF16, names sorted) and config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {k: state[k].detach().to(torch.bfloat16).contiguous() for k in sorted(state)}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
