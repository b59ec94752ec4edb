"""Recorded step-time curves: bundled ones by name, others by path."""

from __future__ import annotations

import difflib
from pathlib import Path

from specpilot_cli.errors import InputError
from specpilot_cli.io.json_file import read_json_model
from specpilot_cli.paths import bundled
from specpilot_cli.schema.step_profile import StepProfile, StepTimeCurve


def step_time_names() -> list[str]:
    """Names of the bundled step-time curves, sorted."""
    return sorted(path.stem for path in (bundled("profiles") / "step_times").glob("*.json"))


def load_step_times(name_or_path: str, *, where: str = "--step-times") -> StepTimeCurve:
    """The curve in that file, or the bundled one of that name; `where` names it.

    Raises `InputError` listing the bundled names when it is neither.
    """
    path = Path(name_or_path)
    if path.is_file():
        return read_json_model(path, StepTimeCurve)
    names = step_time_names()
    if name_or_path in names:
        return read_json_model(
            bundled("profiles") / "step_times" / f"{name_or_path}.json", StepTimeCurve
        )
    close = difflib.get_close_matches(name_or_path, names, n=1)
    guess = f"did you mean `{close[0]}`? " if close else ""
    raise InputError(
        f"no step times: `{name_or_path}` is neither a file nor a bundled curve",
        where=where,
        hint=f"{guess}bundled: {', '.join(names)}; those of `simulate batch` have another form",
    )


def with_step_time(profile: StepProfile, curve: StepTimeCurve) -> StepProfile:
    """`profile` with the step time that `curve` recorded for the same step without a profiler.

    Only a recorded point counts, never an interpolated one: the overhead factor is a difference
    of a few percent. Raises `InputError` if the curve is of another engine, device, data type,
    draft block or number of requests, or has no such point.
    """
    here, there = profile.device, curve.device
    if profile.requests != 1:
        raise InputError(
            f"step times are of one request, the profile of {profile.requests}",
            where=curve.name,
            hint="profile the server with one request in flight",
        )
    for what, own, other in (
        ("engine", profile.engine.name, curve.engine.name),
        ("device", here.gpu_profile or here.name, there.gpu_profile or there.name),
        ("data type", profile.dtype, curve.dtype),
    ):
        if own != other:
            raise InputError(
                f"the step times are of another {what}: {other}, the profile's is {own}",
                where=curve.name,
                hint="time the profiled server itself, without the profiler",
            )
    if profile.mode == "ar":
        return profile.model_copy(update={"t_step_s": curve.ar_step_s})
    blocks = {None, profile.draft_block}
    found = [p for p in curve.points if p.rows == profile.rows and p.draft_block in blocks]
    if not found:
        known = ", ".join(_point(p.rows, p.draft_block) for p in curve.points)
        raise InputError(
            f"no step time recorded for {_point(profile.rows, profile.draft_block)}",
            where=curve.name,
            hint=f"recorded: {known}; time the profiled step without the profiler",
        )
    return profile.model_copy(update={"t_step_s": found[0].step_s})


def recorded_here(profile: StepProfile, curve: StepTimeCurve) -> bool:
    """Whether `curve` is of the engine, device, data type and one request of `profile`.

    A ratio of steps of two machines would tell nothing.
    """
    here, there = profile.device, curve.device
    own = (profile.engine.name, here.gpu_profile or here.name, profile.dtype)
    other = (curve.engine.name, there.gpu_profile or there.name, curve.dtype)
    return profile.requests == 1 and own == other


def _point(rows: int, block: int | None) -> str:
    return f"{rows} rows" if block is None else f"{rows} rows with block {block}"
