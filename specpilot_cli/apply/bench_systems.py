"""Systems that `paired-bench` starts itself: recipes, launch files, the winner of a sweep."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from specpilot_cli.apply.recipes import LoadedRecipe, load_recipe
from specpilot_cli.apply.reference.preflight import ApplySettings, check_recipe
from specpilot_cli.apply.reference.run import plan_systems, prepare
from specpilot_cli.apply.serving import ServerPlan, launch
from specpilot_cli.apply.sglang.preflight import check_sglang
from specpilot_cli.apply.sglang.settings import SglangSettings
from specpilot_cli.apply.sglang.systems import SglangSystem
from specpilot_cli.engines.base import EngineClient
from specpilot_cli.engines.process import ServerProcess
from specpilot_cli.engines.sglang.arguments import merged, without_speculation, words
from specpilot_cli.errors import InputError, MachineError
from specpilot_cli.io.json_file import read_json_model
from specpilot_cli.io.yaml_file import read_yaml_model
from specpilot_cli.paired_bench.stage import Launched, ServerInfo
from specpilot_cli.paired_bench.sweep import Variant
from specpilot_cli.paired_bench.types import AR, BASELINE, BASELINE_AGAIN, CANDIDATE
from specpilot_cli.schema.bench_launch import LaunchFile, SweepResult, SweepVariant
from specpilot_cli.schema.result import Envelope
from specpilot_cli.schema.sglang_recipe import Argument
from specpilot_cli.ui import Reporter

_PORT, _HOST = "{port}", "{host}"
_RECIPE_ROLES = {"stock": BASELINE, "tuned": CANDIDATE, "ar": AR}
_ANY_PORT = 1


@dataclass(frozen=True, slots=True)
class CommandSystem:
    """A server by its command; nothing is known of it but that it must answer."""

    name: str
    label: str
    words: tuple[str, ...]
    variables: Mapping[str, str] = field(default_factory=dict)
    ready_timeout_s: float = 900.0
    request_timeout_s: float = 600.0
    host: str = "127.0.0.1"

    def command(self, port: int) -> list[str]:
        """Its words with the port and the host filled in."""
        return [w.replace(_PORT, str(port)).replace(_HOST, self.host) for w in self.words]

    def environment(self) -> Mapping[str, str]:
        """Variables beside the inherited ones."""
        return self.variables

    def check(self, server: ServerProcess, info: Mapping[str, Any]) -> None:
        """Nothing to check: what it says of itself is recorded."""

    def meaning(self, log_path: Path) -> str | None:
        """Nothing: the end of the log is the message."""
        return None


@dataclass(frozen=True, slots=True)
class PlacedSystem:
    """A system under another name and on one GPU (None: wherever the environment says)."""

    plan: ServerPlan
    name: str
    device: str | None

    @property
    def label(self) -> str:
        """What errors call it."""
        return self.name if self.device is None else f"{self.name} (GPU {self.device})"

    @property
    def host(self) -> str:
        """The address that it listens on."""
        return self.plan.host

    @property
    def ready_timeout_s(self) -> float:
        """How long its start may take."""
        return self.plan.ready_timeout_s

    @property
    def request_timeout_s(self) -> float:
        """How long one request may take."""
        return self.plan.request_timeout_s

    def command(self, port: int) -> list[str]:
        """The plan's own."""
        return self.plan.command(port)

    def environment(self) -> Mapping[str, str]:
        """The plan's own, and its GPU."""
        own = dict(self.plan.environment())
        return own if self.device is None else {**own, "CUDA_VISIBLE_DEVICES": self.device}

    def check(self, server: ServerProcess, info: Mapping[str, Any]) -> None:
        """The plan's own handshake."""
        self.plan.check(server, info)

    def meaning(self, log_path: Path) -> str | None:
        """The plan's own."""
        return self.plan.meaning(log_path)


