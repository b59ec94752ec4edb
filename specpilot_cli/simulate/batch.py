"""A discrete-event simulation of batched decoding: what each step holds, costs and commits.

Requests come in file order, so many at once as the concurrency allows, and one takes the place of
another as it ends (a closed loop). A step prefills waiting prompts where its policy's turn has
come, drafts, verifies and commits; recorded lattices and outputs say what is accepted, measured
times what it takes. Replay of the same trees at one request gives the same tokens per step.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from specpilot_cli.errors import InputError
from specpilot_cli.replay.anchors import AS_RECORDED, ReplayOptions
from specpilot_cli.schema.batch_times import BatchStepTimes
from specpilot_cli.schema.lattice import LatticeRecording
from specpilot_cli.simulate.blocks import Acceptance, choose_blocks, share_nodes
from specpilot_cli.simulate.costs import StepClock, StepLoad
from specpilot_cli.simulate.forest import Forest, grow
from specpilot_cli.simulate.policy import JOINT_PROMPT_ROWS, BatchPolicy
from specpilot_cli.ui import Reporter, SilentReporter

PREFILL_ROWS = 512
"""Most prompt rows of one prefill pass, as in the reference engine."""

Int = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class BatchResult:
    """One policy at one concurrency.

    tau: tokens per decoding request and step, bonus included, the prefill's token not counted.
    mean_rows, mean_requests, mean_draft_rows: per decode step. first_token_s: median time from the
    moment a request is taken up to its first token. joined_prompts: that rode in a verify step.
    extrapolated: components that left their measured range.
    """

    policy: str
    concurrency: int
    tokens: int
    seconds: float
    steps: int
    tau: float
    mean_rows: float
    mean_requests: float
    mean_draft_rows: float
    first_token_s: float
    joined_prompts: int
    extrapolated: tuple[str, ...]

    @property
    def tokens_per_s(self) -> float:
        """Output tokens of all requests per second."""
        return self.tokens / self.seconds


def simulate_batches(
    recording: LatticeRecording,
    times: BatchStepTimes,
    policies: list[BatchPolicy],
    concurrencies: list[int],
    *,
    repeat: int = 1,
    options: ReplayOptions = AS_RECORDED,
    reporter: Reporter = SilentReporter(),
) -> list[BatchResult]:
    """Every policy at every concurrency. Raises InputError for what the recording cannot answer.

    repeat: run through the recorded requests so many times, which shortens the tail of a batch in
    proportion.
    """
    if repeat < 1 or not concurrencies or min(concurrencies) < 1:
        raise InputError("concurrency and repeat are at least 1")
    forest = grow(recording, policies, options, reporter=reporter)
    return [
        _Run(forest, policy, concurrency, times, repeat).result()
        for concurrency in concurrencies
        for policy in policies
    ]


class _Run:
    """One run; a request is an index into the recording's requests times `repeat`."""

    def __init__(
        self,
        forest: Forest,
        policy: BatchPolicy,
        concurrency: int,
        times: BatchStepTimes,
        repeat: int,
    ) -> None:
        recording = forest.anchors.recording
        self._forest, self._policy, self._concurrency = forest, policy, concurrency
        self._clock = StepClock(times)
        self._prompt = np.tile(np.diff(recording.prompt_offsets), repeat)
        self._length = np.tile(np.diff(recording.output_offsets), repeat)
        self._first = np.tile(forest.anchors.first, repeat)
        self._position = np.zeros(len(self._prompt), dtype=np.int64)
        self._acceptance = Acceptance(len(self._prompt))
        self._next, self._now = 0, 0.0
        self._filling: list[list[int]] = []  # [request, prompt rows left]
        self._running: list[int] = []
        self._taken = np.zeros(len(self._prompt))
        self._first_token: list[float] = []
        self._steps = self._request_steps = self._rows = self._draft_rows = 0
        self._committed = self._joined = 0
        self._since_prefill = policy.prefill_every  # decode steps

    def result(self) -> BatchResult:
        """Run to the end."""
        while self._next < len(self._prompt) or self._filling or self._running:
            self._step()
        steps, requests = max(1, self._steps), max(1, self._request_steps)
        return BatchResult(
            policy=self._policy.text,
            concurrency=self._concurrency,
            tokens=int(self._length.sum()),
            seconds=self._now,
            steps=self._steps,
            tau=self._committed / requests,
            mean_rows=self._rows / steps,
            mean_requests=self._request_steps / steps,
            mean_draft_rows=self._draft_rows / steps,
            first_token_s=float(np.median(self._first_token)),
            joined_prompts=self._joined,
            extrapolated=tuple(sorted(self._clock.extrapolated)),
        )

    def _step(self) -> None:
        self._take()
        running = np.array(self._running, dtype=np.int64)
        blocks = self._blocks(running)
        draft_rows = int(blocks.sum())
        nodes = self._nodes(running, blocks)
        context = int((self._prompt[running] + self._position[running] + 1).sum())
        load = StepLoad(len(running) + int(nodes.sum()), len(running), draft_rows, context)
        room = self._room(running)
        joined = self._join(load, room)
        ready = joined + self._prefill(room)
        if len(running) or joined:
            prompt_rows = sum(int(self._prompt[request]) for request in joined)
            whole = replace(load, rows=load.rows + prompt_rows)
            self._now += self._clock.decode_s(whole)
            self._steps += 1
            self._since_prefill += 1
            self._rows += whole.rows
            self._draft_rows += draft_rows
            self._request_steps += len(running)
        self._commit(running, nodes, blocks)
        self._running = [r for r in self._running if self._position[r] < self._length[r] - 1]
        for request in ready:
            self._first_token.append(self._now - float(self._taken[request]))
            if self._length[request] > 1:
                self._running.append(request)

    def _take(self) -> None:
        while (
            self._next < len(self._prompt)
            and len(self._filling) + len(self._running) < self._concurrency
        ):
            self._filling.append([self._next, int(self._prompt[self._next])])
            self._taken[self._next] = self._now
            self._next += 1

    def _blocks(self, running: Int) -> Int:
        policy = self._policy
        if policy.mode == "ar" or not len(running):
            return np.zeros(len(running), dtype=np.int64)
        if policy.block:
            return np.full(len(running), policy.block, dtype=np.int64)
        return choose_blocks(self._acceptance.of(running), policy.draft_rows)

    def _anchors(self, running: Int) -> Int:
        return np.asarray(self._first[running] + self._position[running], dtype=np.int64)

    def _nodes(self, running: Int, blocks: Int) -> Int:
        policy = self._policy
        if policy.mode == "ar" or not len(running):
            return np.zeros(len(running), dtype=np.int64)
        if policy.mode == "chain":
            return np.asarray(blocks - 1, dtype=np.int64)
        anchors = self._anchors(running)
        scores = [
            self._forest.trees[int(block)].score[anchor]
            for anchor, block in zip(anchors, blocks, strict=True)
        ]
        widest = max(len(score) for score in scores)
        padded = np.full((len(scores), widest), -np.inf)
        for row, score in enumerate(scores):
            padded[row, : len(score)] = score
        if policy.mode == "tree":
            whole: Int = np.isfinite(padded).sum(axis=1).astype(np.int64)
            return np.asarray(np.minimum(whole, policy.nodes), dtype=np.int64)
        return share_nodes(padded, policy.rows - len(running))

    def _room(self, running: Int) -> int:
        """Prompt rows that this step's prefill pass may hold: none before its turn."""
        turn = not len(running) or self._since_prefill >= self._policy.prefill_every
        return PREFILL_ROWS if turn else 0

    def _join(self, load: StepLoad, room: int) -> list[int]:
        """Take the prompts that ride in the verify step out of the queue, in its order.

        `joint` takes prompts that a pass of `room` rows leaves waiting, while riding costs less
        than a pass of their own; `every` takes the short ones at the head of the queue.
        """
        every = self._policy.admission == "every"
        if self._policy.admission == "separate" or not load.requests:
            return []
        joined: list[int] = []
        rows = load.rows
        for request, left in self._filling if every else self._held(room):
            before, after = replace(load, rows=rows), replace(load, rows=rows + left)
            extra = self._clock.decode_s(after) - self._clock.decode_s(before)
            if left != self._prompt[request] or left > JOINT_PROMPT_ROWS:
                break
            if not every and extra >= self._clock.prefill_s(left):
                break
            joined.append(request)
            rows += left
        self._filling = [item for item in self._filling if item[0] not in joined]
        self._joined += len(joined)
        return joined

    def _held(self, room: int) -> list[list[int]]:
        """What a prefill pass of `room` rows does not reach."""
        reached = 0
        for index, item in enumerate(self._filling):
            if reached >= room:
                return self._filling[index:]
            reached += item[1]
        return []

    def _prefill(self, room: int) -> list[int]:
        """One pass over waiting prompt rows, first come first served; prompts that end in it."""
        used, ready = 0, []
        for item in self._filling:
            rows = min(room - used, item[1])
            if rows == 0:
                break
            item[1] -= rows
            used += rows
            if item[1] == 0:
                ready.append(item[0])
        self._filling = [item for item in self._filling if item[1] > 0]
        self._now += self._clock.prefill_s(used)
        self._since_prefill = 0 if used else self._since_prefill
        return ready

    def _commit(self, running: Int, nodes: Int, blocks: Int) -> None:
        if not len(running):
            return
        left = self._length[running] - 1 - self._position[running]
        accepted = self._accepted(running, nodes, blocks)
        committed = np.minimum(accepted + 1, left)
        self._position[running] += committed
        self._committed += int(committed.sum())
        if len(self._policy.blocks) > 1:
            self._acceptance.saw(running, accepted, blocks - 1)

    def _accepted(self, running: Int, nodes: Int, blocks: Int) -> Int:
        if self._policy.mode == "ar":
            return np.zeros(len(running), dtype=np.int64)
        anchors = self._anchors(running)
        if self._policy.mode == "chain":
            return np.asarray(np.minimum(self._forest.chain[anchors], blocks - 1), dtype=np.int64)
        accepted = np.zeros(len(running), dtype=np.int64)
        for block in np.unique(blocks):
            own = blocks == block
            accepted[own] = self._forest.trees[int(block)].accepted(anchors[own], nodes[own])
        return accepted
