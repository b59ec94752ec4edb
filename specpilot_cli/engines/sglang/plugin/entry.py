"""SGLang calls `register` in each of its processes, before it reads its arguments.

Without `$SPECPILOT_PLUGIN` it returns at once and imports nothing. Otherwise `activate` does what
the configuration says. SGLang would swallow an exception and serve without the plugin, so nothing
is raised: problems are kept for `/server_info`, where `specpilot` reads them after the launch, and
a plugin too broken to keep them is missing there, which `specpilot` takes for a refusal too.
"""

from __future__ import annotations

import logging
import os

_ENV = "SPECPILOT_PLUGIN"  # not imported from the schema: an inert plugin loads nothing


def register() -> None:
    """The entry point of group `sglang.srt.plugins`; never raises."""
    path = os.environ.get(_ENV)
    if not path:
        return
    try:
        from specpilot_cli.engines.sglang.plugin import activate

        activate.activate(path)
    except Exception:
        logging.getLogger(__name__).exception("specpilot: the plugin is broken and does nothing")
