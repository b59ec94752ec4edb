"""`--resume` where nothing is left to do: the target is there, and is what would be written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from specpilot_cli.convert_w12.inspect import inspect_folder
from specpilot_cli.convert_w12.plan import EXCLUDED, GROWS, NOT_INCLUDED, Outcome
from specpilot_cli.convert_w12.shards import PlannedShard
from specpilot_cli.convert_w12.verify import verify_folder
from specpilot_cli.errors import InputError
from specpilot_cli.io.hf_folder import HfFolder
from specpilot_cli.io.w12_folder import read_manifest
from specpilot_cli.schema.w12_manifest import W12Manifest, W12Tensor
from specpilot_cli.ui import Reporter
from specpilot_kernels.w12.stripes import StripeCodec


@dataclass(frozen=True, slots=True)
class Finished:
    """A folder that was checked against its source and against what was asked for."""

    manifest: W12Manifest
    outcomes: tuple[Outcome, ...]


def finished_before(
    folder: HfFolder,
    target: Path,
    shards: Sequence[PlannedShard],
    *,
    threads: int,
    codec: StripeCodec | None,
    reporter: Reporter,
) -> Finished:
    """Return what the finished folder `target` holds, verified bit for bit against `folder`.

    InputError: it is damaged, of another source, or made with other choices.
    """
    manifest = read_manifest(target)
    other = _other_choice(manifest, shards)
    if other is not None:
        raise InputError(
            f"`{target}` is finished, but it is another conversion: {other}",
            where=str(target),
            hint="choose another folder, or use --force to replace it",
        )
    found = verify_folder(target, folder.path, threads=threads, codec=codec, reporter=reporter)
    if found.problems:
        first = found.problems[0]
        raise InputError(
            f"`{target}` is finished, but not a conversion of this source: "
            f"{first.kind} `{first.name}`: {first.what}",
            where=str(target),
            hint="choose another folder, or use --force to replace it",
        )
    return Finished(manifest, inspect_folder(target)[0])


def _other_choice(manifest: W12Manifest, shards: Sequence[PlannedShard]) -> str | None:
    there = {tensor.name: tensor for tensor in manifest.tensors}
    for shard in shards:
        for planned in shard.tensors:
            name = planned.info.name
            tensor = there.pop(name, None)
            if tensor is None:
                return f"tensor `{name}` is missing"
            if tensor.shard != shard.name:
                return f"`{name}` lies in `{tensor.shard}`, not in `{shard.name}`"
            if not _as_planned(tensor, planned.reason):
                return _other_selection(tensor, planned.reason)
    if there:
        return f"tensor `{next(iter(there))}` is not in the source"
    return None


def _other_selection(tensor: W12Tensor, reason: str | None) -> str:
    """Return how what became of a tensor differs from what was asked for."""
    for said, word in ((reason, "without"), (tensor.reason, "with")):
        if said is not None and said.startswith(EXCLUDED):
            pattern = said.removeprefix(EXCLUDED).strip(" `")
            return f"it was made {word} `--exclude '{pattern}'` (`{tensor.name}`)"
        if said == NOT_INCLUDED:
            return f"it was made {word} an `--include` that leaves out `{tensor.name}`"
    return f"`{tensor.name}` is {tensor.encoding} ({tensor.reason or 'converted'})"


def _as_planned(tensor: W12Tensor, reason: str | None) -> bool:
    if reason is not None:
        return tensor.reason == reason
    return tensor.encoding == "w12" or (tensor.reason or "").startswith(GROWS)
