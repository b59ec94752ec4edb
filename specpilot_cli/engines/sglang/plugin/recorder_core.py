"""The recorder of one scheduler process: what the hooks call, and what it says of itself.

A step goes like this. `begin` copies the prefix lengths into static device rows. The drafter's
hooks write the lattice and stock's chain into the same rows; under CUDA graphs these writes are
captured with the draft and happen again at every replay, without any Python. `finish` adds the
commit lengths and starts one asynchronous copy of the rows to the host. Everything is ordered by
the stream that the server uses anyway, so nothing waits for the device.
"""

from __future__ import annotations

import logging
import os
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from specpilot_cli.engines.sglang.plugin.recorder_layout import RowLayout
from specpilot_cli.engines.sglang.plugin.recorder_ring import HostRing
from specpilot_cli.engines.sglang.plugin.recorder_writer import ShardWriter
from specpilot_cli.schema.plugin_config import RecorderPlugin
from specpilot_cli.schema.raw_lattice import RecorderIndex

_log = logging.getLogger(__name__)

ACC_LEN_ENV = "SGLANG_SIMULATE_ACC_LEN"
TOKEN_MODE_ENV = "SGLANG_SIMULATE_ACC_TOKEN_MODE"
# A longer gap between two steps is an idle server, not a step.
_LONGEST_STEP_S = 1.0


@dataclass(frozen=True, slots=True)
class Shape:
    """What the draft worker says of its lattices; `max_rows` bounds the requests of a step."""

    algorithm: Literal["DFLASH", "DSPARK"]
    block: int
    positions: int
    candidates: int
    max_rows: int


