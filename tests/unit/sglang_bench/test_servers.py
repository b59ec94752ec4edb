"""Shapes, the weights' plugin, the gate, the handshake, and the package metadata."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import measure_sglang_w12
import pytest
import torch
from sglang_bench import models, phases, server_side
from sglang_bench.book import Book, Clock
from sglang_bench.fleet import Fleet, handshake_problem
from sglang_bench.phases import Bench

from specpilot_cli.schema.plugin_config import PluginConfig, W12Plugin
from specpilot_kernels.w12 import shapes

W12 = PluginConfig(w12=W12Plugin())


@pytest.mark.parametrize(
    ("name", "config"),
    [
        (shapes.QWEN_27B, models.qwen_27b()),
        ("Muse-Glimmer-30B", models.muse_30b()),
        ("Gemma-4-12B", models.gemma_12b()),
        ("Llama-3.1-8B", models.llama_8b()),
    ],
)
def test_configurations_have_the_published_shapes(name: str, config: dict[str, Any]) -> None:
    assert models.projections(config) == shapes.MODELS[name]


def test_a_drafter_reads_layers_that_its_target_has() -> None:
    for layers in (24, 64):
        taken = models.qwen_27b_dflash2(layers)["dflash_config"]["target_layer_ids"]
        assert len(set(taken)) == 5
        assert 0 <= min(taken) <= max(taken) < layers


def test_folders_are_written(tmp_path: Path) -> None:
    models.write_folders(tmp_path, models.folders())
    assert models.vocabulary(tmp_path / "qwen-27b") == 248320
    assert models.vocabulary(tmp_path / "llama-8b") == 128256


class Tiny(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = torch.nn.Linear(64, 96, dtype=torch.bfloat16)
        self.b = torch.nn.Linear(64, 96, dtype=torch.bfloat16)
        self.norm = torch.nn.LayerNorm(4096, dtype=torch.bfloat16)
        self.register_buffer("count", torch.zeros(2, dtype=torch.int64))


def test_weights_depend_on_their_names_alone() -> None:
    first, second = Tiny(), Tiny()
    server_side.fill(first)
    server_side.fill(second, low=-1, high=1, seed=3)
    for name, tensor in first.state_dict().items():
        assert torch.equal(tensor, second.state_dict()[name]), name
    assert not torch.equal(first.a.weight, first.b.weight)
    assert first.a.weight.float().std().item() == pytest.approx(server_side.STD, rel=0.05)
    assert first.norm.weight.float().mean().item() == pytest.approx(1.0, abs=0.01)
    assert first.norm.weight.float().std().item() == pytest.approx(server_side.STD, rel=0.1)
    assert torch.equal(first.count, torch.zeros(2, dtype=torch.int64))


def test_other_dtypes_are_refused() -> None:
    module = torch.nn.Linear(8, 8)
    module.weight = torch.nn.Parameter(module.weight.to(torch.float8_e4m3fn), requires_grad=False)
    with pytest.raises(TypeError, match=r"weight is torch\.float8_e4m3fn"):
        server_side.fill(module)


def test_a_process_waits_for_its_gate(tmp_path: Path) -> None:
    gate = tmp_path / "x.gate"
    waiting = threading.Thread(target=server_side.wait_for, args=(gate,), daemon=True)
    waiting.start()
    deadline = time.monotonic() + 60
    while not list(tmp_path.glob("x.gate.*.waits")) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert waiting.is_alive()
    gate.touch()
    waiting.join(10)
    assert not waiting.is_alive()


STATE = {"active": {"w12": {}}, "problems": []}


@pytest.mark.parametrize(
    ("asked", "state", "problem"),
    [
        ("absent", None, None),
        ("inert", None, None),
        ("inert", STATE, "should be inert"),
        (W12, STATE, None),
        (W12, None, "says nothing"),
        (W12, {"active": {}, "problems": []}, "not active: .'w12'."),
        (W12, {"active": {"w12": {}}, "problems": ["tiger"]}, "tiger"),
    ],
)
def test_handshake(asked: Any, state: Any, problem: str | None) -> None:
    found = handshake_problem(asked, state)
    if problem is None:
        assert found is None
    else:
        assert found is not None
        assert re.search(problem, found)


def test_metadata_makes_both_plugins_known(tmp_path: Path) -> None:
    measure_sglang_w12.write_site(tmp_path)
    code = (
        "from importlib.metadata import entry_points as e;"
        "print(sorted((p.name, p.value, p.dist.name) for p in e(group='sglang.srt.plugins')))"
    )
    done = subprocess.run(
        [sys.executable, "-I", "-c", f"import sys; sys.path[:0] = [{str(tmp_path)!r}]; {code}"],
        capture_output=True, text=True, check=True, timeout=60,
    )  # fmt: skip
    assert "'specpilot_cli.engines.sglang.plugin.entry:register'" in done.stdout
    assert "'sglang_bench.server_side:register', 'specpilot-bench-weights'" in done.stdout


def bench(folder: Path) -> Bench:
    fleet = Fleet(folder / "servers", phases.GPU_ARGS, first_port=9000)
    book = Book(folder / "r.json", Clock(60), {})
    return Bench(fleet, book, folder / "models", folder, folder)


def test_compared_servers_differ_in_what_is_compared_alone(tmp_path: Path) -> None:
    """Same model, same pools, same environment; the W12 server has its flag and its plugin."""
    chain = phases.chain_phase(bench(tmp_path))
    stock, w12 = chain.specs()
    assert tuple(a for a in w12.args if a not in phases.W12_ARGS) == stock.args
    assert (stock.model, dict(stock.env)) == (w12.model, dict(w12.env))
    assert (stock.plugin, w12.plugin) == ("absent", W12)
    absent, inert, *_ = phases.recorder_phase(bench(tmp_path), with_pair=False).specs()
    assert (absent.args, dict(absent.env)) == (inert.args, dict(inert.env))
    assert (absent.plugin, inert.plugin) == ("absent", "inert")


def test_a_stock_server_is_started_without_specpilot_s_plugin(tmp_path: Path) -> None:
    fleet = bench(tmp_path).fleet
    stock, w12 = phases.chain_phase(bench(tmp_path)).specs()
    gate = tmp_path / "g"
    assert fleet._env(stock, gate)["SGLANG_PLUGINS"] == "specpilot-bench-weights"
    env = fleet._env(w12, gate)
    assert env["SGLANG_PLUGINS"] == "specpilot-bench-weights,specpilot"
    assert PluginConfig.model_validate_json(Path(env["SPECPILOT_PLUGIN"]).read_text()) == W12
