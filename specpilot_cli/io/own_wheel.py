"""This installation of specpilot as a wheel, for a machine or an image that has none.

What runs here is what is packed, so it does not matter how it was installed, and no index has to
offer it.
"""

from __future__ import annotations

import base64
import hashlib
import io
import zipfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Final

import specpilot_cli
import specpilot_kernels
from specpilot_cli.errors import MachineError
from specpilot_cli.paths import bundled

NAME: Final = f"specpilot-{specpilot_cli.__version__}-py3-none-any.whl"
"""File name of the wheel: pip reads version and tags from it."""

_INFO = f"specpilot-{specpilot_cli.__version__}.dist-info"
_WHEEL = "Wheel-Version: 1.0\nGenerator: specpilot\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
_DATE = (1980, 1, 1, 0, 0, 0)  # the first that zip knows: equal contents give equal bytes


def own_wheel() -> bytes:
    """The wheel's bytes. Raises `MachineError` if specpilot is not installed as a distribution."""
    packed, records = io.BytesIO(), []
    with zipfile.ZipFile(packed, "w") as wheel:
        for name, content in sorted(_contents()):
            _add(wheel, name, content)
            digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=")
            records.append(f"{name},sha256={digest.decode()},{len(content)}\n")
        record = f"{_INFO}/RECORD"
        _add(wheel, record, ("".join(records) + f"{record},,\n").encode())
    return packed.getvalue()


def _add(wheel: zipfile.ZipFile, name: str, content: bytes) -> None:
    entry = zipfile.ZipInfo(name, _DATE)
    entry.external_attr = 0o644 << 16
    dense = name.endswith(".safetensors")  # weights hardly shrink, and take seconds to try
    wheel.writestr(entry, content, zipfile.ZIP_STORED if dense else zipfile.ZIP_DEFLATED)


def _contents() -> Iterator[tuple[str, bytes]]:
    """Names and bytes of all files but the record."""
    for package in (specpilot_cli, specpilot_kernels):
        (folder,) = package.__path__
        yield from _files(Path(folder), package.__name__)
    for kind in ("profiles", "recipes"):
        data = bundled(kind)
        # a wheel's installation has them inside the package, a checkout beside it
        if not data.is_relative_to(specpilot_cli.__path__[0]):
            yield from _files(data, f"specpilot_cli/_data/{kind}")
    for name, text in _described().items():
        yield f"{_INFO}/{name}", text.encode()


def _files(folder: Path, inside: str) -> Iterator[tuple[str, bytes]]:
    for path in folder.rglob("*"):
        name = path.relative_to(folder)
        hidden = any(part.startswith(".") or part == "__pycache__" for part in name.parts)
        if path.is_file() and not hidden:
            yield f"{inside}/{name.as_posix()}", path.read_bytes()


def _described() -> dict[str, str]:
    """What makes files a distribution: its requirements and its entry points."""
    for installed in metadata.distributions(name="specpilot"):
        about, points = installed.read_text("METADATA"), installed.read_text("entry_points.txt")
        if installed.version == specpilot_cli.__version__ and about and points:
            return {"METADATA": about, "WHEEL": _WHEEL, "entry_points.txt": points}
    raise MachineError(
        f"specpilot {specpilot_cli.__version__} runs here without being installed, so it cannot be "
        "packed for an image",
        hint="install it: pip install PATH-OF-THE-CLONE",
    )
