"""The worker class of each drafter that trees are served with."""

from __future__ import annotations

from specpilot_cli.schema.plugin_config import TreePlugin


def worker_class(settings: TreePlugin) -> type:
    """A class whose workers build trees with `settings`."""
    if settings.drafter == "DSPARK":
        from specpilot_cli.engines.sglang.plugin.tree_dspark import DsparkTreeWorker as Worker
    else:
        from specpilot_cli.engines.sglang.plugin.tree_dflash import DflashTreeWorker as Worker
    return type("TreeWorker", (Worker,), {"settings": settings})
