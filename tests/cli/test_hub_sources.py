"""`convert-w12 owner/name` and `w12 verify --against owner/name`, as processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.unit.io.hub_server import COMMIT, REPO, serve

Run = Callable[..., Any]


def test_convert_from_the_hub_and_verify_offline(
    specpilot: Run, repo: Path, tmp_path: Path
) -> None:
    target = repo / "recipes/demo-cpu/target"
    files = {file.name: file.read_bytes() for file in target.iterdir()}
    home = {"HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "0"}
    with serve({**files, "model.gguf": b"another form"}) as hub:
        done = specpilot("convert-w12", REPO, "-o", "w12", "--json", HF_ENDPOINT=hub.url, **home)
        assert done.returncode == 0, done.stderr
        asked = len(hub.requests)
        offline = {**home, "HF_HUB_OFFLINE": "1", "HF_ENDPOINT": hub.url}
        checked = specpilot("w12", "verify", "w12", "--against", REPO, "--json", **offline)
        assert len(hub.requests) == asked
    source_hub = {"repo": REPO, "revision": COMMIT}
    answer = json.loads(done.stdout)
    assert answer["results"]["source_hub"] == source_hub
    assert COMMIT in done.stderr
    manifest = json.loads((tmp_path / "w12" / "w12_manifest.json").read_text(encoding="utf-8"))
    assert manifest["source_hub"] == source_hub
    assert not (tmp_path / "w12" / "model.gguf").exists()
    assert checked.returncode == 0, checked.stderr
    answer = json.loads(checked.stdout)
    assert (answer["verdict"], answer["results"]["against_hub"]) == ("identical", source_hub)


def test_transformers_loads_a_w12_repository_from_the_hub(
    specpilot: Run, repo: Path, tmp_path: Path
) -> None:
    """transformers itself fetches only weights and configuration, not the manifest."""
    done = specpilot("convert-w12", str(repo / "recipes/demo-cpu/target"), "-o", "w12")
    assert done.returncode == 0, done.stderr
    files = {file.name: file.read_bytes() for file in (tmp_path / "w12").iterdir()}
    program = (
        "import sys, specpilot_kernels.integrations.transformers, transformers as t;"
        "print(t.AutoModelForCausalLM.from_pretrained(sys.argv[1]).num_parameters())"
    )
    with serve(files) as hub:
        env = {"HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "0", "HF_ENDPOINT": hub.url}
        loaded = subprocess.run(
            [sys.executable, "-c", program, REPO],
            env={**os.environ, **env}, capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip
    assert loaded.returncode == 0, loaded.stderr
    assert int(loaded.stdout) > 3_000_000


def test_exit_codes_of_sources_that_do_not_resolve(specpilot: Run, tmp_path: Path) -> None:
    home = {"HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "1"}
    codes = [
        specpilot("convert-w12", source, "--dry-run", **home).returncode
        for source in ("no-such-folder", "acme/not-cached")
    ]
    assert codes == [2, 3]
