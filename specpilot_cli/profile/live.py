"""Have a running SGLang server profile itself, and fetch the trace it writes.

The server writes to a folder of its own host, so this works where the server runs, in a folder
both can reach. One request decodes while the profiler runs; its tokens do not matter.
"""

from __future__ import annotations

import contextlib
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from specpilot_cli.engines.http_client import HttpEngine
from specpilot_cli.engines.http_parts import checked_url, status_text
from specpilot_cli.engines.sglang.info import ServerFacts, read_facts
from specpilot_cli.errors import InputError, MachineError, MeasurementInvalid
from specpilot_cli.io.chrome_trace import ChromeTrace
from specpilot_cli.io.prompts_file import read_prompts
from specpilot_cli.ui import Reporter, SilentReporter

# Beside the steps asked for: the prompt, the step that is interrupted by it, and the last one,
# whose end nothing marks.
_EXTRA_STEPS = 3
_PROMPT_IDS = 64
_CONTROL_S = 30.0
_POLL_S = 0.25
_HERE = (
    "the server writes on its own host: run this there, with --trace-dir DIR that server and user "
    "can both reach; or copy the file and use --trace"
)


@dataclass(frozen=True, slots=True)
class Waits:
    """Seconds: `request_s` for the decoding, `file_s` for the trace once the request is done."""

    request_s: float = 600.0
    file_s: float = 180.0


def record_trace(
    url: str,
    *,
    steps: int,
    folder: Path | None = None,
    prompts: Path | None = None,
    waits: Waits | None = None,
    reporter: Reporter | None = None,
) -> tuple[list[Path], ServerFacts]:
    """Profile `steps` decode steps of the server at `url`; the trace of its first rank.

    Raises `MachineError` where the server cannot be reached, refuses, answers with an error, or
    its trace does not show up here in time; the profiler is then stopped again.
    """
    base, waits = checked_url(url), waits or Waits()
    reporter = reporter or SilentReporter()
    texts = [] if prompts is None else [prompt.text for prompt in read_prompts(prompts)]
    profile_id = f"specpilot-{uuid.uuid4().hex[:12]}"
    _check_folder(folder)
    with _place(folder) as place, HttpEngine(base, max(_CONTROL_S, waits.request_s)) as engine:
        facts = _facts(engine)
        _start(engine, _request(place, profile_id, steps))
        done = False
        try:
            reporter.note(f"profiling {steps} steps of {base}, trace to {place}")
            _decode(engine, texts, steps, drafted_block(facts) or 1, waits)
            found = _await_trace(place, profile_id, waits.file_s)
            done = True
        finally:
            if not done:
                with contextlib.suppress(MachineError):
                    engine.post("/stop_profile", {}, limit_s=_CONTROL_S)
    reporter.note(f"trace: {found}")
    return [found], facts


def _check_folder(folder: Path | None) -> None:
    if folder is not None and not folder.is_dir():
        raise InputError(f"no such folder: `{folder}`", where="--trace-dir")


@contextlib.contextmanager
def _place(folder: Path | None) -> Iterator[Path]:
    """`folder`, or a new one, which goes again if nothing came into it."""
    if folder is not None:
        yield folder.resolve()
        return
    made = Path(tempfile.mkdtemp(prefix="specpilot-profile-"))
    try:
        yield made
    finally:
        with contextlib.suppress(OSError):  # it is not empty
            made.rmdir()


def _request(place: Path, profile_id: str, steps: int) -> dict[str, Any]:
    """Without stacks and shapes, whose recording would slow the host several times."""
    return {
        "output_dir": str(place),
        "profile_id": profile_id,
        "num_steps": steps + _EXTRA_STEPS,
        "activities": ["CPU", "GPU"],
        "with_stack": False,
        "record_shapes": False,
        "detailed_annotations": True,
    }


def _facts(engine: HttpEngine) -> ServerFacts:
    try:
        return read_facts(engine.server_info())
    except MeasurementInvalid as error:
        raise MachineError(f"{engine.base_url} is no SGLang server: {error}") from error


def _start(engine: HttpEngine, body: Mapping[str, Any]) -> None:
    reply = engine.post("/start_profile", body, limit_s=_CONTROL_S)
    if reply.status != httpx.codes.OK:
        raise MachineError(
            f"/start_profile failed: {status_text(reply)}",
            where=engine.base_url,
            hint="profiling may be under way already: POST /stop_profile ends it",
        )


def drafted_block(facts: ServerFacts) -> int | None:
    """Rows that the server verifies per request; None where it does not speculate."""
    block = facts.draft_tokens
    speculates = facts.speculative_algorithm is not None
    return block if speculates and block is not None and block >= 2 else None


def model_folder(path: str | None) -> Path | None:
    """The folder of a model that the server names, if its configuration lies on this host."""
    if path is None:
        return None
    try:
        return Path(path) if (Path(path) / "config.json").is_file() else None
    except (OSError, ValueError):  # a name that no file can have
        return None


def _decode(
    engine: HttpEngine, texts: Sequence[str], steps: int, most_a_step: int, waits: Waits
) -> None:
    """Decode one request that cannot end before the profiler: a step commits at most the block.

    Not as a stream, whose events would take the server's time in every step.
    """
    body: dict[str, Any] = {
        "sampling_params": {
            "temperature": 0,
            "max_new_tokens": (steps + 2 * _EXTRA_STEPS) * most_a_step,
            "ignore_eos": True,
        }
    }
    # Ids that every vocabulary has; what they mean does not matter.
    body |= {"text": texts[0]} if texts else {"input_ids": list(range(100, 100 + _PROMPT_IDS))}
    try:
        reply = engine.post("/generate", body, limit_s=waits.request_s)
    except MachineError as error:
        raise MachineError(
            f"the request that was profiled broke off: {error.message}",
            hint="the server's log says why",
        ) from error
    if reply.status != httpx.codes.OK:
        raise MachineError(f"the request that was profiled failed: {status_text(reply)}")


def _await_trace(place: Path, profile_id: str, limit_s: float) -> Path:
    """The first rank's trace, once it is whole."""
    end = time.monotonic() + limit_s
    whole = _Whole()
    while time.monotonic() < end:
        for path in sorted(place.glob(f"*{profile_id}*.trace.json*")):
            if "-TP-0" in path.name and whole(path):
                return path
        time.sleep(_POLL_S)
    seen = sorted(path.name for path in place.glob(f"*{profile_id}*"))
    what = f"only {', '.join(seen)}, which is not whole" if seen else "nothing"
    raise MachineError(
        f"no trace after {limit_s:g} s: the server was to write it into {place}, and {what} is "
        "there",
        hint=_HERE,
    )


class _Whole:
    """Tells a trace that is still being written from a whole one: size first, then a full read."""

    def __init__(self) -> None:
        self._sizes: dict[Path, int] = {}

    def __call__(self, path: Path) -> bool:
        size = path.stat().st_size
        if self._sizes.get(path) != size:
            self._sizes[path] = size
            return False
        try:
            for _ in ChromeTrace(path).events():
                pass
        except InputError:
            return False
        return True
