"""The device that a recipe is planned for: the one in this machine, or a bundled profile's."""

from __future__ import annotations

import subprocess

from specpilot_cli.ceiling.peaks import load_gpu
from specpilot_cli.doctor.checks import memory_bytes
from specpilot_cli.doctor.cuda_driver import CudaDevice, cuda_devices
from specpilot_cli.engines.sglang.memory_plan import Device
from specpilot_cli.errors import InputError, MachineError
from specpilot_cli.schema.sglang_recipe import SglangRecipe

_MIB = 2**20
# A driver keeps some memory for itself, and an idle desktop a little more.
_IDLE_BYTES = 1000 * _MIB


def find_device(recipe: SglangRecipe, *, gpu: str | None, for_launch: bool) -> tuple[Device, int]:
    """The device, and the bytes that other programs hold on it.

    Without a GPU here, and unless something is to be launched, the profile `gpu` or the recipe's
    first one stands in. Raises `MachineError` for a machine without the recipe's GPU, or too few
    of them, and `InputError` for a `gpu` that the recipe is not for.
    """
    if recipe.device == "cpu":
        return _cpu(), 0
    if gpu is not None and not for_launch:
        return _planned(recipe, gpu), 0
    devices = cuda_devices()
    if not devices:
        if for_launch:
            raise MachineError(
                f"no CUDA device here; the recipe is for {', '.join(recipe.gpus)}",
                hint="see `specpilot doctor`; --dry-run and --emit need no GPU",
            )
        return _planned(recipe, recipe.gpus[0]), 0
    _check(recipe, devices)
    smallest = min(devices[: recipe.tensor_parallel], key=lambda device: device.memory_bytes)
    return Device(smallest.name, smallest.memory_bytes, "the driver"), _taken_bytes(recipe)


def _cpu() -> Device:
    free = memory_bytes()
    if free is None:
        raise MachineError("this system does not say how much memory is free", hint="use Linux")
    return Device("cpu", free, "free memory of this machine")


def _planned(recipe: SglangRecipe, name: str) -> Device:
    profile = load_gpu(name)
    if profile.name not in recipe.gpus:
        raise InputError(
            f"the recipe is not for `{profile.name}`",
            where="--gpu",
            hint=f"it is for {', '.join(recipe.gpus)}",
        )
    return Device(profile.name, int(profile.memory_bytes.value), profile.memory_bytes.source)


def _check(recipe: SglangRecipe, devices: list[CudaDevice]) -> None:
    if len(devices) < recipe.tensor_parallel:
        raise MachineError(
            f"{len(devices)} GPUs here, the recipe needs {recipe.tensor_parallel}",
            hint="is CUDA_VISIBLE_DEVICES set?",
        )
    for device in devices[: recipe.tensor_parallel]:
        try:
            name = load_gpu(device.name).name
        except InputError:
            name = None
        if name not in recipe.gpus:
            raise MachineError(
                f"unsupported GPU `{device.name}`: the recipe is for {', '.join(recipe.gpus)}",
                hint="a recipe is validated on one kind of GPU; copy it and add this one to `gpus` "
                "to try it",
            )


def _taken_bytes(recipe: SglangRecipe) -> int:
    """What other programs hold on the fullest of the recipe's GPUs; 0 where nothing tells."""
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
        used = [int(line) * _MIB for line in done.stdout.split()]
    except (OSError, subprocess.SubprocessError, ValueError):
        return 0
    taken = max(used[: recipe.tensor_parallel], default=0)
    return 0 if taken < _IDLE_BYTES else taken
