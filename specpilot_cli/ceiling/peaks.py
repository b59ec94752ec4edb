"""Which peak rates a ceiling uses, and where they come from.

Data-sheet peaks come first, measured ones are the alternative; where a device has only one kind
of a number, that one is used and named. An unknown device is an error, never a guess.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from specpilot_cli.errors import InputError
from specpilot_cli.io.gpu_profiles import gpu_files, load_gpu
from specpilot_cli.io.json_file import read_text
from specpilot_cli.io.yaml_file import read_yaml_model
from specpilot_cli.schema.gpu_profile import (
    ComputeType,
    GpuProfile,
    PeakKind,
    PeakRates,
    SourcedNumber,
)
from specpilot_cli.schema.step_profile import StepProfile

__all__ = ["Peaks", "gpu_names", "load_gpu", "load_peaks_file", "peaks_for", "prefer"]

_OTHER: dict[PeakKind, PeakKind] = {"datasheet": "measured", "measured": "datasheet"}


@dataclass(frozen=True, slots=True)
class Peaks:
    """Peak rates of one device, read with a preference for one kind of number."""

    title: str
    rates: PeakRates
    prefer: PeakKind = "datasheet"

    def bandwidth(self) -> SourcedNumber:
        """Read bandwidth in bytes/s, of the preferred kind where there is one."""
        number = self.rates.bandwidth(self.prefer) or self.rates.bandwidth(_OTHER[self.prefer])
        if number is None:  # the schema asks for at least one
            raise InputError(
                f"`{self.title}` states no read bandwidth",
                hint="give --gpu NAME, or --peaks FILE with a bandwidth",
            )
        return number

    def compute(self, dtype: ComputeType) -> SourcedNumber:
        """Dense FLOP/s for `dtype`. Raises `InputError` when the device states none."""
        number = self.rates.compute(dtype, self.prefer)
        number = number or self.rates.compute(dtype, _OTHER[self.prefer])
        if number is None:
            known = ", ".join(sorted(self.rates.flops_per_s)) or "none"
            raise InputError(
                f"`{self.title}` states no {dtype} arithmetic rate",
                hint=f"it has: {known}; add the number to a peaks file and pass it with --peaks",
            )
        return number

    def as_measured(self) -> Peaks | None:
        """The same device read through its measured numbers, or None if that changes nothing."""
        if self.prefer == "measured":
            return None
        numbers = [self.rates.read_bytes_per_s, *self.rates.flops_per_s.values()]
        both = any({n.kind for n in kinds} == {"datasheet", "measured"} for kinds in numbers)
        return Peaks(self.title, self.rates, "measured") if both else None


def gpu_names() -> list[str]:
    """Names of the known device profiles, bundled and measured here, sorted."""
    return list(gpu_files())


def load_peaks_file(path: Path) -> Peaks:
    """Peaks from a YAML or JSON file: a device profile, or only its `peaks` block."""
    # Only a whole profile has a version; its `peaks` block alone is the other accepted form.
    if "schema_version" in read_text(path):
        profile = read_yaml_model(path, GpuProfile)
        return Peaks(profile.title, profile.peaks)
    return Peaks(path.name, read_yaml_model(path, PeakRates))


def peaks_for(profile: StepProfile, *, gpu: str | None = None, file: Path | None = None) -> Peaks:
    """Peaks for `profile`: `file`, else `gpu`, else what the profile itself says.

    Raises `InputError` when two are given or none is found.
    """
    if gpu is not None and file is not None:
        raise InputError("--gpu and --peaks exclude each other", hint="give one of them")
    if file is not None:
        return load_peaks_file(file)
    if gpu is not None:
        known = load_gpu(gpu)
        return Peaks(known.title, known.peaks)
    device = profile.device
    if device.peaks is not None:
        return Peaks(device.name, device.peaks)
    if device.gpu_profile is not None:
        known = load_gpu(device.gpu_profile)
        return Peaks(known.title, known.peaks)
    raise InputError(
        f"the profile has no peak rates for its device `{device.name}`",
        where="device.peaks",
        hint=f"name the device with --gpu ({', '.join(gpu_names())}) or pass --peaks FILE",
    )


def prefer(peaks: Peaks, *, measured: bool) -> Peaks:
    """`peaks` read through measured numbers first, if `measured`.

    Raises `InputError` where the device has none.
    """
    if not measured:
        return peaks
    numbers = [peaks.rates.read_bytes_per_s, *peaks.rates.flops_per_s.values()]
    if not any(number.kind == "measured" for kinds in numbers for number in kinds):
        raise InputError(
            f"no peak of `{peaks.title}` was measured",
            where="--measured-peaks",
            hint="`specpilot doctor --measure` measures the GPU of this machine",
        )
    return Peaks(peaks.title, peaks.rates, "measured")
