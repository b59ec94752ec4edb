"""Draft trees and their acceptance inside the engine: one launch each, on torch tensors.

    trees = build_trees(candidate_ids, scores, anchor, 32)
    ...                                       # the target verifies the rows of `trees`
    path, n_accepted, *_ = accept_path(trees, target_argmax)

Tensors on a GPU use the CUDA kernels, tensors on the CPU the builders of this package, and both
give the same trees node for node: scores are normalised by the same float64 operations and ties
are broken by one rule (`reference.py`). Both functions are `torch.library` operators beneath, so
they can be compiled and captured in a CUDA graph after one call outside of it.

A request's verify rows are its anchor, the last committed token, as row 0, then the nodes in pop
order. Where a lattice has fewer paths than nodes are asked for, the last rows stand for nothing:
parent -2, depth -1, score -inf, no ancestors, and the anchor's token, which any model can embed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Final, NamedTuple

import torch

from specpilot_kernels import launch
from specpilot_kernels.trees import modules, on_cpu

MAX_POSITIONS: Final = 255

_SCHEMAS: Final = (
    "build_trees(Tensor candidate_ids, Tensor scores, Tensor anchor, Tensor? logsumexp, "
    "Tensor? calibration, Tensor? prefix_lens, int max_depth, Tensor(a!) token, Tensor(b!) parent, "
    "Tensor(c!) depth, Tensor(d!) score, Tensor(e!) ancestors, Tensor(f!) tap, "
    "Tensor(g!) position) -> ()",
    "accept_path(Tensor token, Tensor parent, Tensor target_argmax, Tensor? prefix_lens, "
    "Tensor? enabled, Tensor(a!) path, Tensor(b!) n_accepted, Tensor(c!) bonus, "
    "Tensor(d!) committed, Tensor(e!) place, Tensor(f!) length, Tensor(g!) n_committed) -> ()",
)


@dataclass(frozen=True, slots=True, eq=False)
class DeviceTrees:
    """Trees of B requests with R = n_nodes + 1 rows each, and what verify kernels need of them.

    token [B, R] int64. parent [B, R] int32: row of the parent, always a smaller one; -1 for row 0.
    depth [B, R] int32: row 0 has 0. score [B, R] float32: path log-probability in nats, summed in
    float64. ancestors [B, R, ceil(R / 64)] uint64: bit j % 64 of word j / 64 is set where row j is
    the row itself or above it. tap [B, R, 4] int32: the rows that a causal convolution of width 4
    reads, the row itself last; negative ones are in the committed window, -1 its newest. position
    [B, R] int64: tokens before the anchor and the row's depth, for unused rows the anchor's.
    max_depth: no row is deeper.
    """

    token: torch.Tensor
    parent: torch.Tensor
    depth: torch.Tensor
    score: torch.Tensor
    ancestors: torch.Tensor
    tap: torch.Tensor
    position: torch.Tensor
    max_depth: int

    @property
    def n_nodes(self) -> int:
        """Drafted nodes that a tree may have; rows less the anchor's."""
        return int(self.token.shape[1]) - 1

    @staticmethod
    def empty(batch: int, n_nodes: int, max_depth: int, device: torch.device) -> DeviceTrees:
        """Room for trees, not yet filled; what `build_trees` takes as `out`."""
        rows = n_nodes + 1
        return DeviceTrees(
            torch.empty((batch, rows), dtype=torch.int64, device=device),
            torch.empty((batch, rows), dtype=torch.int32, device=device),
            torch.empty((batch, rows), dtype=torch.int32, device=device),
            torch.empty((batch, rows), dtype=torch.float32, device=device),
            torch.empty((batch, rows, n_nodes // 64 + 1), dtype=torch.uint64, device=device),
            torch.empty((batch, rows, 4), dtype=torch.int32, device=device),
            torch.empty((batch, rows), dtype=torch.int64, device=device),
            min(max_depth, n_nodes),
        )


class AcceptedPaths(NamedTuple):
    """What `accept_path` finds; D = max_depth + 1.

    path [B, D] int32: accepted rows from row 0 down, then -1. n_accepted [B] int32: drafted tokens
    among them. bonus [B] int64: the target's token after the last of them. committed [B, D] int64:
    the tokens that the step commits, the target's after each row of the path, so the last is the
    bonus; then 0. place [B, D] int64: the path's rows among all B * R; then row 0 again. length [B]
    int64: of the sequence after the step. n_committed [B] int32: n_accepted + 1.
    """

    path: torch.Tensor
    n_accepted: torch.Tensor
    bonus: torch.Tensor
    committed: torch.Tensor
    place: torch.Tensor
    length: torch.Tensor
    n_committed: torch.Tensor

    @staticmethod
    def empty(batch: int, width: int, device: torch.device) -> AcceptedPaths:
        """Room for paths of up to `width` rows, not yet filled."""

        def new(dtype: torch.dtype, *shape: int) -> torch.Tensor:
            return torch.empty((batch, *shape), dtype=dtype, device=device)

        return AcceptedPaths(
            new(torch.int32, width), new(torch.int32), new(torch.int64), new(torch.int64, width),
            new(torch.int64, width), new(torch.int64), new(torch.int32),
        )  # fmt: skip


def build_trees(
    candidate_ids: torch.Tensor,
    scores: torch.Tensor,
    anchor: torch.Tensor,
    n_nodes: int,
    *,
    max_depth: int | None = None,
    logsumexp: torch.Tensor | None = None,
    calibration: torch.Tensor | None = None,
    prefix_lens: torch.Tensor | None = None,
    out: DeviceTrees | None = None,
) -> DeviceTrees:
    """The best-first tree of each of B lattices (paper §2.2, §4.2), in one launch.

    candidate_ids [B, L, K] int32 or int64. scores [B, L, P, K] float32: the selector's raw scores
    of each candidate after each predecessor (P = K), or the same for all predecessors (P = 1).
    They are normalised over the K candidates; `logsumexp` [B, L] float32 is subtracted instead
    where it is given, which with P = 1 and unary logits builds DDTree's marginal trees.
    anchor [B] int64: the last committed tokens. n_nodes: up to 128. K: up to 32; L: up to 255, and
    on a GPU what fits in a block's memory, on any of them 73 positions of 16 candidates or 19 of
    32. max_depth caps the depth below L. calibration [L or more, 2] float64: `calibration_table`.
    prefix_lens [B] int64: tokens before the anchors, 0 without it. out: trees of the same size to
    fill, for fixed addresses.

    Raises ValueError on shapes, dtypes, devices and tensors with gaps; GpuError where a GPU cannot
    run the kernel.
    """
    _check_lattice(candidate_ids, scores, anchor, logsumexp, calibration)
    if not 0 <= n_nodes <= modules.MAX_NODES:
        raise ValueError(f"n_nodes must be 0 to {modules.MAX_NODES}: {n_nodes}")
    batch, n_positions, _ = candidate_ids.shape
    if prefix_lens is not None:
        _check("prefix_lens", prefix_lens, (batch,), (torch.int64,), scores.device)
    cap = n_positions if max_depth is None else min(max_depth, n_positions)
    if cap < 0:
        raise ValueError(f"max_depth must not be negative: {max_depth}")
    fresh = DeviceTrees.empty(batch, n_nodes, cap, scores.device) if out is None else out
    if out is not None:
        _check_out(out, batch, n_nodes, cap, scores.device)
    torch.ops.specpilot.build_trees(
        candidate_ids, scores, anchor, logsumexp, calibration, prefix_lens, cap, fresh.token,
        fresh.parent, fresh.depth, fresh.score, fresh.ancestors, fresh.tap, fresh.position,
    )  # fmt: skip
    return fresh


def accept_path(
    trees: DeviceTrees,
    target_argmax: torch.Tensor,
    *,
    prefix_lens: torch.Tensor | None = None,
    enabled: torch.Tensor | None = None,
    out: AcceptedPaths | None = None,
) -> AcceptedPaths:
    """The root path of each tree along which the target's own choices go, in one launch.

    target_argmax [B, R] int64: what the target would say after each row. prefix_lens [B] int64:
    tokens before row 0, 0 without it. enabled [1] int32: where it holds 0, nothing is accepted, not
    even row 0: n_accepted is -1. out: results of the same size to fill, for fixed addresses.

    Raises ValueError on shapes, dtypes and devices.
    """
    batch, device = trees.token.shape[0], trees.token.device
    _check("target_argmax", target_argmax, trees.token.shape, (torch.int64,), device)
    if prefix_lens is not None:
        _check("prefix_lens", prefix_lens, (batch,), (torch.int64,), device)
    if enabled is not None:
        _check("enabled", enabled, (1,), (torch.int32,), device)
    width = trees.max_depth + 1
    found = AcceptedPaths.empty(batch, width, device) if out is None else out
    if out is not None:
        wanted = AcceptedPaths.empty(batch, width, torch.device("meta"))
        for name, given, like in zip(AcceptedPaths._fields, out, wanted, strict=True):
            _check(f"out.{name}", given, like.shape, (like.dtype,), device)
    torch.ops.specpilot.accept_path(
        trees.token, trees.parent, target_argmax, prefix_lens, enabled, *found
    )
    return found


def _build(
    candidate_ids: torch.Tensor,
    scores: torch.Tensor,
    anchor: torch.Tensor,
    logsumexp: torch.Tensor | None,
    calibration: torch.Tensor | None,
    prefix_lens: torch.Tensor | None,
    max_depth: int,
    *out: torch.Tensor,
) -> None:
    if not scores.is_cuda:
        on_cpu.build(
            candidate_ids, scores, anchor, logsumexp, calibration, prefix_lens, max_depth, *out
        )
        return
    batch, positions, predecessors, candidates = scores.shape
    variant = next(size for size in modules.CANDIDATES if candidates <= size)
    shared = modules.build_shared_bytes(positions, predecessors, variant)
    launcher = launch.prepare(
        modules.build_trees(variant), "build_trees", block=(modules.BUILD_THREADS, 1, 1),
        device=scores.device.index, options=launch.Options(shared_bytes=shared),
    )  # fmt: skip
    launcher(
        (batch, 1, 1),
        candidate_ids.data_ptr(), scores.data_ptr(), anchor.data_ptr(),
        0 if logsumexp is None else logsumexp.data_ptr(),
        0 if calibration is None else calibration.data_ptr(),
        0 if prefix_lens is None else prefix_lens.data_ptr(),
        *(tensor.data_ptr() for tensor in out),
        int(candidate_ids.dtype == torch.int64), positions, predecessors, candidates,
        out[0].shape[1] - 1, max_depth,
    )  # fmt: skip


def _accept(
    token: torch.Tensor,
    parent: torch.Tensor,
    target_argmax: torch.Tensor,
    prefix_lens: torch.Tensor | None,
    enabled: torch.Tensor | None,
    *out: torch.Tensor,
) -> None:
    if not token.is_cuda:
        on_cpu.accept(token, parent, target_argmax, prefix_lens, enabled, *out)
        return
    launcher = launch.prepare(
        modules.ACCEPT_PATH, "accept_path", block=(modules.ACCEPT_THREADS, 1, 1),
        device=token.device.index,
    )  # fmt: skip
    batch, rows = token.shape
    launcher(
        (batch, 1, 1), token.data_ptr(), parent.data_ptr(), target_argmax.data_ptr(),
        0 if prefix_lens is None else prefix_lens.data_ptr(),
        0 if enabled is None else enabled.data_ptr(),
        *(tensor.data_ptr() for tensor in out), rows, out[0].shape[1],
    )  # fmt: skip


def _check_lattice(
    candidate_ids: torch.Tensor,
    scores: torch.Tensor,
    anchor: torch.Tensor,
    logsumexp: torch.Tensor | None,
    calibration: torch.Tensor | None,
) -> None:
    if candidate_ids.ndim != 3 or scores.ndim != 4:
        raise ValueError(
            f"candidate_ids must be [B, L, K] and scores [B, L, P, K], not "
            f"{tuple(candidate_ids.shape)} and {tuple(scores.shape)}"
        )
    batch, positions, candidates = candidate_ids.shape
    if not (1 <= positions <= MAX_POSITIONS and 1 <= candidates <= max(modules.CANDIDATES)):
        raise ValueError(f"no kernel for {positions} positions of {candidates} candidates")
    device, predecessors = scores.device, 1 if scores.shape[2] == 1 else candidates
    ids = (torch.int32, torch.int64)
    shape = (batch, positions, predecessors, candidates)
    _check("candidate_ids", candidate_ids, candidate_ids.shape, ids, device)
    _check("scores", scores, shape, (torch.float32,), device)
    _check("anchor", anchor, (batch,), (torch.int64,), device)
    if logsumexp is not None:
        _check("logsumexp", logsumexp, (batch, positions), (torch.float32,), device)
        if calibration is not None:
            raise ValueError("calibration is for scores without a logsumexp")
    if calibration is not None:
        rows = max(positions, calibration.shape[0]) if calibration.ndim else positions
        _check("calibration", calibration, (rows, 2), (torch.float64,), device)


def _check_out(
    out: DeviceTrees, batch: int, n_nodes: int, max_depth: int, device: torch.device
) -> None:
    wanted = DeviceTrees.empty(batch, n_nodes, max_depth, torch.device("meta"))
    if out.max_depth < wanted.max_depth:
        raise ValueError(f"out has max_depth {out.max_depth}, but trees may be {max_depth} deep")
    for name in (field.name for field in fields(DeviceTrees) if field.name != "max_depth"):
        like = getattr(wanted, name)
        _check(f"out.{name}", getattr(out, name), like.shape, (like.dtype,), device)


def _check(
    name: str,
    tensor: torch.Tensor,
    shape: Sequence[int],
    dtypes: Sequence[torch.dtype],
    device: torch.device,
) -> None:
    if tuple(tensor.shape) != tuple(shape) or tensor.dtype not in dtypes:
        raise ValueError(
            f"{name} is {tensor.dtype} {tuple(tensor.shape)}, "
            f"not {' or '.join(map(str, dtypes))} {tuple(shape)}"
        )
    if tensor.device != device:
        raise ValueError(f"{name} is on {tensor.device}, not on {device}")
    if not tensor.is_contiguous():
        raise ValueError(f"{name} is not contiguous")


def _fake(*args: object) -> None:
    """Both operators write to what they are given and return nothing."""


_library = torch.library.Library("specpilot", "FRAGMENT")
for _schema, _function in zip(_SCHEMAS, (_build, _accept), strict=True):
    _name = _schema.partition("(")[0]
    _library.define(_schema, tags=(torch.Tag.pt2_compliant_tag,))
    _library.impl(_name, _function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"specpilot::{_name}", _fake, lib=_library)
