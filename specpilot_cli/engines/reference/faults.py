"""Deliberate faults of the reference engine, so that an audit can be seen to reject (paper §6.2).

Each class is one thing that real engines get wrong, and hooks into a decode pass where that
happens. A fault acts on served tokens alone: scoring and drafting never see one. A server that
runs with one says so in `/server_info`. torch is imported where it is used, not with the module.
"""

from __future__ import annotations

import copy
import math
import zlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from functools import lru_cache
from typing import TYPE_CHECKING, Any, ClassVar, get_type_hints

import numpy as np

from specpilot_cli.errors import InputError
from specpilot_kernels.trees import row_parents

if TYPE_CHECKING:
    from torch import Tensor

    from specpilot_cli.engines.reference.decode import Slot
    from specpilot_cli.engines.reference.model import RowOutput, TargetModel
    from specpilot_cli.engines.reference.state import RequestState
    from specpilot_kernels.trees import Tree


_PROMPT_IDS = 16  # that tell one prompt from another


@dataclass(frozen=True, slots=True)
class Fault:
    """No fault: every hook leaves things as they are. Base of all others."""

    name: ClassVar[str] = "none"

    def verifier(self, model: TargetModel) -> TargetModel:
        """The model that verifies; called once per engine."""
        return model

    def distort(self, logits: Tensor, slots: Sequence[Slot], trees: Sequence[Tree | None]) -> None:
        """Change `logits` float32 [R, V] in place before the argmax of each row is taken.

        Rows are those of the slots in order, the anchor first and then its tree's nodes.
        """

    def emit(self, slot: Slot, new: list[int]) -> list[int]:
        """The tokens to append to `slot`'s output instead of `new`."""
        return new

    def commit(
        self,
        model: TargetModel,
        state: RequestState,
        out: RowOutput,
        segment: int,
        path: list[int],
        tree: Tree | None,
    ) -> None:
        """Commit the rows `path` of a pass to `state`."""
        model.commit(state, out, segment, path)

    def describe(self) -> dict[str, Any]:
        """The fault as a JSON object."""
        return {"kind": self.name, **asdict(self)}

    @property
    def argument(self) -> str:
        """What `parse_fault` reads back."""
        values = ",".join(f"{key}={value!r}" for key, value in asdict(self).items())
        return f"{self.name}:{values}" if values else self.name


@dataclass(frozen=True, slots=True)
class LogitFault(Fault):
    """`bias` on the logits of every `every`-th token id from output position `after` on.

    The fault of the paper: 2 on every 7th id after 2048 tokens.
    """

    after: int
    every: int = 7
    bias: float = 2.0
    name: ClassVar[str] = "logit-bias"

    def __post_init__(self) -> None:
        if self.after < 0 or self.every < 1:
            raise InputError(
                "fault needs after >= 0 and every >= 1, "
                f"got after={self.after}, every={self.every}",
                hint="leave out --fault-after for no fault",
            )
        if not math.isfinite(self.bias):
            raise InputError(
                f"the bias of a fault must be a finite number, got {self.bias}",
                hint="give a number of nats, such as 2",
            )

    def distort(self, logits: Tensor, slots: Sequence[Slot], trees: Sequence[Tree | None]) -> None:
        """Bias the rows that choose an output token at or after the fault's position."""
        offset = 0
        for slot, tree in zip(slots, trees, strict=True):
            depths = [0] if tree is None else [0, *tree.depth.tolist()]
            for row, depth in enumerate(depths, start=offset):
                if len(slot.output_ids) + depth >= self.after:
                    logits[row, :: self.every] += self.bias
            offset += len(depths)

    def describe(self) -> dict[str, Any]:
        """The fault as a JSON object."""
        return {
            "kind": "logit_bias",
            "after_output_position": self.after,
            "every_token_ids": self.every,
            "bias": self.bias,
        }


@dataclass(frozen=True, slots=True)
class PrecisionFault(Fault):
    """Decode passes read weights rounded to `mantissa_bits`; prompts are prefilled exactly.

    A fast low-precision check taken for the exact pass. 3 bits are the 8-bit view of W12.
    """

    mantissa_bits: int = 3
    name: ClassVar[str] = "low-precision"

    def __post_init__(self) -> None:
        if not 0 <= self.mantissa_bits <= 7:
            raise InputError(f"BF16 has 0 to 7 mantissa bits to keep, got {self.mantissa_bits}")

    def verifier(self, model: TargetModel) -> TargetModel:
        """A copy of `model` with every matrix rounded to the nearest value of that width."""
        import torch

        steps = 2.0 ** (self.mantissa_bits + 1)
        rounded = copy.deepcopy(model)
        with torch.no_grad():
            for weight in rounded.parameters():
                if weight.dim() > 1:
                    mantissa, exponent = torch.frexp(weight.float())
                    weight.copy_(torch.ldexp((mantissa * steps).round() / steps, exponent))
        return rounded


@dataclass(frozen=True, slots=True)
class WrongIdFault(Fault):
    """One token in 1 / `rate` goes out as another id, and decoding continues from it.

    Only the last token of a step is changed (the one after the accepted drafts), so that each
    wrong id is one wrong token and nothing after it. Which positions are struck follows from the
    seed and the beginning of the prompt alone.
    """

    rate: float = 1e-4
    seed: int = 0
    name: ClassVar[str] = "wrong-id"

    def __post_init__(self) -> None:
        if not 0.0 < self.rate <= 1.0:
            raise InputError(f"the rate of wrong ids must lie in (0, 1], got {self.rate}")

    def armed(self, prompt_ids: Sequence[int], limit: int) -> tuple[int, ...]:
        """Output positions below `limit` whose step is struck, for one prompt.

        The same places in the text are struck where a prompt already holds part of the output.
        """
        n = len(prompt_ids)
        struck = _armed(self.rate, self.seed, _digest(prompt_ids), n + limit)
        return tuple(at - n for at in struck if at >= n)

    def emit(self, slot: Slot, new: list[int]) -> list[int]:
        """`new` with another last token if one of its positions is armed."""
        job, start = slot.job, len(slot.output_ids)
        end = start + len(new)
        armed = self.armed(job.input_ids, job.max_new_tokens)
        if slot.finish_reason is not None or not any(start <= at < end for at in armed):
            return new
        at = len(job.input_ids) + end
        rng = np.random.default_rng((self.seed, _digest(job.input_ids), at))
        never = {new[-1], *job.stop_ids}
        wrong = next(i for i in rng.integers(1, 256, size=64).tolist() if i not in never)
        return [*new[:-1], wrong]