class Recorder:
    """Records steps of one draft worker.

    A failure stops the recording, never the server: what the hooks call raises nothing of its own,
    and the first reason stays in the facts.
    """

    def __init__(
        self,
        config: RecorderPlugin,
        *,
        engine: str,
        environ: Mapping[str, str] = os.environ,
    ) -> None:
        self._config = config
        self._engine = engine
        self._environ = environ
        self._session = f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}-{secrets.token_hex(4)}"
        self._problem: str | None = None
        self._layout: RowLayout | None = None
        self._shape: Shape | None = None
        self._ints: torch.Tensor | None = None
        self._reals: torch.Tensor | None = None
        self._ring: HostRing | None = None
        self._writer: ShardWriter | None = None
        self._last_begin_s = 0.0
        self.steps = 0
        self.lattices = 0
        self.dropped_steps = 0
        self.hook_s = 0.0
        self.step_s = 0.0

    def open(self, shape: Shape, device: torch.device, *, writes: bool) -> None:
        """Make the buffers; before any CUDA graph is captured.

        writes: False on tensor-parallel ranks whose lattices are copies of another rank's; they
        take part in the collectives of the lattice and keep nothing.
        """
        try:
            self._check_mode(shape.algorithm)
            layout = RowLayout(shape.positions, shape.candidates)
            size = (shape.max_rows, layout.words)
            with torch.inference_mode(False):  # an inference tensor could not be written outside
                self._ints = torch.zeros(size, dtype=torch.int32, device=device)
            self._reals = self._ints.view(torch.float32)
            self._layout, self._shape = layout, shape
            if writes:
                self._ring = HostRing(shape.max_rows, layout.words, on_gpu=device.type == "cuda")
                self._writer = ShardWriter(self.folder, layout, self._index(shape))
                self._writer.start()
        except Exception as error:  # noqa: BLE001 - the server serves on, without a recording
            self.fail(f"the recorder could not start: {error}")

    @property
    def folder(self) -> Path:
        """Where this process writes."""
        return Path(self._config.folder) / self._session

    @property
    def dense(self) -> bool:
        """Whether a lattice is wanted at every output position."""
        return self._config.mode == "dense"

    @property
    def layout(self) -> RowLayout | None:
        """Columns of the rows; None while not open."""
        return self._layout

    def rows(self, count: int) -> tuple[torch.Tensor, torch.Tensor] | None:
        """The first `count` static rows as int32 and as float32, for the hooks of the drafter.

        None if there is nothing to write into, or more requests than the buffers were made for.
        """
        if self._ints is None or self._reals is None:
            return None
        if count > self._ints.shape[0]:
            self.fail(f"a step has {count} requests, more than the {self._ints.shape[0]} expected")
            return None
        return self._ints[:count], self._reals[:count]

    def begin(self, prefix_lens: torch.Tensor) -> bool:
        """Before a decode step; prefix_lens int [bs]. False if this step is not recorded."""
        start_s = time.perf_counter()
        if self._problem is not None or self._writer is None or not self._wanted():
            return False
        rows = self.rows(prefix_lens.shape[0])
        if rows is None or self._layout is None:
            return False
        rows[0][:, self._layout.prefix_len].copy_(prefix_lens)
        gap_s = start_s - self._last_begin_s
        self.step_s += gap_s if gap_s < _LONGEST_STEP_S else 0.0
        self._last_begin_s = start_s
        self.hook_s += time.perf_counter() - start_s
        return True

    def finish(self, requests: Sequence[str], commit_lens: torch.Tensor) -> None:
        """After the step that `begin` announced; row i belongs to requests[i]."""
        start_s = time.perf_counter()
        if self._ring is None or self._writer is None or self._layout is None:
            return
        self.steps += 1
        slot = self._ring.take()
        if slot is None:
            self.dropped_steps += 1
            return
        rows = self.rows(len(requests))
        if rows is None:
            slot.release()
            return
        rows[0][:, self._layout.commit_len].copy_(commit_lens)
        slot.fill(rows[0])
        self._writer.submit(slot, requests)
        self.lattices += len(requests)
        self.hook_s += time.perf_counter() - start_s

    def fail(self, reason: str) -> None:
        """Stop recording for good."""
        if self._problem is None:
            self._problem = reason
            _log.error("specpilot: recording has stopped: %s", reason)

    def close(self) -> None:
        """Write what is left; at the end of the process."""
        if self._writer is not None:
            self._writer.close()

    def facts(self) -> dict[str, Any] | str:
        """For `/server_info`; if nothing is recorded, a sentence why."""
        writer, shape = self._writer, self._shape
        if writer is not None and writer.problem is not None:
            self.fail(writer.problem)
        if self._layout is None:
            self.fail("nothing to record: the server runs neither DFLASH nor DSPARK")
        if self._problem is not None:
            return self._problem
        if writer is None or shape is None:
            return "another rank of this server writes the recording"
        return {
            "mode": self._config.mode,
            "algorithm": shape.algorithm,
            "block": shape.block,
            "positions": shape.positions,
            "candidates": shape.candidates,
            "folder": str(self.folder),
            "session": self._session,
            "steps": self.steps,
            "lattices": self.lattices,
            "written_lattices": writer.lattices,
            "dropped_steps": self.dropped_steps,
            "bytes": writer.bytes_written,
            "seconds": self.hook_s,
            "step_seconds": self.step_s,
            "writer_seconds": writer.busy_s,
            "full": self.steps >= self._config.max_steps,
        }

    def _wanted(self) -> bool:
        writer = self._writer
        if writer is not None and not writer.alive:
            self.fail(writer.problem or "the writer's thread has ended")
            return False
        return self.steps < self._config.max_steps

    def _check_mode(self, algorithm: str) -> None:
        """Raise ValueError if the server does not accept drafts the way the mode needs."""
        given = self._environ.get(ACC_LEN_ENV)
        simulated = given is not None and _number(given) > 0
        if self._config.mode == "anchored":
            if simulated:
                raise ValueError(
                    f"mode anchored records where the drafts were accepted, but {ACC_LEN_ENV}="
                    f"{given} replaces that; unset it"
                )
        elif algorithm == "DSPARK":
            if simulated:
                raise ValueError(
                    f"{ACC_LEN_ENV}={given} makes DSPARK emit other tokens than the target's; "
                    "unset it: in mode dense the recorder itself has every draft rejected"
                )
        elif given is None or _number(given) != 1:
            raise ValueError(
                f"mode dense needs {ACC_LEN_ENV}=1, so that the server commits one token a step; "
                f"it is {'not set' if given is None else given}"
            )
        elif (tokens := self._environ.get(TOKEN_MODE_ENV, "fixed")) != "real-draft-token":
            raise ValueError(
                f"mode dense needs {TOKEN_MODE_ENV}=real-draft-token: with `{tokens}` the server "
                "emits made-up tokens"
            )

    def _index(self, shape: Shape) -> RecorderIndex:
        return RecorderIndex(
            session=self._session,
            mode=self._config.mode,
            algorithm=shape.algorithm,
            engine=self._engine,
            block=shape.block,
            positions=shape.positions,
            candidates=shape.candidates,
        )


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return -1.0
