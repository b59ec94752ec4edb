"""What a batch policy decides, and its spelling on the command line.

    ar                                     plain decoding
    chain:block=8                          stock's chain of 7 drafts
    tree:nodes=16,block=16                 a best-first tree of 16 nodes per request
    shared:rows=192,block=16               192 rows per step, shared by path probability (§4.4)
    shared:rows=192,block=auto,draft-rows=256
                                           and drafter blocks of 8, 12 or 16 within 256 rows

Any of them takes keys of the scheduler as well:

    prefill-every=8                        prompts wait until 8 decode steps lie between two prefill
                                           passes, unless nothing is decoding
    admission=joint                        a short prompt that this step's prefill pass leaves
                                           waiting rides in the verify step, where that costs less
                                           than a pass of its own (§4.4)
    admission=every                        every short prompt rides in the verify step
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from typing import Literal

from specpilot_cli.errors import InputError

Mode = Literal["ar", "chain", "tree", "shared"]
Admission = Literal["separate", "joint", "every"]

BLOCKS = (8, 12, 16)
"""Blocks that `auto` chooses from (paper §4.4)."""

JOINT_PROMPT_ROWS = 384
"""The longest prompt that joins a verify step (paper §4.4)."""

_KEYS: dict[Mode, tuple[str, ...]] = {
    "ar": (),
    "chain": ("block",),
    "tree": ("nodes", "block"),
    "shared": ("rows", "block", "draft-rows"),
}
_EXAMPLES: dict[Mode, str] = {
    "ar": "ar",
    "chain": "chain:block=8",
    "tree": "tree:nodes=16,block=16",
    "shared": "shared:rows=192,block=16",
}
_ADMISSIONS: tuple[Admission, ...] = ("separate", "joint", "every")
_SCHEDULER_KEYS = ("admission", "prefill-every")
_WHERE = "--policy"


@dataclass(frozen=True, slots=True)
class BatchPolicy:
    """nodes: per request (tree). rows: per step, roots included (shared). block: the drafter's
    block, anchor included; 0 is automatic, within `draft_rows` per step. prefill_every: decode
    steps from one prefill pass to the next, at least.
    """

    text: str
    mode: Mode
    nodes: int = 0
    rows: int = 0
    block: int = 0
    draft_rows: int = 0
    admission: Admission = "separate"
    prefill_every: int = 1

    @property
    def blocks(self) -> tuple[int, ...]:
        """Blocks that a request may get; empty without a drafter."""
        if self.mode == "ar":
            return ()
        return (self.block,) if self.block else BLOCKS


def parse_policy(text: str) -> BatchPolicy:
    """A policy from its spelling; InputError says what is wrong with it."""
    word, _, rest = text.strip().partition(":")
    mode = next((name for name in _KEYS if name == word), None)
    if mode is None:
        near = difflib.get_close_matches(word, _KEYS, n=1)
        guess = f"did you mean `{near[0]}`? " if near else ""
        raise InputError(
            f"unknown batch policy `{word}`", where=_WHERE, hint=f"{guess}one of {', '.join(_KEYS)}"
        )
    given = _pairs(text, rest, (*_KEYS[mode], *_SCHEDULER_KEYS))
    admission = _admission(text, given.pop("admission", "separate"))
    missing = [key for key in _KEYS[mode] if key not in given and key != "draft-rows"]
    if missing:
        raise InputError(
            f"`{text}` lacks {missing[0]}", where=_WHERE, hint=f"for example `{_EXAMPLES[mode]}`"
        )
    automatic = given.get("block") == "auto"
    if automatic and ("draft-rows" not in given or mode != "shared"):
        raise InputError(
            f"`{text}`: block=auto belongs to `shared` and needs draft-rows", where=_WHERE,
            hint="shared:rows=192,block=auto,draft-rows=256",
        )  # fmt: skip
    numbers = {key: _number(text, key, value) for key, value in given.items() if value != "auto"}
    if not automatic and numbers.get("block", 2) < 2:
        raise InputError(f"`{text}`: a block holds the anchor and a draft at least", where=_WHERE)
    return BatchPolicy(
        text.strip(), mode, numbers.get("nodes", 0), numbers.get("rows", 0),
        numbers.get("block", 0), numbers.get("draft-rows", 0),
        admission, numbers.get("prefill-every", 1),
    )  # fmt: skip


def _admission(text: str, word: str) -> Admission:
    found = next((name for name in _ADMISSIONS if name == word), None)
    if found is None:
        raise InputError(
            f"admission `{word}` in `{text}`", where=_WHERE, hint="separate, joint or every"
        )
    return found


def _pairs(text: str, rest: str, known: tuple[str, ...]) -> dict[str, str]:
    found: dict[str, str] = {}
    for part in filter(None, rest.split(",")):
        key, sign, value = part.partition("=")
        if key not in known or not sign or key in found:
            raise InputError(
                f"cannot read `{part}` in `{text}`", where=_WHERE,
                hint=f"key=value with {', '.join(known)}, each once",
            )  # fmt: skip
        found[key] = value
    return found


def _number(text: str, key: str, value: str) -> int:
    if not value.isascii() or not value.isdigit() or not 0 < int(value) <= 65536:
        raise InputError(f"`{key}={value}` in `{text}` is no number of 1 to 65536", where=_WHERE)
    return int(value)
