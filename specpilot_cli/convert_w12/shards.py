"""How the tensors of a checkpoint are divided among the output shards, and the disk they need."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from specpilot_cli.convert_w12.output import ALIGNMENT
from specpilot_cli.convert_w12.plan import (
    Selection,
    check_selection,
    reason_to_keep,
    refuse_name_clash,
    refuse_quantised,
)
from specpilot_cli.io.append_file import AHEAD_BYTES, CHUNK_BYTES
from specpilot_cli.io.hf_folder import SINGLE_NAME, HfFolder
from specpilot_cli.io.safetensors_stream import SafetensorsFile, TensorInfo
from specpilot_cli.io.shard_writer import TensorSpec, reserved_bytes
from specpilot_kernels.w12.stored import encoded_specs, part_shapes

# For file headers, the manifest and the file system's own needs.
_MARGIN_BYTES = 64 << 20


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

    def most_waiting_bytes(self) -> int:
        """Return the most bytes of it that wait in temporary files until its shard ends."""
        if self.info.nbytes % ALIGNMENT:
            return self.info.nbytes
        if self.reason is not None:
            return 0
        # A tensor that W12 would not shrink is stored as it is, so lists have this much at most.
        records = part_shapes(self.info.shape, 0)["records"]
        return max(0, self.info.nbytes - prod(records))


@dataclass(frozen=True, slots=True)
class PlannedShard:
    """An output shard and its tensors, in the order of the source."""

    name: str
    tensors: tuple[PlannedTensor, ...]

    def longest(self) -> list[TensorSpec]:
        """Return (name, dtype, shape) of all that may be in its header, at the longest."""
        return [spec for tensor in self.tensors for spec in tensor.longest()]

    def most_bytes(self) -> int:
        """Return the most bytes its tensors may take: none is ever stored larger than it was."""
        return sum(tensor.info.nbytes for tensor in self.tensors)

    def most_waiting_bytes(self) -> int:
        """Return the most bytes that wait in temporary files beside it."""
        return sum(tensor.most_waiting_bytes() for tensor in self.tensors)


@dataclass(frozen=True, slots=True)
class DiskNeed:
    """What must be free for a conversion that no content of the weights can make fail.

    content_bytes: all files at their longest, and the temporary ones of one shard. reserve_bytes:
    for headers, the manifest, the file system, and room that is taken ahead of writing.
    """

    content_bytes: int
    reserve_bytes: int

    @property
    def total_bytes(self) -> int:
        """Both together."""
        return self.content_bytes + self.reserve_bytes


def disk_need(shards: Sequence[PlannedShard], carried_bytes: int) -> DiskNeed:
    """Return what `shards` and the files carried over need at most; see `DiskNeed`."""
    written = [shard.most_bytes() for shard in shards]
    waiting = max((shard.most_waiting_bytes() for shard in shards), default=0)
    ahead = AHEAD_BYTES if max(written, default=0) >= CHUNK_BYTES else 0
    return DiskNeed(sum(written) + waiting + carried_bytes, _MARGIN_BYTES + ahead)


def plan_conversion(
    folder: HfFolder, selection: Selection, shard_bytes: int | None = None
) -> tuple[PlannedShard, ...]:
    """Return the shards of a conversion that can be done, see `plan_shards`.

    InputError: a quantised source, a pattern without a match, two tensors that would have one
    name, a header longer than safetensors allows.
    """
    refuse_quantised(folder)
    check_selection(selection, folder)
    shards = plan_shards(folder, selection, shard_bytes)
    converting = (t.info.name for shard in shards for t in shard.tensors if t.reason is None)
    refuse_name_clash(folder, converting)
    for shard in shards:
        reserved_bytes(shard.name, shard.longest(), shard_metadata(folder, shard))
    return shards


def shard_metadata(folder: HfFolder, shard: PlannedShard) -> dict[str, str]:
    """Return `__metadata__` for a shard: that of the source file where its tensors begin."""
    first = shard.tensors[0].source if shard.tensors else folder.shards[0]
    if shard.name in folder.shards and not shard.tensors:
        first = shard.name
    with SafetensorsFile(folder.path / first) as file:
        return file.metadata


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
