"""Put the fake SGLang where an interpreter finds it as an installed distribution."""

from __future__ import annotations

import shutil
from pathlib import Path


def install(site: Path, *, version: str = "0.5.23", with_plugin: bool = True) -> Path:
    """Write the distributions `sglang` and `specpilot` into `site`, the latter with its plugin."""
    package = site / "sglang"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    shutil.copy(Path(__file__).with_name("launch_server.py"), package)
    _distribution(site, "sglang", version)
    # it hides the specpilot under test, whose entry point may be installed or not
    info = _distribution(site, "specpilot", "0.0.1")
    if with_plugin:
        (info / "entry_points.txt").write_text("[sglang.srt.plugins]\nspecpilot = x:register\n")
    return site


def _distribution(site: Path, name: str, version: str) -> Path:
    info = site / f"{name}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    return info
