"""The reference engine in one process: load a pair, generate greedily, score given tokens.

It defines what each mechanism means, in float32 by default, and makes every command run on a
machine without a GPU. The HTTP server in `server.py` runs the same scheduler behind a thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from specpilot_cli.engines.base import GenerateRequest
from specpilot_cli.engines.reference.config import DrafterConfig
from specpilot_cli.engines.reference.decode import Core, Job, StepObserver
from specpilot_cli.engines.reference.faults import Fault
from specpilot_cli.engines.reference.scheduler import (
    DEFAULT_MAX_RUNNING,
    DEFAULT_PREFILL_ROWS,
    Scheduler,
)
from specpilot_cli.engines.reference.score import score_tokens
from specpilot_cli.engines.reference.spec import EngineResult, SpecConfig, TokenScores
from specpilot_cli.engines.reference.weights import load_drafter, load_target
from specpilot_cli.errors import InputError, MachineError
from specpilot_cli.io.hashing import sha256_folder

if TYPE_CHECKING:
    from tokenizers import Tokenizer

DtypeName = Literal["float32", "bfloat16"]
_DTYPES: dict[str, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class ReferenceEngine:
    """A loaded target, and a drafter where the mode needs one.

    `threads` sets torch's intra-op threads for this process. `drafter` may be given in `ar` mode
    too: the target then captures the drafter's features, as recording needs. Raises `InputError`
    for folders that are no model or no pair, and for speculation without a drafter.
    """

    def __init__(
        self,
        target: Path,
        drafter: Path | None,
        spec: SpecConfig | None = None,
        *,
        dtype: DtypeName = "float32",
        threads: int = 1,
        fault: Fault | None = None,
    ) -> None:
        spec = spec or SpecConfig()
        if dtype not in _DTYPES:
            raise InputError(
                f"unknown dtype `{dtype}`", hint=f"choose one of: {', '.join(_DTYPES)}"
            )
        if spec.mode != "ar" and drafter is None:
            raise InputError(f"mode `{spec.mode}` needs a drafter", hint="give --drafter DIR")
        if threads < 1:
            raise InputError(f"threads must be at least 1, got {threads}")
        torch.set_num_threads(threads)
        started = time.monotonic()
        self.target_path, self.drafter_path = target, drafter
        self.spec, self.dtype, self.threads, self.fault = spec, dtype, threads, fault
        capture = DrafterConfig.from_folder(drafter).target_layer_ids if drafter else ()
        self.model = load_target(target, capture=capture, dtype=_DTYPES[dtype])
        self.drafter = load_drafter(drafter, self.model, dtype=_DTYPES[dtype]) if drafter else None
        for module in (self.model, self.drafter):
            if module is not None:
                module.requires_grad_(False)
        self._verifier = self.model if fault is None else fault.verifier(self.model)
        if spec.mode != "ar":
            self.check_block(spec.block)
        self.load_s = time.monotonic() - started
        self.has_tokenizer = (target / "tokenizer.json").is_file()
        self._tokenizer: Tokenizer | None = None
        self._hashes: dict[str, str | None] | None = None

    @property
    def context_length(self) -> int:
        """Most tokens of prompt and output together."""
        return self.model.config.max_positions

    @property
    def vocab_size(self) -> int:
        """Rows of the LM head."""
        return self.model.config.vocab_size

    @property
    def eos_ids(self) -> frozenset[int]:
        """Tokens that end an output unless the request ignores them."""
        return frozenset({self.model.config.eos_token_id})

    @property
    def hashes(self) -> dict[str, str | None]:
        """SHA-256 of the target and drafter folders, keys `target` and `drafter`."""
        if self._hashes is None:
            drafter = self.drafter_path
            self._hashes = {
                "target": sha256_folder(self.target_path),
                "drafter": sha256_folder(drafter) if drafter else None,
            }
        return self._hashes

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights in memory, target and drafter."""
        modules = [module for module in (self.model, self.drafter) if module is not None]
        parameters = {p.data_ptr(): p for module in modules for p in module.parameters()}
        return sum(p.numel() * p.element_size() for p in parameters.values())

    @property
    def tokenizer(self) -> Tokenizer:
        """The target folder's tokenizer. Raises `InputError` if it has none."""
        if self._tokenizer is None:
            self._tokenizer = _load_tokenizer(self.target_path)
        return self._tokenizer

    def encode(self, text: str) -> tuple[int, ...]:
        """Token ids of `text`, special tokens of the tokenizer's template included."""
        return tuple(self.tokenizer.encode(text).ids)

    def core(self, spec: SpecConfig | None = None, observer: StepObserver | None = None) -> Core:
        """What a scheduler runs on; `spec` replaces the engine's own settings."""
        spec = spec or self.spec
        # an AR server must not pay for a drafter's context that nobody reads
        drafter = self.drafter if spec.mode != "ar" else None
        fault = self.fault or Fault()
        return Core(self.model, self._verifier, drafter, spec, fault, observer)

    def scheduler(
        self,
        *,
        max_running: int = DEFAULT_MAX_RUNNING,
        prefill_rows: int = DEFAULT_PREFILL_ROWS,
        spec: SpecConfig | None = None,
        observer: StepObserver | None = None,
    ) -> Scheduler:
        """A new scheduler on this engine's weights."""
        core = self.core(spec, observer)
        return Scheduler(core, max_running=max_running, prefill_rows=prefill_rows)

    def generate(
        self,
        requests: Iterable[GenerateRequest],
        *,
        concurrency: int = DEFAULT_MAX_RUNNING,
        spec: SpecConfig | None = None,
        keep_features: bool = False,
        observer: StepObserver | None = None,
        on_done: Callable[[EngineResult], None] | None = None,
    ) -> list[EngineResult]:
        """Answer all requests greedily, `concurrency` in flight; results in the given order.

        `spec` overrides the engine's settings for this call. `keep_features` adds the drafter's
        input features of every committed row to the results. Raises `InputError` for prompts
        that are empty, out of the vocabulary or too long.
        """
        jobs = [self.job(request, keep_features=keep_features) for request in requests]
        scheduler = self.scheduler(max_running=concurrency, spec=spec, observer=observer)
        for index, job in enumerate(jobs):
            # results are matched by place, so equal request ids do not mix
            scheduler.submit(replace(job, request_id=str(index)))
        results: dict[int, EngineResult] = {}
        while not scheduler.idle:
            for slot in scheduler.step():
                if slot.finish_reason is not None:
                    index = int(slot.job.request_id)
                    slot.job = jobs[index]
                    results[index] = slot.result()
                    if on_done is not None:
                        on_done(results[index])
        return [results[index] for index in range(len(jobs))]

    def score(self, input_ids: Sequence[int], start: int = 0, *, top_k: int = 1) -> TokenScores:
        """Log-probabilities of `input_ids[start + 1:]`, each given everything before it.

        Computed by one prefill; `top_k` best tokens per position ride along. Never faulted.
        """
        self.check_ids(input_ids)
        if not 0 <= start < len(input_ids):
            raise InputError(f"cannot score from token {start} of {len(input_ids)}")
        return score_tokens(
            self.model, input_ids, start=start, top_k=top_k, chunk=DEFAULT_PREFILL_ROWS
        )

    def job(self, request: GenerateRequest, *, keep_features: bool = False) -> Job:
        """The checked job of one request."""
        ids = request.input_ids or (self.encode(request.text) if request.text else ())
        self.check_ids(ids, request.max_new_tokens)
        return Job(
            request_id=request.request_id,
            input_ids=tuple(ids),
            max_new_tokens=request.max_new_tokens,
            stop_ids=frozenset() if request.ignore_eos else self.eos_ids,
            logprob_start=len(ids) if request.top_logprobs else None,
            top_logprobs=request.top_logprobs,
            keep_features=keep_features,
        )

    def check_block(self, block: int, where: str = "--block") -> None:
        """Raise `InputError` for a draft block that no sequence of this model can hold."""
        if block > self.context_length:
            raise InputError(
                f"a draft block of {block} is longer than the model's context of "
                f"{self.context_length} tokens",
                where=where,
                hint="a drafter predicts a few tokens well: 8 and 16 are usual blocks",
            )

    def check_ids(self, ids: Sequence[int], max_new_tokens: int = 0) -> None:
        """Raise `InputError` unless `ids` is a prompt this engine can take."""
        if not ids:
            raise InputError("the prompt holds no token", hint="give every prompt some text")
        worst = max(ids) if min(ids) >= 0 else min(ids)
        if not 0 <= worst < self.vocab_size:
            raise InputError(
                f"token id {worst} is outside the vocabulary of {self.vocab_size} tokens",
                hint="is the tokenizer this model's own?",
            )
        if len(ids) >= self.context_length + (max_new_tokens == 0):
            raise InputError(
                f"The input ({len(ids)} tokens) is longer than the model's context length "
                f"({self.context_length} tokens).",
                hint="shorten the prompt or its max_new_tokens",
            )
        if max_new_tokens < 0:
            raise InputError(f"max_new_tokens must be at least 0, got {max_new_tokens}")
        total = len(ids) + max_new_tokens
        if total > self.context_length:
            raise InputError(
                f"Requested token count exceeds the model's maximum context length of "
                f"{self.context_length} tokens. You requested a total of {total} tokens: "
                f"{len(ids)} tokens from the input messages and {max_new_tokens} tokens for "
                "the completion.",
                hint="shorten the prompt or its max_new_tokens",
            )

    def describe(self) -> dict[str, Any]:
        """Resolved settings as a JSON object; what the server shows under `specpilot`."""
        return {
            **self.spec.describe(),
            "dtype": self.dtype,
            "threads": self.threads,
            "target_sha256": self.hashes["target"],
            "drafter_sha256": self.hashes["drafter"],
            "weight_format": "w12" if (self.target_path / "w12_manifest.json").exists() else "bf16",
            "fault": self.fault.describe() if self.fault else None,
        }


def _load_tokenizer(target: Path) -> Tokenizer:
    path = target / "tokenizer.json"
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise MachineError(
            "text prompts need the `tokenizers` library",
            hint="pip install '.[torch]' in the clone, or send token ids",
        ) from error
    if not path.is_file():
        raise InputError(f"no tokenizer.json in `{target}`", hint="send token ids instead of text")
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception for a bad file
        raise InputError(
            f"not a tokenizer: {error}",
            where=str(path),
            hint="copy tokenizer.json from the checkpoint again",
        ) from error
