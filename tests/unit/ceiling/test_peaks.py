"""Choosing peak rates: bundled devices, files, and what a profile carries itself."""

from __future__ import annotations

import json

import pytest
import yaml

from specpilot_cli.ceiling.peaks import Peaks, gpu_names, load_gpu, load_peaks_file, peaks_for
from specpilot_cli.errors import InputError
from specpilot_cli.schema.gpu_profile import PeakRates


def test_every_bundled_device_loads_under_its_file_name():
    names = gpu_names()
    assert {"h100-sxm5", "h200", "rtx-pro-6000-server"} <= set(names)
    for name in names:
        profile = load_gpu(name)
        assert profile.name == name
        numbers = [*profile.peaks.read_bytes_per_s]
        numbers += [n for rates in profile.peaks.flops_per_s.values() for n in rates]
        assert all(number.source for number in numbers)


def test_aliases_and_case_do_not_matter():
    assert load_gpu("NVIDIA H100 80GB HBM3").name == "h100-sxm5"
    assert load_gpu("H200").name == "h200"


def test_aliases_are_unique():
    seen: list[str] = []
    for name in gpu_names():
        profile = load_gpu(name)
        seen += [profile.name.casefold(), *(alias.casefold() for alias in profile.aliases)]
    assert len(seen) == len(set(seen))


def test_unknown_device_is_an_error_with_the_closest_name():
    with pytest.raises(InputError, match="unknown GPU `h2000`") as caught:
        load_gpu("h2000")
    assert "did you mean `h200`?" in (caught.value.hint or "")
    assert "--peaks" in (caught.value.hint or "")


def test_h200_has_both_bandwidths_and_defaults_to_the_data_sheet():
    h200 = load_gpu("h200")
    peaks = Peaks(h200.title, h200.peaks)
    assert peaks.bandwidth().value == 4.8e12
    measured = peaks.as_measured()
    assert measured is not None
    assert measured.bandwidth().value == 4.204e12
    assert measured.compute("bfloat16").value == 669.6e12
    # No measured rate of eight-bit products: the data sheet's is used, and says so.
    assert measured.compute("float8").kind == "datasheet"
    assert measured.as_measured() is None


def test_a_device_without_measured_numbers_has_no_second_reading():
    h100 = load_gpu("h100-sxm5")
    assert Peaks(h100.title, h100.peaks).as_measured() is None


def test_measured_only_rates_are_used_as_they_are():
    number = {"value": 1e10, "kind": "measured", "source": "made up for a test"}
    rates = PeakRates.model_validate(
        {"read_bytes_per_s": [number], "flops_per_s": {"float32": [number]}}
    )
    peaks = Peaks("cpu", rates)
    assert peaks.bandwidth().kind == "measured"
    assert peaks.as_measured() is None


def test_profile_peaks_come_before_its_named_device(make_profile, round_rates):
    device = {"name": "d", "kind": "gpu", "gpu_profile": "h200"}
    assert peaks_for(make_profile(device=device)).bandwidth().value == 4.8e12
    device |= {"peaks": round_rates.model_dump(mode="json")}
    assert peaks_for(make_profile(device=device)).bandwidth().value == 1e12
    assert peaks_for(make_profile(device=device), gpu="h100").bandwidth().value == 3.35e12


def test_a_profile_without_peaks_asks_for_a_device(make_profile):
    device = {"name": "mystery", "kind": "gpu"}
    with pytest.raises(InputError, match="no peak rates") as caught:
        peaks_for(make_profile(device=device))
    assert "h200" in (caught.value.hint or "")


def test_two_sources_of_peaks_exclude_each_other(make_profile, tmp_path):
    with pytest.raises(InputError, match="exclude"):
        peaks_for(make_profile(), gpu="h200", file=tmp_path / "p.yaml")


def test_peaks_file_may_be_a_profile_or_only_rates(tmp_path, round_rates):
    whole = tmp_path / "gpu.yaml"
    whole.write_text(yaml.safe_dump(load_gpu("h200").model_dump(mode="json")))
    assert load_peaks_file(whole).title == "NVIDIA H200 SXM"
    only = tmp_path / "rates.json"
    only.write_text(json.dumps(round_rates.model_dump(mode="json")))
    assert load_peaks_file(only).bandwidth().value == 1e12


def test_peaks_file_error_names_the_line(tmp_path):
    path = tmp_path / "rates.yaml"
    path.write_text(
        "read_bytes_per_s:\n  - value: -1\n    kind: datasheet\n    source: abc\nflops_per_s: {}\n"
    )
    with pytest.raises(InputError) as caught:
        load_peaks_file(path)
    assert caught.value.where == f"{path}:2"
