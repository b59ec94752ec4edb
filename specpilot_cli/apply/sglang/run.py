"""From a checked SGLang recipe to servers that run what was asked for, and to a verdict.

Stock and tuned run at the same time and go through both gates where those can run; otherwise they
are started one after another, and the result says that nothing was judged.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from specpilot_cli.apply.folder import LOGS
from specpilot_cli.apply.gates import RecipeVerdict, bench, force, judge
from specpilot_cli.apply.phases import Phases
from specpilot_cli.apply.serving import Fleet, launch
from specpilot_cli.apply.sglang.preflight import CheckedSglang, PlannedSystem
from specpilot_cli.apply.sglang.turns import TurnTaking
from specpilot_cli.engines.base import GenerateRequest
from specpilot_cli.engines.sglang.info import ServerFacts, read_facts, read_plugin_state
from specpilot_cli.errors import MachineError, MeasurementInvalid
from specpilot_cli.paired_bench.types import PairedBenchResult
from specpilot_cli.schema.plugin_config import PluginState
from specpilot_cli.token_force.result import TokenForceResult
from specpilot_cli.ui import Reporter, SilentReporter

_WATCH_S = 1.0
_HEALTH_EVERY_S = 15.0
_MISSED = 3
_SMOKE_TOKENS = 8


@dataclass(frozen=True, slots=True)
class RunningSystem:
    """One server as it said it runs: its plan, what SGLang reports, what the plugin reports."""

    planned: PlannedSystem
    facts: ServerFacts
    state: PluginState | None


@dataclass(frozen=True, slots=True)
class SglangResult:
    """What one run found. bench and audit are None where the gates did not run, or not so far."""

    checked: CheckedSglang
    folder: Path
    systems: tuple[RunningSystem, ...]
    bench: PairedBenchResult | None
    audit: TokenForceResult | None
    phases_s: dict[str, float]

    @property
    def verdict(self) -> RecipeVerdict | None:
        """Both gates as one word; None where they did not run."""
        if self.bench is None:
            return None
        return judge(self.bench.verdict, None if self.audit is None else self.audit.verdict)

    @property
    def reasons(self) -> tuple[str, ...]:
        """Why the verdict is what it is; why there is none."""
        if self.bench is None:
            return () if self.checked.no_gates is None else (self.checked.no_gates,)
        if self.audit is not None and self.audit.verdict != "accept":
            return self.audit.reasons
        return self.bench.summary.reasons


def apply_sglang(
    checked: CheckedSglang, folder: Path, *, reporter: Reporter = SilentReporter()
) -> SglangResult:
    """Start the recipe's servers, shake hands, judge where possible, stop them all.

    `folder` is the caller's, empty but for its marker. Raises `MachineError` for a server that
    does not start, dies, or does not run what it was asked to, `MeasurementInvalid` for answers
    that carry no verdict. No server outlives the call.
    """
    if checked.gates is not None:
        return _judged(checked, folder, reporter)
    phases = Phases(reporter, total=len(checked.systems))
    running: list[RunningSystem] = []
    for planned in checked.systems:
        phases.begin(f"serve {planned.system.name}", f"serve: {planned.system.label}")
        with _fleet(checked, [planned], folder, reporter) as fleet:
            running += _running(fleet.infos, [planned])
            with fleet.watched():
                _smoke(fleet)
    phases.end()
    return SglangResult(checked, folder, tuple(running), None, None, phases.seconds)


def serve_sglang(
    checked: CheckedSglang,
    folder: Path,
    *,
    on_ready: Callable[[str, RunningSystem], None],
    reporter: Reporter = SilentReporter(),
) -> NoReturn:
    """Start the one system that was checked, and watch it until it fails or the caller is ended.

    on_ready: called once with the server's URL, after the handshake. Raises `MachineError` when
    the server dies or stops answering. It is stopped in any case.
    """
    (planned,) = checked.systems
    with _fleet(checked, [planned], folder, reporter) as fleet:
        (running,) = _running(fleet.infos, [planned])
        on_ready(fleet.servers[planned.system.name].base_url, running)
        _watch(fleet)


@contextmanager
def _fleet(
    checked: CheckedSglang, planned: Sequence[PlannedSystem], folder: Path, reporter: Reporter
) -> Iterator[Fleet]:
    for one in planned:
        one.system.write_plugin()
    systems = [one.system for one in planned]
    first = checked.settings.first_port
    with launch(systems, folder / LOGS, first_port=first, reporter=reporter) as fleet:
        yield fleet


@contextmanager
def _turns(
    checked: CheckedSglang, planned: Sequence[PlannedSystem], folder: Path, reporter: Reporter
) -> Iterator[TurnTaking]:
    """One server at a time; each is started again whenever its turn comes."""
    for one in planned:
        one.system.write_plugin()
    plans = {one.system.name: one.system for one in planned}
    reporter.note("the servers do not fit together: each is started again when it is its turn")
    port = checked.settings.first_port or 0
    with TurnTaking(plans, folder / LOGS, port, reporter) as turns:
        yield turns


def _judged(checked: CheckedSglang, folder: Path, reporter: Reporter) -> SglangResult:
    phases = Phases(reporter, total=3)
    gates, audit = checked.gates, None
    assert gates is not None
    phases.begin("serve", f"serve: {', '.join(one.system.label for one in checked.systems)}")
    start = _fleet if checked.together else _turns
    with start(checked, checked.systems, folder, reporter) as fleet:
        for one in reversed(checked.systems):  # the first one serves next: it stays
            fleet.engines[one.system.name].server_info()
        running = _running(fleet.infos, checked.systems)
        phases.begin("paired_bench", "is it faster? paired benchmark on unseen prompts")
        timed = bench(gates, fleet, folder, reporter=reporter)
        if timed.verdict != "invalid":
            phases.begin("token_force", "is it lossless? token forcing of the timed answers")
            audit = force(gates, fleet, timed, reporter=reporter)
        phases.end()
    return SglangResult(checked, folder, tuple(running), timed, audit, phases.seconds)


def _running(
    infos: Mapping[str, Mapping[str, Any]], planned: Sequence[PlannedSystem]
) -> list[RunningSystem]:
    found = []
    for one in planned:
        info = infos[one.system.name]
        found.append(RunningSystem(one, read_facts(info), read_plugin_state(info)))
    return found


def _smoke(fleet: Fleet) -> None:
    """A few tokens from each server: one that is up and cannot answer is no deployment."""
    for name, engine in fleet.engines.items():
        request = GenerateRequest("smoke", (1, 2, 3), _SMOKE_TOKENS, ignore_eos=True)
        answer = engine.generate(request)
        if len(answer.output_ids) != _SMOKE_TOKENS:
            raise MeasurementInvalid(
                f"the {fleet.plans[name].label} server gave {len(answer.output_ids)} tokens of "
                f"{_SMOKE_TOKENS}",
                hint="its log may tell why",
            )


def _watch(fleet: Fleet) -> NoReturn:
    """Raise `MachineError` once the server has died, or missed health checks."""
    missed, next_health = 0, time.monotonic() + _HEALTH_EVERY_S
    while True:
        time.sleep(_WATCH_S)
        fleet.check()
        if time.monotonic() < next_health:
            continue
        for engine in fleet.engines.values():
            try:
                engine.health()
                missed = 0
            except MachineError as error:
                missed += 1
                if missed < _MISSED:
                    continue
                fleet.check_after_failure()
                logs = ", ".join(str(server.log_path) for server in fleet.servers.values())
                raise MachineError(
                    f"{error.message}, {_MISSED} times in a row", hint=f"its log is in {logs}"
                ) from error
        next_health = time.monotonic() + _HEALTH_EVERY_S
