"""Pitfalls 27 to 31: what a conversion needs of the machine."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import numpy as np
import pytest

from specpilot_cli.io.safetensors_stream import bf16_data
from specpilot_kernels.w12 import codec
from tests.unit.convert_w12.conftest import MakeCheckpoint, digests, weights
from tests.unit.convert_w12.pitfalls.conftest import Cli, python

_WITHOUT_GPU_PACKAGES = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"torch", "cupy", "cuda", "triton", "transformers", "sglang",
                                      "pkg_resources", "nvidia", "jax", "tensorflow"}:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Absent())
from specpilot_cli.main import main
source, packed, back = sys.argv[1:]
for words in (["convert-w12", source, "--dry-run"], ["convert-w12", source, "-o", packed],
              ["w12", "verify", packed, "--against", source], ["w12", "inspect", packed],
              ["w12", "restore", packed, "-o", back]):
    code = main(words)
    if code:
        sys.exit(f"{words[0]} ended with {code}")
"""


def test_pitfall_27_a_cpu_and_no_torch_are_enough(
    make_checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    """The converter would not even import: it wanted CuPy, a GPU, or a module of old setuptools."""
    source = make_checkpoint()
    done = python(
        _WITHOUT_GPU_PACKAGES, source, tmp_path / "w12", tmp_path / "back", CUDA_VISIBLE_DEVICES=""
    )
    assert done.returncode == 0, done.stderr
    assert digests(tmp_path / "back") == digests(source)


_CLI = "import sys; from specpilot_cli.main import main; sys.exit(main(sys.argv[1:]))"


def test_pitfall_28_without_machine_code_the_bytes_are_the_same(
    make_checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    """The native packer crashed on this machine, and there was no other way to convert."""
    bits = np.array(weights(0, 128, 64).data)
    bits[3, :4] = [0, 0x8000, 0x7FC1, 0x0001]
    source = make_checkpoint({"a.weight": bf16_data(bits)})
    folders = []
    for name, setting in (("compiled", "0"), ("interpreted", "1")):
        folders.append(tmp_path / name)
        done = python(
            _CLI, "convert-w12", source, "-o", folders[-1], "--workers", "1",
            NUMBA_DISABLE_JIT=setting,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
    assert digests(folders[0]) == digests(folders[1])


_FAULTY = """
import sys
from specpilot_kernels.w12 import _cpu
plain = _cpu.pack_rows
def faulty(bits, window, ptr, records, *rest):
    plain(bits, window, ptr, records, *rest)
    records[0, 0, 100] ^= 0x80
_cpu.pack_rows = faulty
from specpilot_cli.main import main
sys.exit(main(sys.argv[1:]))
"""


def test_pitfall_28_a_packer_that_errs_is_caught_before_anything_is_kept(
    make_checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    """The native packer wrote a wrong bit, and the first to notice was a user of the model."""
    source = make_checkpoint({"layers.0.up.weight": weights(0, 256, 256)})
    done = python(_FAULTY, "convert-w12", source, "-o", tmp_path / "w12")
    assert done.returncode == 70
    assert "layers.0.up.weight" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_pitfall_29_an_unheard_of_model_converts_with_one_command(
    make_checkpoint: MakeCheckpoint, cli: Cli, tmp_path: Path
) -> None:
    """There were converted models to download, and no way to convert one's own."""
    config = '{"model_type": "unheard-of", "architectures": ["UnheardOfForCausalLM"]}'
    names = ["trunk.7.mix.alpha.weight", "trunk.7.mix.beta.weight", "out_head.weight"]
    source = make_checkpoint({name: weights(0, 256, 256) for name in names}, config=config)
    answer = cli("convert-w12", source, "-o", tmp_path / "w12", "--json")
    assert answer.code == 0
    assert {row["encoding"] for row in answer.tensors.values()} == {"w12"}
    shown = cli("convert-w12", "--help").out
    assert "specpilot convert-w12 Qwen3.8-27B -o Qwen3.8-27B-W12" in shown


_THREADS = """
import os, sys, threading
from specpilot_cli.main import main
most, done = 0, threading.Event()
def watch():
    global most
    while not done.wait(0.0005):
        most = max(most, len(os.listdir("/proc/self/task")))
watcher = threading.Thread(target=watch)
watcher.start()
code = main(sys.argv[1:])
done.set()
watcher.join()
print("most", most, "torch" in sys.modules)
sys.exit(code)
"""


def test_pitfall_31_workers_bound_the_threads(
    make_checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    """Each worker started as many threads as there were processors, and all of them waited."""
    source = make_checkpoint({f"layers.{i}.up.weight": weights(i, 2048, 1024) for i in range(6)})
    done = python(
        _THREADS, "convert-w12", source, "-o", tmp_path / "w12", "--workers", "2", "--quiet",
        OMP_NUM_THREADS="16", OPENBLAS_NUM_THREADS="1", MKL_NUM_THREADS="1",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    *_, most, torch_is_loaded = done.stdout.split()
    # Main, watcher, two workers, and a few that read, hash and write.
    assert 3 <= int(most) <= 10
    assert torch_is_loaded == "False"


_DEFAULT_WORKERS = """
import os
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
from specpilot_cli.commands.convert_w12 import default_workers
print(default_workers())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="processor affinity is Linux's")
def test_pitfall_31_default_workers_are_the_processors_one_may_use() -> None:
    """In a container with one processor of sixty-four, sixty-four workers fought for it."""
    assert python(_DEFAULT_WORKERS).stdout.strip() == "1"


def test_pitfall_31_the_number_of_workers_does_not_change_a_byte(
    make_checkpoint: MakeCheckpoint, cli: Cli, tmp_path: Path
) -> None:
    """With more threads the parts came in another order, and the file's hash was another."""
    source = make_checkpoint({"a.weight": weights(0, 4096, 1030), "b.weight": weights(1, 300, 700)})
    for workers in (1, 2, 5):
        target = tmp_path / f"w{workers}"
        assert cli("convert-w12", source, "-o", target, "--workers", workers).code == 0
    assert digests(tmp_path / "w1") == digests(tmp_path / "w2") == digests(tmp_path / "w5")
    bits = np.random.default_rng(0).integers(0, 65536, (1, 2049, 2100), dtype=np.uint16)
    one, many = (codec.encode(bits, threads=threads) for threads in (1, os.cpu_count() or 2))
    assert one.escape_bits.tobytes() == many.escape_bits.tobytes()
    assert one.records.tobytes() == many.records.tobytes()
