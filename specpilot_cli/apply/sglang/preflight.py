"""Everything about an SGLang recipe that can be known to be wrong before a server is started."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from specpilot_cli.apply.gates import (
    GatePlan,
    audit_settings,
    bench_settings,
    check_lengths,
    count_timed,
)
from specpilot_cli.apply.recipes import LoadedSglangRecipe, take_per_benchmark
from specpilot_cli.apply.sglang.device import find_device
from specpilot_cli.apply.sglang.models import Model, Models, find_models
from specpilot_cli.apply.sglang.settings import SglangSettings
from specpilot_cli.apply.sglang.systems import SglangSystem
from specpilot_cli.engines.process import check_port_free
from specpilot_cli.engines.sglang.arguments import merged, with_tree, without_speculation
from specpilot_cli.engines.sglang.launch import SglangInstall, check_install, probe
from specpilot_cli.engines.sglang.memory_plan import Device, MemoryPlan, ServedModel, plan_memory
from specpilot_cli.errors import MachineError
from specpilot_cli.io.prompts_file import read_prompts
from specpilot_cli.io.tokenizer_file import TokenizerFile
from specpilot_cli.paired_bench.tokens import tokenize
from specpilot_cli.paired_bench.types import AR, BASELINE, CANDIDATE
from specpilot_cli.schema.plugin_config import QUANTIZATION
from specpilot_cli.schema.sglang_recipe import Argument
from specpilot_cli.units import format_bytes


@dataclass(frozen=True, slots=True)
class PlannedSystem:
    """One server and its memory."""

    system: SglangSystem
    memory: MemoryPlan


@dataclass(frozen=True, slots=True)
class CheckedSglang:
    """A recipe that can be planned; and launched, if it was checked for that.

    together: all servers run at once; otherwise by turns. gates: None where nothing is judged, and
    no_gates says why. install: None where SGLang was not looked for.
    """

    loaded: LoadedSglangRecipe
    settings: SglangSettings
    models: Models
    device: Device
    taken_bytes: int
    install: SglangInstall | None
    systems: tuple[PlannedSystem, ...]
    together: bool
    gates: GatePlan | None
    no_gates: str | None


def check_sglang(
    loaded: LoadedSglangRecipe, settings: SglangSettings, folder: Path, *, for_launch: bool
) -> CheckedSglang:
    """Check models, device, memory, SGLang's environment, prompts and ports.

    folder: of the run, for the plugin's configuration. Raises `InputError` for what the author
    or the user has to change, `MachineError` for what this machine lacks, memory included.
    """
    device, taken = find_device(loaded.recipe, gpu=settings.gpu, for_launch=for_launch)
    models = find_models(loaded, settings)
    install = _install(loaded, settings) if for_launch else None
    if settings.first_port is not None and for_launch:
        for port in range(settings.first_port, settings.first_port + 3):
            check_port_free(port, host=settings.host)
    checked = CheckedSglang(
        loaded, settings, models, device, taken, install, (), False, None,
        "only one system is started" if settings.system != "both" else None,
    )  # fmt: skip
    if settings.system == "both":
        checked = _with_gates(checked, folder)
    if not checked.together:
        systems = _systems(checked, folder, with_ar=checked.gates is not None, together=False)
        checked = replace(checked, systems=tuple(_planned(checked, one, taken) for one in systems))
    for planned in checked.systems:
        refuse_misfit(planned)
    return checked


def moved(checked: CheckedSglang, folder: Path) -> CheckedSglang:
    """The same run in another folder."""

    def placed(one: PlannedSystem) -> PlannedSystem:
        file = folder / one.system.plugin_file.name
        return replace(one, system=replace(one.system, plugin_file=file))

    return replace(checked, systems=tuple(placed(one) for one in checked.systems))


def refuse_misfit(planned: PlannedSystem) -> None:
    """Raise `MachineError` for a server that its device cannot hold."""
    plan = planned.memory
    if not plan.problems:
        return
    parts = ", ".join(f"{part.name} {format_bytes(part.n_bytes)}" for part in plan.parts)
    raise MachineError(
        f"the {planned.system.label} server does not fit on {plan.device.name} "
        f"({format_bytes(plan.device.memory_bytes)}): {plan.problems[0]}\n  {parts}",
        hint="lower the draft tokens, `max-running-requests` or the regime's context, raise "
        "`mem-fraction-static`, or use a larger GPU",
    )


def _install(loaded: LoadedSglangRecipe, settings: SglangSettings) -> SglangInstall:
    install = probe(settings.python)
    tuned = settings.system != "stock"
    check_install(install, loaded.recipe.engine_versions, needs_plugin=tuned)
    return install


def _with_gates(checked: CheckedSglang, folder: Path) -> CheckedSglang:
    """The recipe with both gates if they can run, else with the reason why they cannot.

    Servers that do not fit on the device together are measured by turns: each serves all prompts
    before the next one is started.
    """
    gates = _gate_plan(checked)
    if isinstance(gates, str):
        return replace(checked, no_gates=gates)
    taken, planned = checked.taken_bytes, []
    for system in _systems(checked, folder, with_ar=True, together=True):
        one = _planned(checked, system, taken)
        if one.memory.problems:
            block = max(gates.n_timed, *gates.bench.batches)
            turns = replace(gates, bench=replace(gates.bench, block_requests=block))
            return replace(checked, gates=turns)
        planned.append(one)
        taken += one.memory.resident_bytes
    return replace(checked, systems=tuple(planned), together=True, gates=gates)


def _gate_plan(checked: CheckedSglang) -> GatePlan | str:
    """What the gates are given, or why they cannot run."""
    recipe, settings = checked.loaded.recipe, checked.settings
    path = settings.prompts or checked.loaded.unseen
    if recipe.gates is None:
        return "the recipe has no gates"
    if path is None:
        return "the recipe names no prompts; give some with --prompts FILE"
    tokenizer = checked.models.target.file("tokenizer.json")
    if tokenizer is None:
        return f"no tokenizer.json of `{checked.models.target.source}`"
    requests = recipe.regime.requests
    bench = bench_settings(
        recipe.gates.paired_bench, requests=requests,
        prompts_per_benchmark=settings.prompts_per_benchmark,
    )  # fmt: skip
    audit = audit_settings(recipe.gates.token_force, requests=requests)
    every = (bench.limit or 0) + bench.warmup_requests
    texts = take_per_benchmark(read_prompts(path), every)
    unseen = tokenize(texts, TokenizerFile(tokenizer).encode)
    check_lengths(unseen, recipe.regime.context, path)
    return GatePlan(tuple(unseen), count_timed(unseen, bench, audit, path), bench, audit, tokenizer)


def _systems(
    checked: CheckedSglang, folder: Path, *, with_ar: bool, together: bool
) -> list[SglangSystem]:
    """The servers to start, in that order."""
    recipe, models = checked.loaded.recipe, checked.models
    arguments, choice = recipe.arguments, checked.settings.system
    extra: dict[str, Argument] = {}
    if recipe.tensor_parallel > 1:
        extra["tp-size"] = recipe.tensor_parallel
    if recipe.device == "cpu":
        extra["device"] = "cpu"
    if together:
        gates = recipe.gates
        limit = None if gates is None else gates.max_total_tokens
        extra["max-total-tokens"] = limit or recipe.regime.requests * recipe.regime.context
    stock = merged(arguments.common, arguments.stock, extra)
    tuned = merged(arguments.common, arguments.tuned, extra)
    if recipe.w12 is not None and not models.tuned_target.stored_w12:
        tuned["quantization"] = QUANTIZATION
    if recipe.tree is not None:
        tuned = with_tree(tuned)
    systems = []
    if choice in ("stock", "both"):
        systems.append(_system(checked, folder, BASELINE, "stock", models.target, stock))
    if choice in ("tuned", "both"):
        systems.append(_system(checked, folder, CANDIDATE, "tuned", models.tuned_target, tuned))
    if with_ar and models.drafter is not None:
        plain = without_speculation(stock)
        systems.append(_system(checked, folder, AR, "plain decoding", models.target, plain))
    return systems


def _system(
    checked: CheckedSglang, folder: Path, name: str, label: str, model: Model,
    arguments: dict[str, Argument],
) -> SglangSystem:  # fmt: skip
    recipe, drafter = checked.loaded.recipe, checked.models.drafter
    return SglangSystem(
        name=name,
        label=label,
        python=checked.settings.python,
        model=model.source,
        drafter=None if drafter is None or name == AR else drafter.source,
        arguments=arguments,
        variables=recipe.environment,
        plugin=recipe.plugin_config if name == CANDIDATE else None,
        plugin_file=folder / f"plugin-{name}.json",
        versions=recipe.engine_versions,
        ready_timeout_s=recipe.ready_timeout_s,
        host=checked.settings.host,
    )


def _planned(checked: CheckedSglang, system: SglangSystem, taken: int) -> PlannedSystem:
    recipe, models = checked.loaded.recipe, checked.models
    tuned = system.name == CANDIDATE
    served = ServedModel(
        target=models.target.shape,
        drafter=None if system.drafter is None or models.drafter is None else models.drafter.shape,
        w12=recipe.w12 if tuned else None,
        w12_checkpoint=tuned and models.tuned_target.stored_w12,
        tree=recipe.tree if tuned else None,
    )
    plan = plan_memory(
        served, system.arguments, checked.device, tensor_parallel=recipe.tensor_parallel,
        requests=recipe.regime.requests, context=recipe.regime.context, taken_bytes=taken,
    )  # fmt: skip
    return PlannedSystem(system, plan)