@dataclass(frozen=True, slots=True)
class KvSlotFault(Fault):
    """Keys land one slot too far once `after` tokens are cached; values land where they should.

    Every key is then paired with the value of the token after it.
    """

    after: int = 1000
    name: ClassVar[str] = "kv-slot"

    def commit(
        self,
        model: TargetModel,
        state: RequestState,
        out: RowOutput,
        segment: int,
        path: list[int],
        tree: Tree | None,
    ) -> None:
        """Commit, then move the new keys up by one slot."""
        start = state.length
        before = state.kv[:, 0, start].clone()
        model.commit(state, out, segment, path)
        if start < self.after:
            return
        end = min(state.length + 1, state.capacity)
        state.kv[:, 0, start + 1 : end] = state.kv[:, 0, start : end - 1].clone()
        state.kv[:, 0, start] = before


@dataclass(frozen=True, slots=True)
class StaleStateFault(Fault):
    """The recurrent state keeps the first rejected draft: it is not rolled back to the path."""

    name: ClassVar[str] = "stale-state"

    def commit(
        self,
        model: TargetModel,
        state: RequestState,
        out: RowOutput,
        segment: int,
        path: list[int],
        tree: Tree | None,
    ) -> None:
        """Commit, with one rejected row behind the path in every recurrent layer."""
        from specpilot_cli.engines.reference.state import advanced

        before = state.recurrent
        model.commit(state, out, segment, path)
        rejected = [] if tree is None else np.flatnonzero(row_parents(tree) == path[-1]).tolist()
        if rejected:
            rows = [out.offsets[segment] + row for row in (*path, rejected[0])]
            state.recurrent = advanced(before, out.record, rows)


@dataclass(frozen=True, slots=True)
class TemperatureFault(Fault):
    """Tokens are sampled at `temperature` whenever `at_running` requests share a pass.

    Alone, or in a smaller batch, every request is answered greedily.
    """

    temperature: float = 0.7
    at_running: int = 8
    seed: int = 0
    name: ClassVar[str] = "temperature"

    def __post_init__(self) -> None:
        if not 0.0 < self.temperature < 100.0 or self.at_running < 1:
            raise InputError(
                "the fault needs a temperature above 0 and below 100 and at_running >= 1, "
                f"got {self.temperature} and {self.at_running}"
            )

    def distort(self, logits: Tensor, slots: Sequence[Slot], trees: Sequence[Tree | None]) -> None:
        """Add Gumbel noise: the argmax is then a sample of softmax(logits / temperature)."""
        if len(slots) < self.at_running:
            return
        progress = sum(len(slot.output_ids) for slot in slots)
        rng = np.random.default_rng((self.seed, progress, len(logits)))
        noise = rng.gumbel(scale=self.temperature, size=tuple(logits.shape))
        logits += logits.new_tensor(noise)


FAULTS: dict[str, type[Fault]] = {
    kind.name: kind
    for kind in (
        LogitFault, PrecisionFault, WrongIdFault, KvSlotFault, StaleStateFault, TemperatureFault,
    )
}  # fmt: skip


def parse_fault(text: str) -> Fault:
    """Read `NAME` or `NAME:KEY=VALUE,...`; InputError names what is unknown or missing."""
    name, _, rest = text.partition(":")
    if name not in FAULTS:
        raise InputError(
            f"unknown fault `{name}`", where="--fault", hint=f"one of: {', '.join(FAULTS)}"
        )
    kind = FAULTS[name]
    types = {key: value for key, value in get_type_hints(kind).items() if key in _keys(kind)}
    given: dict[str, Any] = {}
    for part in filter(None, rest.split(",")):
        key, _, value = part.partition("=")
        if key not in types:
            known = ", ".join(types) or "none"
            raise InputError(
                f"the fault `{name}` has no `{key}`", where="--fault", hint=f"it has: {known}"
            )
        try:
            given[key] = types[key](value)
        except ValueError as error:
            raise InputError(
                f"`{key}` of the fault `{name}` is `{value}`, not a number", where="--fault"
            ) from error
    try:
        return kind(**given)
    except TypeError as error:
        raise InputError(
            f"the fault `{name}` lacks a value: {error}",
            where="--fault",
            hint=f"write it as {name}:{next(iter(types))}=N",
        ) from error


def _keys(kind: type[Fault]) -> set[str]:
    return {field.name for field in fields(kind)}


def _digest(prompt_ids: Sequence[int]) -> int:
    beginning = np.asarray(prompt_ids[:_PROMPT_IDS], dtype=np.int64)
    return zlib.crc32(beginning.tobytes())


@lru_cache(maxsize=4096)
def _armed(rate: float, seed: int, digest: int, limit: int) -> tuple[int, ...]:
    rng = np.random.default_rng((seed, digest))
    found = []
    at = int(rng.geometric(rate)) - 1
    while at < limit:
        found.append(at)
        at += int(rng.geometric(rate))
    return tuple(found)
