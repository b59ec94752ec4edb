"""What happened to the layers of the models that a process loads with W12; for `/server_info`."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Literal

Form = Literal["kernel", "decoded reference"]
KERNEL: Form = "kernel"
DECODED: Form = "decoded reference"
Checkpoint = Literal["bf16", "w12"]


@dataclass(frozen=True, slots=True)
class Encoded:
    """One weight that is W12 now. Bytes: of its BF16 form before, and of all W12 tensors after.

    is_copy: the BF16 weight stays beside it. layers: how many have their rows in it.
    """

    weights: int
    bf16_bytes: int
    encoded_bytes: int
    escapes: int
    verified: bool
    form: Form
    seconds: float
    is_copy: bool = False
    layers: int = 1

    def as_copy(self) -> Encoded:
        """The same, with its BF16 weight kept."""
        return replace(self, is_copy=True)


@dataclass(slots=True)
class Facts:
    """One per process, and of one tensor-parallel rank.

    encoded: name -> weight, by its first layer. kept: name -> why it stays BF16. The drafter's
    names begin with "drafter.". apart: why layers that could be one weight are not. chained: norms
    and activations by kernels of ours. decoded: tensors that were read from W12 records. tp_size:
    ranks that share each layer. asked: SGLang built a model with W12.
    """

    encoded: dict[str, Encoded] = field(default_factory=dict)
    kept: dict[str, str] = field(default_factory=dict)
    apart: set[str] = field(default_factory=set)
    checkpoint: Checkpoint = "bf16"
    chained: int = 0
    decoded: int = 0
    tp_size: int = 1
    asked: bool = False
    _names: set[str] = field(default_factory=set)

    def claim(self, name: str) -> str:
        """Return a name for a layer that no other has: some models give their layers none."""
        base, number = name or "layer", 1
        name = base
        while name in self._names:
            number += 1
            name = f"{base}#{number}"
        self._names.add(name)
        return name

    def keep(self, name: str, reason: str) -> None:
        """Note that a layer stays BF16."""
        self.encoded.pop(name, None)
        self.kept[name] = reason

    def add(self, name: str, layer: Encoded) -> None:
        """Note that a layer is W12 now."""
        self.kept.pop(name, None)
        self.encoded[name] = layer

    def report(self) -> dict[str, Any] | str:
        """The facts of `PluginState.active["w12"]`, or why W12 is not active."""
        if not self.asked:
            return (
                "the server runs without it: give `--quantization w12`, or a model folder that "
                "`specpilot convert-w12` wrote"
            )
        if self.checkpoint == "w12" and not self.decoded:
            return "the folder's records were not decoded: its weights are not loaded"
        if not self.encoded:
            return f"no layer could be encoded: {self._reasons() or 'the model has no such layer'}"
        layers = list(self.encoded.values())
        forms = {layer.form for layer in layers}
        return {
            "layers": sum(layer.layers for layer in layers),
            "fused": sum(layer.layers > 1 for layer in layers),
            "not_fused": sorted(self.apart),
            "chained": self.chained,
            "weights": sum(layer.weights for layer in layers),
            "bf16_bytes": sum(layer.bf16_bytes for layer in layers),
            "encoded_bytes": sum(layer.encoded_bytes for layer in layers),
            "freed_bytes": sum(
                (0 if layer.is_copy else layer.bf16_bytes) - layer.encoded_bytes for layer in layers
            ),
            "escapes": sum(layer.escapes for layer in layers),
            "verified": all(layer.verified for layer in layers),
            "form": forms.pop() if len(forms) == 1 else "mixed",
            "checkpoint": self.checkpoint,
            "kept_bf16": [f"{name}: {reason}" for name, reason in sorted(self.kept.items())],
            "tp_size": self.tp_size,
            "seconds": round(sum(layer.seconds for layer in layers), 3),
        }

    def summary(self) -> str:
        """One line for the log."""
        found = self.report()
        if isinstance(found, str):
            return found
        before, after = (f"{found[key] / 1e9:.3f}" for key in ("bf16_bytes", "encoded_bytes"))
        verified = "verified bit for bit" if found["verified"] else "not verified"
        return (
            f"{found['layers']} layers, {before} GB to {after} GB, {verified}, {found['form']}, "
            f"{found['seconds']:.1f} s; {len(self.kept)} stay BF16"
        )

    def _reasons(self) -> str:
        found = sorted(set(self.kept.values()))
        return "; ".join(found[:3])


FACTS = Facts()
"""Of this process."""
