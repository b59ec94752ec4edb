"""Token forcing: is this server's output stock's, up to rounding? (paper §3.3)"""

from __future__ import annotations

from specpilot_cli.token_force.config import TokenForceSettings
from specpilot_cli.token_force.result import TokenForceResult
from specpilot_cli.token_force.run import run_token_force

__all__ = ["TokenForceResult", "TokenForceSettings", "run_token_force"]
