"""Import what SGLang's processes import; run once when their environment is made."""

from __future__ import annotations

import importlib
import logging

logging.disable(logging.WARNING)  # one for each model whose packages are left out

for name in (
    "launch_server",
    "srt.entrypoints.http_server",
    "srt.managers.detokenizer_manager",
    "srt.managers.scheduler",
    "srt.models.registry",  # imports every model
    "srt.speculative.dflash_worker_v2",
):
    importlib.import_module(f"sglang.{name}")
