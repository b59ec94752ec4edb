"""How the tensors of a checkpoint are divided among the output shards."""

from __future__ import annotations

from dataclasses import dataclass

from specpilot_cli.convert_w12.plan import Selection, reason_to_keep
from specpilot_cli.io.hf_folder import SINGLE_NAME, HfFolder
from specpilot_cli.io.safetensors_stream import TensorInfo
from specpilot_cli.io.shard_writer import TensorSpec
from specpilot_kernels.w12 import layout
from specpilot_kernels.w12.stored import encoded_specs

# Escapes of ordinary weights are a tenth of this.
_EXPECTED_ESCAPE_SHARE = 2e-3


@dataclass(frozen=True, slots=True)
class PlannedTensor:
    """A tensor of the source: which of its files holds it, and why it must stay, if it must."""

    source: str
    info: TensorInfo
    reason: str | None

    def longest(self) -> list[TensorSpec]:
        """Return (name, dtype, shape) of what it may become, at the longest."""
        if self.reason is not None:
            return [(self.info.name, self.info.dtype, self.info.shape)]
        return encoded_specs(self.info.name, self.info.shape, self.info.nbytes // 2)

    def expected_bytes(self) -> int:
        """Return about how many bytes it will take."""
        if self.reason is not None:
            return self.info.nbytes
        escapes = int(self.info.nbytes // 2 * _EXPECTED_ESCAPE_SHARE)
        return min(self.info.nbytes, layout.encoded_tensor_nbytes(self.info.shape, escapes))


@dataclass(frozen=True, slots=True)
class PlannedShard:
    """An output shard and its tensors, in the order of the source."""

    name: str
    tensors: tuple[PlannedTensor, ...]

    def expected_bytes(self) -> int:
        """Return about how many bytes its tensors will take."""
        return sum(tensor.expected_bytes() for tensor in self.tensors)


def plan_shards(
    folder: HfFolder, selection: Selection, shard_bytes: int | None = None
) -> tuple[PlannedShard, ...]:
    """Divide the tensors as the source does, or anew with at most `shard_bytes` of tensors each.

    Tensors count as BF16, since nobody knows before the conversion which of them will shrink; a
    larger tensor gets a shard of its own.
    """
    tensors = [
        PlannedTensor(shard, info, reason_to_keep(info, folder.config, selection))
        for shard, info in folder.tensors
    ]
    if shard_bytes is None:
        return tuple(
            PlannedShard(name, tuple(t for t in tensors if t.source == name))
            for name in folder.shards
        )
    groups: list[list[PlannedTensor]] = [[]]
    room = shard_bytes
    for tensor in tensors:
        if groups[-1] and tensor.info.nbytes > room:
            groups.append([])
            room = shard_bytes
        groups[-1].append(tensor)
        room -= tensor.info.nbytes
    return tuple(
        PlannedShard(_name(number, len(groups)), tuple(group))
        for number, group in enumerate(groups, start=1)
    )


def _name(number: int, count: int) -> str:
    return SINGLE_NAME if count == 1 else f"model-{number:05}-of-{count:05}.safetensors"
