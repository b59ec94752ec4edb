"""Loading Hugging Face folders (BF16 or W12) into the reference models."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from specpilot_cli.engines.reference.config import DrafterConfig, TargetConfig, check_pair
from specpilot_cli.engines.reference.drafter import Drafter
from specpilot_cli.engines.reference.model import TargetModel
from specpilot_cli.errors import InputError
from specpilot_cli.io.w12_folder import read_folder_tensors

M = TypeVar("M", bound=nn.Module)
_ONE_CHECKPOINT = "are config.json and the safetensors files whole, and of one checkpoint?"

_TARGET_PREFIXES = ("model.language_model.", "model.")
_TORCH_DTYPES = {"F32": torch.float32, "F16": torch.float16}
_ALLOCATING = (torch.empty, torch.zeros, torch.ones)


def load_target(
    folder: Path, *, capture: tuple[int, ...] = (), dtype: torch.dtype = torch.float32
) -> TargetModel:
    """Load a Qwen3.5-like target; W12 tensors are decoded to their exact BF16 values first."""
    config = TargetConfig.from_folder(folder)
    model = _allocated(lambda: TargetModel(config, capture), folder)
    _fill(model, _renamed(_tensors(folder)), folder, dtype)
    return model.eval()


def load_drafter(
    folder: Path, target: TargetModel, *, dtype: torch.dtype = torch.float32
) -> Drafter:
    """Load a DFlash2 drafter and bind it to `target`, whose capture layers it must name."""
    config = DrafterConfig.from_folder(folder)
    if config.target_layer_ids != target.capture:
        raise InputError(
            f"drafter reads target layers {config.target_layer_ids}, target captures "
            f"{target.capture}",
            where=str(folder / "config.json"),
            hint=_ONE_CHECKPOINT,
        )
    check_pair(target.config, config, folder)
    n_features = len(target.capture) * target.config.hidden_size
    drafter = _allocated(
        lambda: Drafter(config, target.embed_tokens, target.lm_head, n_features), folder
    )
    _fill(drafter, _tensors(folder), folder, dtype)
    return drafter.eval()


class _Unset(TorchFunctionMode):
    """Parameters are allocated on `device` and left as they are: files fill them.

    `torch.device("meta")` and a random start would load torch's compiler, which takes longer than
    everything else about a small model.
    """

    def __init__(self, device: str) -> None:
        super().__init__()
        self._device = device

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        named = dict(kwargs or {})
        if getattr(func, "__module__", None) == nn.init.__name__:
            return named["tensor"] if "tensor" in named else args[0]
        if func in _ALLOCATING:
            named["device"] = self._device
        return func(*args, **named)


def _allocated(build: Callable[[], M], folder: Path) -> M:
    """The module with its parameters unset.

    Refuses a config whose model the folder's files cannot hold, before memory is taken.
    """
    with _Unset("meta"):
        parameters = set(build().parameters())
    n_parameters = sum(p.numel() for p in parameters)
    files = sorted(folder.glob("*.safetensors"))
    n_bytes = sum(file.stat().st_size for file in files)
    if n_parameters > n_bytes:  # even W12 stores a byte and a half each
        raise InputError(
            f"config.json describes {n_parameters:,} parameters, the files hold {n_bytes:,} bytes",
            where=str(files[0] if len(files) == 1 else folder),
            hint=_ONE_CHECKPOINT,
        )
    with _Unset("cpu"):
        return build()


def _tensors(folder: Path) -> Iterator[tuple[str, Tensor]]:
    for name, kind, array in read_folder_tensors(folder):
        if kind == "BF16":
            yield name, torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
        elif kind in _TORCH_DTYPES:
            yield name, torch.from_numpy(array)
        else:
            raise InputError(
                f"unsupported dtype {kind}", where=f"{folder}: {name}", hint=_ONE_CHECKPOINT
            )


def _renamed(tensors: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in tensors:
        prefix = next((p for p in _TARGET_PREFIXES if name.startswith(p)), "")
        yield name.removeprefix(prefix), tensor


def _fill(
    model: nn.Module, tensors: Iterator[tuple[str, Tensor]], folder: Path, dtype: torch.dtype
) -> None:
    """Copy every tensor into its parameter; missing, surplus or misshapen names are errors."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    storage = {name: p.data_ptr() for name, p in parameters.items()}
    filled: set[int] = set()
    with torch.no_grad():
        for name, tensor in tensors:
            if name not in parameters:
                raise InputError(
                    f"tensor not part of this architecture: {name}",
                    where=str(folder),
                    hint=_ONE_CHECKPOINT,
                )
            if parameters[name].shape != tensor.shape:
                raise InputError(
                    f"tensor {name} has shape {tuple(tensor.shape)}, config.json asks for "
                    f"{tuple(parameters[name].shape)}",
                    where=str(folder),
                    hint=_ONE_CHECKPOINT,
                )
            if not torch.isfinite(tensor).all():
                # its argmax would be token 0 forever, which looks like an answer
                raise InputError(
                    f"tensor {name} holds NaN or infinity", where=str(folder), hint=_ONE_CHECKPOINT
                )
            parameters[name].copy_(tensor)
            filled.add(storage[name])
    missing = sorted(name for name, at in storage.items() if at not in filled)
    if missing:
        raise InputError(
            f"tensors missing: {', '.join(missing[:4])}", where=str(folder), hint=_ONE_CHECKPOINT
        )
    model.to(dtype)
