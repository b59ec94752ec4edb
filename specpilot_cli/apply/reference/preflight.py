"""Everything that can be known to be wrong before minutes are spent: nothing is written here."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass

from specpilot_cli.apply.gates import (
    GatePlan,
    audit_settings,
    bench_settings,
    check_lengths,
    count_timed,
)
from specpilot_cli.apply.recipes import LoadedRecipe, take_per_benchmark
from specpilot_cli.ceiling.step_times import load_step_times
from specpilot_cli.engines.process import check_port_free
from specpilot_cli.engines.reference.config import DrafterConfig, TargetConfig, check_pair
from specpilot_cli.engines.reference.faults import LogitFault
from specpilot_cli.engines.reference.launch import require_engine
from specpilot_cli.errors import InputError, MachineError
from specpilot_cli.io.hf_folder import HfFolder, open_hf_folder
from specpilot_cli.io.prompts_file import read_prompts
from specpilot_cli.io.tokenizer_file import TokenizerFile
from specpilot_cli.paired_bench.tokens import tokenize
from specpilot_cli.paired_bench.types import TokenPrompt
from specpilot_cli.schema.prompts import Prompt
from specpilot_cli.schema.recipe import TreeMechanism
from specpilot_cli.schema.step_profile import StepTimeCurve

# Stock, tuned and plain decoding.
N_SERVERS = 3


@dataclass(frozen=True, slots=True)
class ApplySettings:
    """What the user may change: size of the gates, ports, and a deliberate fault to be caught."""

    prompts_per_benchmark: int | None = None
    first_port: int | None = None
    fault: LogitFault | None = None


@dataclass(frozen=True, slots=True)
class CheckedRecipe:
    """A recipe that this machine can run, with what the checks read.

    dev: prompts to record.
    """

    loaded: LoadedRecipe
    settings: ApplySettings
    tree: TreeMechanism
    source: HfFolder
    dev: tuple[Prompt, ...]
    gates: GatePlan
    projection: StepTimeCurve | None


def check_recipe(loaded: LoadedRecipe, settings: ApplySettings) -> CheckedRecipe:
    """Check packages, models, prompts, sizes and ports.

    Raises `InputError` for what the recipe's author or the user has to change, `MachineError` for
    what this machine lacks.
    """
    recipe, tree = loaded.recipe, loaded.recipe.tree
    if tree is None:
        raise InputError(
            "the recipe has no mechanism `best-first-tree`",
            where=str(loaded.path),
            hint="this version applies recipes with a tree, with or without `w12`",
        )
    _require_packages()
    source = open_hf_folder(loaded.target)
    open_hf_folder(loaded.drafter)
    target = TargetConfig.from_folder(loaded.target)
    check_pair(target, DrafterConfig.from_folder(loaded.drafter), loaded.drafter)
    requests = recipe.regime.requests
    bench = bench_settings(
        recipe.gates.paired_bench, requests=requests,
        prompts_per_benchmark=settings.prompts_per_benchmark,
    )  # fmt: skip
    audit = audit_settings(recipe.gates.token_force, requests=requests)
    dev = take_per_benchmark(read_prompts(loaded.dev), recipe.recording.prompts_per_benchmark)
    # warm-up prompts come from the same file and are never timed
    every = (bench.limit or 0) + bench.warmup_requests
    unseen = take_per_benchmark(read_prompts(loaded.unseen), every)
    _check_disjoint(dev, unseen, loaded)
    tokenizer = TokenizerFile(loaded.target)
    check_lengths(tokenize(dev, tokenizer.encode), target.max_positions, loaded.dev)
    unseen_ids = tokenize(unseen, tokenizer.encode)
    check_lengths(unseen_ids, target.max_positions, loaded.unseen)
    _check_fault(settings.fault, unseen_ids)
    projection = None
    if recipe.projection is not None:
        projection = load_step_times(recipe.projection, where="projection")
    _check_ports(settings.first_port)
    return CheckedRecipe(
        loaded=loaded, settings=settings, tree=tree, source=source, dev=tuple(dev),
        gates=GatePlan(
            tuple(unseen_ids), count_timed(unseen_ids, bench, audit, loaded.unseen), bench, audit,
            loaded.target,
        ),
        projection=projection,
    )  # fmt: skip


def _require_packages() -> None:
    require_engine()
    if importlib.util.find_spec("matplotlib") is None:
        raise MachineError(
            "the report needs matplotlib", hint="pip install '.[torch,report]' in the clone"
        )


def _check_disjoint(dev: Sequence[Prompt], unseen: Sequence[Prompt], loaded: LoadedRecipe) -> None:
    """A budget tuned on a prompt and judged on it proves nothing."""
    seen = {prompt.text for prompt in dev}
    for prompt in unseen:
        if prompt.text in seen:
            raise InputError(
                f"prompt `{prompt.request_id}` is a dev prompt too",
                where=str(loaded.unseen),
                hint="the gates judge on prompts that nothing was tuned on",
            )


def _check_fault(fault: LogitFault | None, prompts: Sequence[TokenPrompt]) -> None:
    longest = max(prompt.max_new_tokens for prompt in prompts)
    if fault is not None and fault.after >= longest:
        raise InputError(
            f"no output reaches position {fault.after}: the longest has {longest} tokens",
            where="--fault-after",
            hint="a fault that never acts cannot be caught",
        )


def _check_ports(first_port: int | None) -> None:
    if first_port is not None:
        for port in range(first_port, first_port + N_SERVERS):
            check_port_free(port)
