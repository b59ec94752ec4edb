"""Timers around the engine's own functions, put in place for one measurement and taken out again.

A scope's seconds are exclusive: while an inner scope runs, the outer one's clock stands. So a GDN
layer counts as `recurrent` and the projections inside it as `target_gemm`. Inside the drafter
nothing is split, whatever it borrows from the target.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from torch import nn

from specpilot_cli.engines.reference import decode
from specpilot_cli.engines.reference.decode import Core
from specpilot_cli.engines.reference.rows import RowPlan
from specpilot_cli.schema.step_profile import KernelClassName

if TYPE_CHECKING:
    from specpilot_cli.engines.reference.engine import ReferenceEngine

_CLASSES: tuple[KernelClassName, ...] = (
    "target_gemm", "head", "recurrent", "attention", "drafter", "tree", "rest",
)  # fmt: skip
_CALIBRATION_CALLS = 2000


class ScopeTimer:
    """Exclusive seconds and calls per class, inclusive seconds per span.

    `per_call_s` is what one scope itself costs (see `cost_of_one_scope`); it is taken out.
    """

    def __init__(self, per_call_s: float = 0.0) -> None:
        self.calls: Counter[str] = Counter()
        self.spans: defaultdict[str, float] = defaultdict(float)
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._stack: list[str] = []
        self._since = 0.0
        self._on = False
        self._per_call_s = per_call_s

    def start(self) -> None:
        """Begin to count; before that, wrapped functions run untimed."""
        self._on = True

    def stop(self) -> None:
        """Stop counting."""
        self._on = False

    def class_seconds(self) -> dict[KernelClassName, float]:
        """Seconds per class that occurred, the timers' own cost taken out."""
        return {
            name: max(self._seconds[name] - self.calls[name] * self._per_call_s, 0.0)
            for name in _CLASSES
            if self.calls[name]
        }

    def overhead_s(self) -> float:
        """Seconds that the timers themselves took."""
        return sum(self.calls.values()) * self._per_call_s

    def wrap(
        self, name: KernelClassName, function: Callable[..., Any], span: str | None = None
    ) -> Callable[..., Any]:
        """`function`, timed as class `name`, and as `span` where it is the outermost one."""

        def timed(*args: Any, **kwargs: Any) -> Any:
            stack = self._stack
            if not self._on or (stack and stack[-1] == "drafter"):
                return function(*args, **kwargs)
            entered = time.perf_counter()
            if stack:
                self._seconds[stack[-1]] += entered - self._since
            stack.append(name)
            self._since = entered
            try:
                return function(*args, **kwargs)
            finally:
                left = time.perf_counter()
                self._seconds[name] += left - self._since
                self.calls[name] += 1
                stack.pop()
                self._since = left
                if span is not None:
                    self.spans[span] += left - entered

        return timed


def cost_of_one_scope() -> float:
    """Seconds that entering and leaving a scope takes on this machine."""
    timer = ScopeTimer()
    timer.start()
    wrapped = timer.wrap("rest", lambda: None)
    started = time.perf_counter()
    for _ in range(_CALIBRATION_CALLS):
        wrapped()
    return (time.perf_counter() - started) / _CALIBRATION_CALLS


@contextmanager
def instrument(engine: ReferenceEngine, core: Core, timer: ScopeTimer) -> Iterator[None]:
    """Time every kernel class of `core`'s steps while the block runs."""
    model, drafter = engine.model, core.drafter
    with ExitStack() as undo:

        def patch(
            owner: Any, attribute: str, name: KernelClassName, span: str | None = None
        ) -> None:
            # instances and modules hold no such attribute of their own before, classes do
            own = attribute in vars(owner)
            original = getattr(owner, attribute)
            undo.callback(
                lambda: setattr(owner, attribute, original) if own else delattr(owner, attribute)
            )
            setattr(owner, attribute, timer.wrap(name, original, span))

        patch(model, "forward_rows", "rest", "VERIFY")
        patch(model, "commit", "recurrent", "COMMIT")
        patch(model.lm_head, "forward", "head", "HEAD")
        for layer in model.layers:
            if layer.is_gdn:
                patch(layer.linear_attn, "rows", "recurrent")
            else:
                patch(layer.self_attn, "project", "attention")
                patch(layer.self_attn, "output", "attention")
            for module in layer.modules():
                if isinstance(module, nn.Linear):
                    patch(module, "forward", "target_gemm")
        patch(RowPlan, "attend", "attention")
        if drafter is not None:
            patch(drafter, "draft", "drafter", "DRAFT")
            patch(drafter, "append_context", "drafter", "CONTEXT")
            patch(decode, "edge_log_probs", "tree", "TREE")
            patch(decode, "select_tree", "tree", "TREE")
        yield
