"""Where a run of `token-force` gets everything: servers by URL, answers by file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from specpilot_cli.errors import InputError
from specpilot_cli.token_force.collect import is_url
from specpilot_cli.token_force.scorers import parse_scorer

Role = Literal["system", "stock", "ar"]
ROLES: tuple[Role, ...] = ("system", "stock", "ar")


def delta_option(text: str | None) -> float | Path | None:
    """What `--delta` holds: nats, or the path of a calibration."""
    if text is None:
        return None
    try:
        return float(text)
    except ValueError:
        return Path(text)


@dataclass(frozen=True, slots=True)
class Sources:
    """URLs, files and limits of one run.

    system, stock, ar: URLs or JSONL files; no system is judged where `calibrate` is set. scorer: a
    URL or `ENGINE:DIR`. probe: live stock for the audit where stock itself is a file. delta: nats,
    or a calibration's file. max_new_tokens: replaces the prompts' own limits. ignore_eos: decode
    on past a stop token. timeout_s: limit of one request. save_outputs: folder for the answers of
    live servers.
    """

    system: str | None
    stock: str
    scorer: str
    ar: str | None = None
    probe: str | None = None
    delta: float | Path | None = None
    calibrate: bool = False
    prompts: Path | None = None
    tokenizer: Path | None = None
    limit: int | None = None
    max_new_tokens: int | None = None
    ignore_eos: bool = False
    concurrency: int = 8
    timeout_s: float = 600.0
    save_outputs: Path | None = None
    overwrite: bool = False

    def of(self, role: Role) -> str | None:
        """URL or file of one role."""
        return {"system": self.system, "stock": self.stock, "ar": self.ar}[role]

    def live(self) -> tuple[Role, ...]:
        """Roles whose answers come from a server."""
        given = {role: self.of(role) for role in ROLES}
        return tuple(role for role, source in given.items() if source and is_url(source))

    def probe_url(self) -> str | None:
        """Live stock, if there is any."""
        return self.stock if is_url(self.stock) else self.probe

    def urls(self) -> dict[str, str]:
        """Every server by what it is in this run."""
        named: dict[str, str] = {role: str(self.of(role)) for role in self.live()}
        if is_url(self.scorer):
            named["scorer"] = self.scorer
        if self.probe is not None:
            named["probe"] = self.probe
        return named

    def roles(self, url: str) -> str:
        """What the server at `url` is in this run."""
        named = ["AR" if role == "ar" else role for role, own in self.urls().items() if own == url]
        return " and ".join(named)

    def files(self) -> list[Path]:
        """Input files, for hashes and against overwriting."""
        named = (self.system, self.stock, self.ar)
        files = [Path(name) for name in named if name is not None and not is_url(name)]
        more = (self.prompts, self.delta if isinstance(self.delta, Path) else None)
        return [*files, *(path for path in more if path is not None)]

    def check(self) -> None:
        """Raise InputError for what cannot be run, before anything is opened."""
        parse_scorer(self.scorer)
        if self.system is None and not self.calibrate:
            raise InputError(
                "no system to judge", where="--system", hint="give its URL, or its answers (JSONL)"
            )
        if self.calibrate and (self.system is not None or self.delta is not None):
            raise InputError(
                "a calibration judges no system and takes no delta",
                where="--calibrate",
                hint="leave out --system and --delta; judge with --delta FILE afterwards",
            )
        if self.ar is None and self.calibrate:
            raise InputError(
                "a calibration needs AR answers",
                where="--ar",
                hint="give stock's engine without speculation; the scorer's server will do",
            )
        if self.ar is None and self.delta is None:
            raise InputError(
                "delta needs AR answers to calibrate it, or a value",
                hint="give --ar URL|FILE (stock's engine without speculation; the scorer will do), "
                "or --delta NATS|FILE",
            )
        if self.probe is not None and (is_url(self.stock) or not is_url(self.probe)):
            raise InputError(
                f"`{self.probe}` is no live stock beside recorded answers of stock",
                where="--probe",
                hint="give a URL, and only where --stock is a file",
            )
