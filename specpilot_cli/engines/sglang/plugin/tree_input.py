"""What a step leaves to the next one: stock's state, with room for a tree."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.runtime_context import get_spec
from sglang.srt.speculative.dflash_info_v2 import DFlashDraftInputV2

from specpilot_cli.schema.plugin_config import TreePlugin


class TreeDraftInput(DFlashDraftInputV2):  # type: ignore[misc]
    """Reserves KV slots for the wider of block and tree; stock knows one width."""

    window = 0

    def prepare_for_decode(self, batch: Any) -> None:
        """Stock's, with the window for its width."""
        with get_spec().override(speculative_num_draft_tokens=self.window):
            super().prepare_for_decode(batch)


def tree_draft_input(
    bonus_tokens: torch.Tensor, new_seq_lens: torch.Tensor, settings: TreePlugin
) -> TreeDraftInput:
    """The state after a prefill or a step: last committed tokens [B], sequence lengths [B]."""
    batch, device = int(new_seq_lens.numel()), bonus_tokens.device
    made = TreeDraftInput(
        topk_p=torch.empty((batch, 0), dtype=torch.float32, device=device),
        topk_index=torch.empty((batch, 0), dtype=torch.int64, device=device),
        bonus_tokens=bonus_tokens.to(torch.int64),
        new_seq_lens=new_seq_lens.to(torch.int64),
        hidden_states=torch.empty((batch, 0), dtype=torch.float16, device=device),
    )
    made.window = settings.window
    return made