class FreshStage:
    """Every run gets servers of its own; with two or more GPUs the systems change places.

    In run r system i is on GPU (i + r) modulo their number, so that each system meets each GPU as
    often as every other; all serve at the same time. Without GPUs to choose from, the systems of a
    run are resident together and take turns.
    """

    fresh = True

    def __init__(
        self, plans: Mapping[str, ServerPlan], devices: Sequence[str], logs: Path,
        reporter: Reporter,
    ) -> None:  # fmt: skip
        self._plans, self._devices = dict(plans), tuple(devices)
        self._logs, self._reporter = logs, reporter
        self._started = 0
        if len(self._devices) > 1 and len(self._plans) > len(self._devices):
            raise InputError(
                f"{len(self._plans)} systems on {len(self._devices)} GPUs cannot change places",
                where="--gpus",
                hint="leave AR out, name a GPU for every system, or use one GPU",
            )

    @property
    def names(self) -> tuple[str, ...]:
        """Every system that takes part."""
        return tuple(self._plans)

    @property
    def concurrent(self) -> bool:
        """Whether each system has a GPU of its own."""
        return len(self._devices) > 1

    def describe(self) -> ServerInfo:
        """How each system is started."""
        return {
            name: {"command": plan.command(_ANY_PORT), "environment": dict(plan.environment())}
            for name, plan in self._plans.items()
        }

    @contextmanager
    def run(self, systems: tuple[str, ...], number: int) -> Iterator[Launched]:
        """Start the systems of a run, each on its GPU, and end them with the block."""
        self._started += 1
        placed = [
            PlacedSystem(self._plans[_known(name)], name, self._device(index + number))
            for index, name in enumerate(systems)
        ]
        logs = self._logs / f"{self._started:03d}"
        with launch(placed, logs, first_port=None, reporter=self._reporter) as fleet:
            yield Launched(fleet.engines, {one.name: one.device for one in placed})

    def _device(self, index: int) -> str | None:
        return self._devices[index % len(self._devices)] if self._devices else None


def _known(name: str) -> str:
    return BASELINE if name == BASELINE_AGAIN else name


@contextmanager
def resident(
    plans: Mapping[str, ServerPlan], device: str | None, logs: Path, reporter: Reporter
) -> Iterator[Mapping[str, EngineClient]]:
    """Start every system once, all on one device; their clients by name."""
    placed = [PlacedSystem(plan, name, device) for name, plan in plans.items()]
    with launch(placed, logs, first_port=None, reporter=reporter) as fleet:
        yield fleet.engines


def is_launched(source: str) -> bool:
    """Whether a source names something to start, not the URL of a server that runs."""
    return "://" not in source


def find_plan(
    source: str, name: str, work: Path, reporter: Reporter
) -> tuple[ServerPlan, dict[str, Any] | None]:
    """What a source starts: a launch file, the result of a sweep, or `RECIPE:stock|tuned|ar`.

    Also the sweep, where the source is one. Raises InputError for a source that is none of these,
    and whatever the recipe's own checks raise.
    """
    path = Path(source)
    if path.suffix == ".json":
        return _sweep_winner(path, name)
    if path.suffix in (".yaml", ".yml"):
        file = read_yaml_model(path, LaunchFile)
        if file.sweep:
            raise InputError(
                f"`{path}` holds a sweep, not one server",
                where=str(path),
                hint="run it with --sweep FILE -o sweep.json, then give sweep.json here",
            )
        return from_launch_file(file, {}, name, work, reporter), None
    return _from_recipe(source, {}, name, work, reporter), None


def sweep_variants(path: Path, work: Path, reporter: Reporter) -> tuple[LaunchFile, list[Variant]]:
    """The launch file and every variant of its sweep, ready to start."""
    file = read_yaml_model(path, LaunchFile)
    found = []
    for arguments in file.variants():
        plan = from_launch_file(file, arguments, BASELINE, work, reporter)
        command = _with_port_open(plan.command(_ANY_PORT))
        found.append(Variant(arguments, command, dict(plan.environment())))
    return file, found


