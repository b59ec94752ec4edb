"""What the user may change of an SGLang recipe, and what became of it."""

from __future__ import annotations

import ipaddress
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from specpilot_cli.errors import InputError

DEFAULT_HOST: Final = "127.0.0.1"

_LABEL = r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?"
# A name that ends in a number would be an address, and is not one.
_HOST_NAME = re.compile(rf"(?=.{{1,253}}$)(?:{_LABEL}\.)*(?!\d+$){_LABEL}", re.IGNORECASE)

SystemChoice = Literal["stock", "tuned", "both"]


@dataclass(frozen=True, slots=True)
class SglangSettings:
    """Which systems are started, where, and from what.

    target, drafter: folder or hub id in place of the recipe's. gpu: the profile to plan for where
    the machine has no GPU. prompts: unseen prompts in place of the recipe's. python: interpreter
    of the environment that SGLang is installed in.
    """

    system: SystemChoice = "both"
    first_port: int | None = None
    host: str = DEFAULT_HOST
    python: str = sys.executable
    prompts_per_benchmark: int | None = None
    prompts: Path | None = None
    target: str | None = None
    drafter: str | None = None
    gpu: str | None = None


def checked_host(host: str) -> str:
    """`host` if a server can be told to listen on it: an IP address or a host name.

    Raises `InputError` for anything else, an address with a zone included.
    """
    try:
        ipaddress.ip_address(host)
        known = "%" not in host
    except ValueError:
        known = _HOST_NAME.fullmatch(host) is not None
    if not known:
        raise InputError(
            f"neither an IP address nor a host name: {host!a}",
            where="--host",
            hint="write it as 127.0.0.1, 0.0.0.0, ::1 or localhost; the port goes to --port",
        )
    return host
