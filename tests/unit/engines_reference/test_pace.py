"""Steps of a set length, and steps that are longer by a set share."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from specpilot_cli.engines.reference.bridge import EngineThread
from specpilot_cli.engines.reference.scheduler import Counters

STEPS, OWN_S = 5, 0.01


class FiveSteps:
    """A scheduler with five steps to do, each of ten milliseconds."""

    def __init__(self) -> None:
        self.counters, self.done_s = Counters(), [time.monotonic()]

    @property
    def idle(self) -> bool:
        return len(self.done_s) > STEPS

    def step(self) -> list[Any]:
        time.sleep(OWN_S)
        self.done_s.append(time.monotonic())
        return []


def run(**timing: float) -> tuple[float, FiveSteps]:
    """Seconds from the first step's start to the end of all; the scheduler."""

    async def main() -> tuple[float, FiveSteps]:
        scheduler = FiveSteps()
        thread = EngineThread(scheduler, **timing)  # type: ignore[arg-type]
        start_s = time.monotonic()
        thread.start()
        while not scheduler.idle:
            await asyncio.sleep(0.001)
        await asyncio.to_thread(thread.stop)
        assert thread.failure is None
        return time.monotonic() - start_s, scheduler

    return asyncio.run(main())


def test_a_paced_step_takes_its_time() -> None:
    elapsed_s, scheduler = run(pace_s=0.03)
    assert elapsed_s >= STEPS * 0.03
    gaps = [b - a for a, b in zip(scheduler.done_s[1:-1], scheduler.done_s[2:], strict=True)]
    assert sum(gaps) >= (STEPS - 2) * 0.03  # no step begins before its turn


@pytest.mark.parametrize(("timing", "least_s"), [
    ({"pace_s": 0.03, "slow_ratio": 0.5}, STEPS * 0.045),
    ({"slow_ratio": 1.0}, STEPS * 2 * OWN_S),
])  # fmt: skip
def test_a_slowed_step_takes_longer(timing: dict[str, float], least_s: float) -> None:
    assert run(**timing)[0] >= least_s


def test_a_step_longer_than_the_pace_is_not_made_up_for() -> None:
    elapsed_s, _ = run(pace_s=0.001)
    assert elapsed_s >= STEPS * OWN_S