def from_launch_file(
    file: LaunchFile, arguments: Mapping[str, Argument], name: str, work: Path, reporter: Reporter
) -> ServerPlan:
    """The server of a launch file with some more options."""
    added = merged(file.arguments, arguments)
    if file.recipe is not None:
        return _from_recipe(file.recipe, added, name, work, reporter)
    return CommandSystem(
        name, name, (*(file.command or ()), *words(added)), file.environment,
        file.ready_timeout_s, file.request_timeout_s,
    )  # fmt: skip


def from_variant(variant: SweepVariant | Variant, name: str, file: LaunchFile | None = None) -> (
    CommandSystem
):  # fmt: skip
    """A variant of a sweep as a server to start."""
    limits = (900.0, 600.0) if file is None else (file.ready_timeout_s, file.request_timeout_s)
    return CommandSystem(name, name, tuple(variant.command), variant.environment, *limits)


def _sweep_winner(path: Path, name: str) -> tuple[ServerPlan, dict[str, Any]]:
    envelope = read_json_model(path, Envelope)
    if envelope.command != "paired-bench" or envelope.results.get("kind") != "sweep":
        raise InputError(
            f"`{path}` is no result of a sweep",
            where=str(path),
            hint="give a URL, a recipe's system, a launch file, or a sweep's result",
        )
    sweep = SweepResult.model_validate(envelope.results)
    return from_variant(sweep.fastest, name), sweep.model_dump(mode="json")


def _from_recipe(
    source: str, arguments: Mapping[str, Argument], name: str, work: Path, reporter: Reporter
) -> ServerPlan:
    recipe, _, rest = source.partition(":")
    role, _, nodes = rest.partition(":")
    if role not in _RECIPE_ROLES:
        raise InputError(
            f"`{source}` names no system",
            hint="give http://host:port, RECIPE:stock, RECIPE:tuned, RECIPE:ar, a launch file "
            "(.yaml) or the result of a sweep (.json)",
        )
    loaded = load_recipe(recipe)
    folder = work / name
    if isinstance(loaded, LoadedRecipe):
        if arguments:
            raise InputError(
                "options are added to SGLang's recipes only", where=source, hint="leave them out"
            )
        return _from_reference(loaded, role, nodes, folder, reporter)
    settings = SglangSettings(system="tuned" if role == "tuned" else "stock")
    checked = check_sglang(loaded, settings, folder, for_launch=True)
    system: SglangSystem = checked.systems[0].system
    if role == "ar":
        system = replace(system, drafter=None, arguments=without_speculation(system.arguments))
    folder.mkdir(parents=True, exist_ok=True)
    system.write_plugin()
    return replace(system, name=name, arguments=merged(system.arguments, arguments))


def _from_reference(
    loaded: LoadedRecipe, role: str, nodes: str, folder: Path, reporter: Reporter
) -> ServerPlan:
    checked = check_recipe(loaded, ApplySettings())
    fixed = checked.tree.nodes
    if role == "tuned" and fixed == "auto" and not nodes.isdigit():
        raise InputError(
            f"the recipe `{loaded.recipe.name}` chooses its node budget in a run",
            hint=f"name one: {loaded.recipe.name}:tuned:16, or use `specpilot apply recipe`",
        )
    budget = int(nodes) if nodes.isdigit() else (fixed if isinstance(fixed, int) else 1)
    if role == "tuned":
        folder.mkdir(parents=True, exist_ok=True)
        prepare(checked, folder, reporter)
    systems = {plan.name: plan for plan in plan_systems(checked, folder, budget)}
    plan = systems.get(_RECIPE_ROLES[role])
    if plan is None:
        raise MachineError(f"the recipe has no system `{role}`")
    return plan


def _with_port_open(command: Sequence[str]) -> tuple[str, ...]:
    """A command with its port replaced by `{port}`, to be started again on any port."""
    found = list(command)
    for index, word in enumerate(found[:-1]):
        if word == "--port" and found[index + 1] == str(_ANY_PORT):
            found[index + 1] = _PORT
    return tuple(found)
