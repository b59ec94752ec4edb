"""Hugging Face transformers as a scorer: any model it loads, without a server.

On a GPU the body runs in the checkpoint's own type and the LM head in float32, as SGLang's
`--enable-fp32-lm-head` does; on a CPU everything runs in float32. torch and transformers are
imported when a scorer is made.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from specpilot_cli.engines.base import ForcedScores
from specpilot_cli.errors import InputError, MachineError

# Logit rows that exist at one time: 128 of a 248k vocabulary are 127 MB in float32.
_LOGIT_ROWS = 128


class TransformersScorer:
    """Scores forced tokens with a causal language model from a local folder.

    Raises MachineError without torch and transformers, InputError for a folder that holds no such
    model.
    """

    def __init__(self, folder: Path) -> None:
        missing = [n for n in ("torch", "transformers") if importlib.util.find_spec(n) is None]
        if missing:
            raise MachineError(
                f"this scorer needs {' and '.join(missing)}",
                hint="pip install torch transformers, or give a server's URL",
            )
        if not (folder / "config.json").is_file():
            raise InputError(
                f"no model in `{folder}`", where="--scorer", hint="give a Hugging Face folder"
            )
        import torch
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        device = "cuda" if torch.cuda.is_available() else "cpu"
        try:
            model: Any = AutoModelForCausalLM.from_pretrained(
                str(folder),
                dtype="auto" if device == "cuda" else torch.float32,
                local_files_only=True,
            )
        except (OSError, ValueError, KeyError) as error:
            raise InputError(
                f"transformers cannot load `{folder}`: {error}",
                where="--scorer",
                hint="is it whole, and is this version of transformers new enough for it?",
            ) from error
        self._torch = torch
        self._model: Any = model.to(device).eval()
        self._body: Any = self._model.get_decoder()
        self._head = self._model.get_output_embeddings()
        self._vocab = int(self._head.weight.shape[0])
        self._check_head(folder)

    def describe(self) -> dict[str, Any]:
        """What a reader of the result needs to know of the scorer."""
        import transformers

        return {
            "engine": "transformers",
            "version": transformers.__version__,
            "dtype": str(self._model.dtype).removeprefix("torch."),
            "enable_fp32_lm_head": True,
            "device": str(self._model.device),
        }

    def score(self, input_ids: Sequence[int], start: int) -> ForcedScores:
        """Score the tokens `input_ids[start:]`, each given everything before it; start >= 1."""
        if not 1 <= start < len(input_ids):
            raise InputError(f"cannot score from token {start} of {len(input_ids)}")
        if not 0 <= min(input_ids) <= max(input_ids) < self._vocab:
            raise InputError(
                f"a token id lies outside the scorer's vocabulary of {self._vocab}",
                where="--scorer",
                hint="is it the model that answered?",
            )
        torch = self._torch
        with torch.inference_mode():
            ids = torch.tensor([list(input_ids[:-1])], device=self._model.device)
            hidden = self._body(input_ids=ids, use_cache=False).last_hidden_state[0, start - 1 :]
            forced = torch.tensor(list(input_ids[start:]), device=hidden.device)
            parts = [
                self._rows(hidden[a : a + _LOGIT_ROWS], forced[a : a + _LOGIT_ROWS])
                for a in range(0, len(forced), _LOGIT_ROWS)
            ]
        own, best_ids, best = (np.concatenate(column) for column in zip(*parts, strict=True))
        return ForcedScores(own.astype(np.float64), best_ids, best.astype(np.float64))

    def _check_head(self, folder: Path) -> None:
        """Refuse a model whose logits are more than its head's product (a soft cap, a scale)."""
        torch = self._torch
        with torch.inference_mode():
            ids = torch.tensor([[1, 2, 3]], device=self._model.device)
            whole = self._model(input_ids=ids, use_cache=False).logits[0, -1].float()
            ours = self._logits(self._body(input_ids=ids, use_cache=False).last_hidden_state[0, -1])
        if float((whole - ours).abs().max()) > 0.05 * float(whole.abs().max()):
            raise InputError(
                f"the model in `{folder}` changes its logits after the LM head",
                where="--scorer",
                hint="serve it with SGLang and give that server's URL",
            )

    def _logits(self, hidden: Any) -> Any:
        bias = None if self._head.bias is None else self._head.bias.float()
        return self._torch.nn.functional.linear(hidden.float(), self._head.weight.float(), bias)

    def _rows(self, hidden: Any, forced: Any) -> tuple[Any, Any, Any]:
        """Log-probabilities of `forced` [r] and of the best tokens from hidden rows [r, H]."""
        logprobs = self._logits(hidden).log_softmax(-1)
        best, ids = logprobs.max(-1)
        own = logprobs.gather(1, forced.unsqueeze(1)).squeeze(1)
        return own.cpu().numpy(), ids.cpu().numpy(), best.cpu().numpy()
