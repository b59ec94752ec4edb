"""Are these the models that were meant, and do their configurations fit each other?"""

from __future__ import annotations

from collections.abc import Sequence

from specpilot_cli.diagnose.facts import DrafterFacts, TargetFacts
from specpilot_cli.diagnose.outcome import Outcome, clear, not_checked
from specpilot_cli.schema.lattice import LatticeMetadata, LatticeRecording


def hashes(metadata: LatticeMetadata, folders: dict[str, str]) -> Outcome:
    """Compare recorded hashes with those of the folders given, by `target` and `drafter`."""
    code, title = "hashes", "The recording was made with the models given"
    if not folders:
        return not_checked(code, title, "give the folders with --target and --drafter")
    recorded = {"target": metadata.target_sha256, "drafter": metadata.drafter_sha256}
    wrong = [name for name, digest in folders.items() if recorded[name] != digest]
    detail = "; ".join(
        f"{name}: recorded {recorded[name][:12]}…, folder {digest[:12]}…"
        for name, digest in folders.items()
    )
    if not wrong:
        return clear(code, title, detail)
    return Outcome(
        code, "found", f"The recording was made with another {' and another '.join(wrong)}", detail,
        next_steps=(
            "Hub names move: pin a revision, and compare file hashes with the card's",
            "or give the folders that the recording was really made with",
        ),
    )  # fmt: skip


def configuration(
    recording: LatticeRecording, target: TargetFacts | None, drafter: DrafterFacts | None
) -> Outcome:
    """Do the drafter's configuration, the target's and the recorded block fit each other?"""
    code, title = "configuration", "The drafter's configuration fits the target's"
    if drafter is None:
        return not_checked(code, title, "give the drafter's folder with --drafter")
    problems = _problems(target, drafter)
    block = recording.metadata.block
    trained = "an unstated block" if drafter.block is None else f"blocks of {drafter.block}"
    detail = f"recorded with a block of {block}, trained with {trained}"
    numbers = {"recorded_block": float(block)}
    if drafter.block is not None:
        numbers["trained_block"] = float(drafter.block)
        if block < drafter.block:
            problems.append(
                f"the engine drafts blocks of {block}, the drafter was trained with {drafter.block}"
                ": positions are left unused (is the number of draft tokens the block minus one?)"
            )
    if not problems:
        return clear(code, title, detail, **numbers)
    return Outcome(
        code, "found", "The drafter's configuration does not fit", "; ".join(problems),
        numbers=numbers,
        next_steps=(
            "compare config.json with the drafter's card; a converted checkpoint often loses "
            "nested keys (`dflash_config`), and engines then fall back to defaults",
        ),
    )  # fmt: skip


def _problems(target: TargetFacts | None, drafter: DrafterFacts) -> list[str]:
    problems: list[str] = []
    ids = drafter.target_layer_ids
    if target is None:
        return problems
    if target.layers is not None:
        if ids and not all(0 <= layer < target.layers for layer in ids):
            problems.append(
                f"target_layer_ids {list(ids)} reach beyond the target's {target.layers} layers"
            )
        if drafter.target_layers not in (None, target.layers):
            problems.append(
                f"the drafter expects a target of {drafter.target_layers} layers, "
                f"this one has {target.layers}"
            )
    pairs: Sequence[tuple[str, int | None, int | None]] = (
        ("hidden sizes", drafter.hidden_size, target.hidden_size),
        ("vocabularies", drafter.vocab_size, target.vocab_size),
    )
    problems += [
        f"{what} differ: drafter {own}, target {other}"
        for what, own, other in pairs
        if own is not None and other is not None and own != other
    ]
    size, mask = target.vocab_size, drafter.mask_token_id
    if mask is not None and size is not None and not 0 <= mask < size:
        problems.append(f"mask token id {mask} is outside the target's vocabulary of {size}")
    return problems


def quantised_target(target: TargetFacts | None, suspicious: Sequence[str]) -> Outcome:
    """Is the target quantised while drafts fail as they do on another target's features?

    suspicious: codes of findings that a change of the target's features explains.
    """
    code, title = "quantised-target", "No sign that quantisation of the target costs acceptance"
    if target is None:
        return not_checked(code, title, "give the target's folder with --target")
    if target.quantisation is None:
        return clear(code, title, "the target's configuration states no quantisation")
    if not suspicious:
        return clear(code, title, f"the target is quantised ({target.quantisation}), drafts fit it")
    return Outcome(
        code, "found", "The target is quantised, and drafts do not fit it",
        f"quantisation `{target.quantisation}`, together with: {', '.join(suspicious)}",
        next_steps=(
            "record the same prompts with the BF16 target and compare: `specpilot diagnose THIS "
            "--against THAT` shows what quantisation costs by position",
            "use a drafter that was trained on this quantised target, or a lossless format (W12)",
        ),
    )  # fmt: skip
