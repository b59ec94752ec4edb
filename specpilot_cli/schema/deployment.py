"""Whose numbers these are: tokens and times of two deployments together are a projection.

Tokens per step belong to a target, a drafter and its block; step times also to an engine and a
device. A recording holds no device, because what is accepted does not depend on one.
"""

from __future__ import annotations

from dataclasses import dataclass

from specpilot_cli.schema.batch_times import BatchStepTimes
from specpilot_cli.schema.lattice import LatticeMetadata
from specpilot_cli.schema.step_profile import StepProfile, StepTimeCurve

OTHER_BLOCK_TIMES = "drafting takes another time there; time steps at the recorded block"


@dataclass(frozen=True, slots=True)
class Deployment:
    """An engine's name, the hashes of its models (None: not said), and drafted blocks, ascending.

    kind: of the drafter, where a recording says it.
    """

    engine: str
    target_sha256: str | None
    drafter_sha256: str | None
    blocks: tuple[int, ...] = ()
    kind: str | None = None

    @property
    def block_text(self) -> str:
        """The blocks in words."""
        return f"block {' and '.join(str(block) for block in self.blocks) or 'not said'}"

    @property
    def text(self) -> str:
        """All of it but the hashes, in words."""
        kind = "" if self.kind is None else f", {self.kind}"
        return f"{self.engine}{kind}, {self.block_text}"


def of_recording(metadata: LatticeMetadata) -> Deployment:
    """Who made the lattices or trees."""
    engine = metadata.engine.split()[0] if metadata.engine.strip() else metadata.engine
    return Deployment(
        engine, metadata.target_sha256, metadata.drafter_sha256, (metadata.block,),
        metadata.drafter_kind,
    )  # fmt: skip


def of_curve(curve: StepTimeCurve) -> Deployment:
    """Whose steps were timed."""
    blocks = {point.draft_block for point in curve.points if point.draft_block is not None}
    return Deployment(
        curve.engine.name, curve.target.sha256, curve.drafter.sha256, tuple(sorted(blocks))
    )


def of_batch_times(times: BatchStepTimes) -> Deployment:
    """Whose batches were timed; its drafted blocks are the times' own drivers."""
    return Deployment(times.engine.name, times.target.sha256, times.drafter.sha256)


def of_profile(profile: StepProfile) -> Deployment:
    """Whose step was profiled."""
    drafter, block = profile.drafter, profile.draft_block
    return Deployment(
        profile.engine.name, profile.target.sha256, None if drafter is None else drafter.sha256,
        () if block is None else (block,),
    )  # fmt: skip


def projected_because(tokens: Deployment, times: Deployment, *, what: str) -> tuple[str, ...]:
    """Why tokens of one with times of the other are a projection; empty for one deployment.

    what: the times in words, such as `the step times`. Weights that the times do not name count as
    other ones: nobody measured the two together.
    """
    found = []
    if tokens.engine != times.engine:
        found.append(f"τ is of {tokens.engine}, {what} of {times.engine}")
    for role, own, other in (
        ("target", tokens.target_sha256, times.target_sha256),
        ("drafter", tokens.drafter_sha256, times.drafter_sha256),
    ):
        if other is None:
            found.append(f"{what} do not say which {role}'s weights ran")
        elif own != other:
            found.append(f"{what} are of another {role}")
    return tuple(found)


def block_note(tokens: Deployment, times: Deployment, *, what: str, consequence: str) -> str | None:
    """What to say where drafting was timed at another block than the one recorded; else None.

    An EAGLE drafter has no block: what its recordings call one is the depth of its trees.
    """
    if tokens.kind == "eagle" or not times.blocks or times.blocks == tokens.blocks:
        return None
    return f"the lattices are of {tokens.block_text}, {what} of {times.block_text}: {consequence}"
