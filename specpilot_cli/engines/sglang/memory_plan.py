"""How much memory a server will take, part by part, before it is started.

Follows the way SGLang divides a device (its `mem_fraction_static` rule and the sizes of its
pools): the static share holds weights, recurrent states with their snapshots for verification,
and the KV pool that gets the rest; graphs and activations live outside. Sizes are per GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from specpilot_cli.engines.sglang.arguments import Arguments, share, whole
from specpilot_cli.engines.sglang.model_shape import CACHE_BYTES, HEAD, Matrix, ModelShape
from specpilot_cli.schema.plugin_config import TreePlugin, W12Plugin
from specpilot_cli.units import format_bytes
from specpilot_kernels.w12 import layout

MIB = 2**20
# A process's CUDA context and libraries, before SGLang asks how much memory is free.
CONTEXT_BYTES = 600 * MIB
# Weights outside their channel's window; far more than trained BF16 weights show (docs/w12.md).
ESCAPE_SHARE = 1e-3
# SGLang's defaults: requests with DFLASH, mamba share, state slots a request while radix is on.
_DFLASH_REQUESTS, _MAMBA_SHARE, _RADIX_SLOTS, _EXTRA_BUFFER_SLOTS = 48, 0.9, 3, 2
_DEFAULT_BLOCK = 16
# Of SGLang's own reserve rule, in MiB: fixed, per prefill token, per graph batch size and bucket.
_FIXED_MIB, _PER_TOKEN_MIB, _PER_BATCH_MIB, _PREFILL_GRAPHS_MIB = 512, 1.5, 2, 400
_LARGE_GPU_RESERVE_MIB = 10 * 1024
_LEAST_CHUNK = 2048
# Prompt positions whose log-probabilities SGLang computes at once (token forcing asks for them).
_LOGIT_ROWS = 2048


@dataclass(frozen=True, slots=True)
class Device:
    """What a server has: bytes of one device, and where the number comes from."""

    name: str
    memory_bytes: int
    source: str


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What one server loads. w12: None for BF16 weights; tree: None for stock's chain.

    w12_checkpoint: the target comes converted, so that its BF16 weights are never loaded.
    """

    target: ModelShape
    drafter: ModelShape | None
    w12: W12Plugin | None = None
    w12_checkpoint: bool = False
    tree: TreePlugin | None = None


@dataclass(frozen=True, slots=True)
class Part:
    """One tenant of the memory; `how` says how its size comes about."""

    name: str
    n_bytes: int
    how: str


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """One server's memory on one device.

    free_bytes: at its start. static_bytes: its share for weights, states and KV. parts: what
    fills it. outside: what must fit beside it. load_peak_bytes: while weights are loaded.
    kv_tokens: what the KV pool holds. problems: why it cannot be served; empty if it fits.
    """

    device: Device
    free_bytes: int
    static_fraction: float
    static_bytes: int
    parts: tuple[Part, ...]
    outside: tuple[Part, ...]
    load_peak_bytes: int
    kv_bytes_per_token: int
    kv_tokens: int
    needed_tokens: int
    problems: tuple[str, ...]
    warnings: tuple[str, ...]

    @property
    def resident_bytes(self) -> int:
        """What the server keeps once it runs."""
        return CONTEXT_BYTES + sum(part.n_bytes for part in (*self.parts, *self.outside))


def plan_memory(
    model: ServedModel,
    arguments: Arguments,
    device: Device,
    *,
    tensor_parallel: int,
    requests: int,
    context: int,
    taken_bytes: int = 0,
) -> MemoryPlan:
    """The plan of one server with `arguments`, for `requests` of up to `context` tokens each.

    taken_bytes: held on the device by servers that were started before. Raises `InputError` for
    arguments that are no numbers.
    """
    free = max(0, device.memory_bytes - taken_bytes - CONTEXT_BYTES)
    sizes = _Sizes(model, arguments, device, tensor_parallel)
    static = int(free * sizes.fraction)
    weights = sizes.weights()
    left = static - sum(part.n_bytes for part in weights)
    states, slots = sizes.states(left, requests)
    left -= sum(part.n_bytes for part in states)
    per_token = sizes.kv_bytes_per_token
    tokens = max(0, left // per_token)
    limit = whole(arguments, "max-total-tokens")
    tokens = tokens if limit is None else min(tokens, limit)
    needed = requests * context
    kv = Part("KV cache", tokens * per_token, f"{tokens} tokens × {per_token} B")
    plan = MemoryPlan(
        device=device,
        free_bytes=free,
        static_fraction=sizes.fraction,
        static_bytes=static,
        parts=(*weights, *states, kv),
        outside=sizes.outside(),
        load_peak_bytes=sizes.load_peak(),
        kv_bytes_per_token=per_token,
        kv_tokens=tokens,
        needed_tokens=needed,
        problems=(),
        warnings=(),
    )
    return _judged(plan, slots, requests)


def encoded_bytes(matrices: Sequence[Matrix]) -> int:
    """W12 bytes of `matrices`: records of whole tiles, windows, escapes at `ESCAPE_SHARE`."""
    total = 0
    for matrix in matrices:
        rows = -(-matrix.rows // layout.RECORD_ROWS)
        columns = -(-matrix.columns // layout.RECORD_COLS)
        escapes = int(matrix.rows * matrix.columns * ESCAPE_SHARE) * layout.ESCAPE_BYTES
        per_row = layout.WINDOW_BYTES_PER_ROW + layout.ESCAPE_PTR_BYTES
        total += matrix.count * (
            rows * columns * layout.RECORD_BYTES + matrix.rows * per_row + escapes
        )
    return total


def _judged(plan: MemoryPlan, slots: int | None, requests: int) -> MemoryPlan:
    """The plan with what is wrong about it."""
    problems, warnings = [], []
    fixed = sum(part.n_bytes for part in plan.parts if part.name != "KV cache")
    if plan.load_peak_bytes > plan.free_bytes:
        problems.append(
            f"loading takes {format_bytes(plan.load_peak_bytes)}, "
            f"{format_bytes(plan.free_bytes)} are free"
        )
    elif fixed > plan.static_bytes:
        problems.append(
            f"weights and states take {format_bytes(fixed)}, the static share has "
            f"{format_bytes(plan.static_bytes)}"
        )
    elif plan.kv_tokens < plan.needed_tokens:
        problems.append(
            f"the KV cache holds {plan.kv_tokens} tokens, {plan.needed_tokens} are needed"
        )
    if slots is not None and slots < requests:
        problems.append(f"there are state slots for {max(0, slots)} requests, not {requests}")
    outside = sum(part.n_bytes for part in plan.outside)
    kept = plan.free_bytes - plan.static_bytes
    if outside > kept:
        warnings.append(
            f"what lives beside it may take {format_bytes(outside)}, "
            f"mem-fraction-static leaves {format_bytes(kept)}"
        )
    return replace(plan, problems=tuple(problems), warnings=tuple(warnings))


class _Sizes:
    """The parts of one server, per GPU of `tensor_parallel`."""

    def __init__(
        self, model: ServedModel, arguments: Arguments, device: Device, tensor_parallel: int
    ) -> None:
        self._model, self._arguments, self._device = model, arguments, device
        self._parallel = tensor_parallel
        self._chunk = whole(arguments, "chunked-prefill-size") or _default_chunk(device)
        self._requests = whole(arguments, "max-running-requests") or (
            _DFLASH_REQUESTS if self._draft_tokens else None
        )
        self.fraction = share(arguments, "mem-fraction-static") or self._default_fraction()

    @property
    def kv_bytes_per_token(self) -> int:
        """Target and drafter; the target's cache may be in eight bits."""
        target, drafter = self._model.target, self._model.drafter
        eight_bits = str(self._arguments.get("kv-cache-dtype", "auto")).startswith("fp8")
        own = target.kv_bytes_per_token // (2 if eight_bits else 1)
        drafted = 0 if drafter is None else drafter.kv_bytes_per_token
        return -(-own // self._parallel) - (-drafted // self._parallel)

    @property
    def _draft_tokens(self) -> int | None:
        drafter = self._model.drafter
        if drafter is None:
            return None
        given = whole(
            self._arguments, "speculative-num-draft-tokens", "speculative-dflash-block-size"
        )
        return given or drafter.draft_tokens or _DEFAULT_BLOCK

    def weights(self) -> list[Part]:
        """Target and drafter as they stay on the GPU."""
        model, w12 = self._model, self._model.w12
        parts = [self._weight_part("target weights", model.target, w12, with_head=True)]
        if model.drafter is not None:
            own = w12 if w12 is not None and w12.drafter else None
            parts.append(self._weight_part("drafter weights", model.drafter, own, with_head=False))
        return parts

    def _weight_part(
        self, name: str, shape: ModelShape, w12: W12Plugin | None, *, with_head: bool
    ) -> Part:
        if w12 is None:
            return Part(name, shape.weight_bytes // self._parallel, "BF16")
        encoded = [
            matrix
            for matrix in shape.matrices
            if matrix.name != HEAD or (with_head and w12.lm_head)
        ]
        kept = shape.weight_bytes - sum(matrix.n_bytes for matrix in encoded)
        packed = encoded_bytes(encoded)
        how = f"W12 {format_bytes(packed)}, BF16 {format_bytes(kept)}"
        return Part(name, (packed + kept) // self._parallel, how)

    def load_peak(self) -> int:
        """Loading holds the whole target in BF16, and the largest layer twice while encoding."""
        model = self._model
        drafter = 0 if model.drafter is None else model.drafter.weight_bytes
        if model.w12 is None:
            return (model.target.weight_bytes + drafter) // self._parallel
        if model.w12_checkpoint:
            return sum(part.n_bytes for part in self.weights())
        largest = max(m.n_bytes // m.count for m in model.target.matrices)
        return (model.target.weight_bytes + drafter + 2 * largest) // self._parallel

    def states(self, left: int, requests: int) -> tuple[list[Part], int | None]:
        """Recurrent states and their snapshots, and how many requests they are for."""
        shape = self._model.target
        if not shape.gdn_state_bytes:
            return [], self._requests
        per_slot = (shape.gdn_state_bytes + shape.gdn_conv_bytes) // self._parallel
        nodes, radix = self._kept_states(), "disable-radix-cache" not in self._arguments
        each = self._slots_a_request() if radix else 1
        slots = whole(self._arguments, "max-mamba-cache-size")
        if slots is None and not radix and self._requests is not None:
            slots = self._requests
        if slots is None:
            budget = int(left * _MAMBA_SHARE / (1 + _MAMBA_SHARE))
            spent = per_slot * (1 + nodes)
            slots = max(0, (budget - spent) // int(per_slot * (1 + nodes / each)))
        served = slots // each if self._requests is None else min(self._requests, slots // each)
        parts = [
            Part(
                "GDN states", per_slot * (slots + 1), f"{slots + 1} slots × {_slot_text(per_slot)}"
            )
        ]
        if nodes:
            how = f"{nodes} nodes × {served + 1} requests × {_slot_text(per_slot)}"
            name = "GDN snapshots"
            if self._model.tree is not None:
                how = f"room of {nodes} states × {served + 1} requests × {_slot_text(per_slot)}"
                name = "GDN replay records"
            parts.append(Part(name, per_slot * nodes * (served + 1), how))
        return parts, served

    def _kept_states(self) -> int:
        """States beside its own that a request gets the memory of."""
        tree = self._model.tree
        return self._draft_tokens or 0 if tree is None else tree.record_states

    def _slots_a_request(self) -> int:
        strategy = self._arguments.get("mamba-radix-cache-strategy")
        return _RADIX_SLOTS + (_EXTRA_BUFFER_SLOTS if strategy == "extra_buffer" else 0)

    def outside(self) -> tuple[Part, ...]:
        """What lives beside the static share: graphs, activations, logits, workspaces."""
        shape, tokens = self._model.target, max(self._chunk, _LEAST_CHUNK)
        graphs = self._graph_mib() * MIB
        # gate, up and their product, and four copies of the hidden state, are alive at once
        widths = 3 * shape.widest // self._parallel + 4 * shape.hidden
        logits = _LOGIT_ROWS * -(-shape.vocabulary // self._parallel) * 4
        return (
            Part("CUDA graphs", graphs, f"batches to {self._graph_batch()}" if graphs else "none"),
            Part("activations", tokens * widths * CACHE_BYTES, f"prefill of {tokens} tokens"),
            Part("logits", logits, f"float32 of {_LOGIT_ROWS} positions that are scored at once"),
            Part("workspaces", _FIXED_MIB * MIB, "of kernels and libraries"),
        )

    def _graph_mib(self) -> int:
        if not self._device_is_gpu() or "disable-cuda-graph" in self._arguments:
            return 0
        prefill = 0 if "disable-prefill-cuda-graph" in self._arguments else _PREFILL_GRAPHS_MIB
        return self._graph_batch() * _PER_BATCH_MIB + prefill

    def _graph_batch(self) -> int:
        given = whole(self._arguments, "cuda-graph-max-bs-decode", "cuda-graph-max-bs")
        if given is not None:
            return given
        largest = _default_batch(self._device)
        return largest if self._requests is None else min(largest, self._requests)

    def _device_is_gpu(self) -> bool:
        return self._device.name != "cpu"

    def _default_fraction(self) -> float:
        """SGLang's own rule where `mem-fraction-static` is not given."""
        total = self._device.memory_bytes / MIB
        tokens = max(self._chunk, _LEAST_CHUNK)
        reserve = _FIXED_MIB + tokens * _PER_TOKEN_MIB + self._graph_mib() + self._parallel * 128
        if total > 60 * 1024:
            reserve = max(reserve, _LARGE_GPU_RESERVE_MIB)
        return round(max(0.0, (total - reserve) / total), 3)


def _slot_text(n_bytes: int) -> str:
    """In MiB, as SGLang's own log has it."""
    return f"{n_bytes / MIB:.0f} MiB" if n_bytes >= MIB else format_bytes(n_bytes)


# SGLang's defaults by memory: GiB below which they hold, prefill chunk, largest graph batch.
_BY_MEMORY = (
    (20, 2048, 8), (35, 4096, 48), (60, 4096, 32), (90, 8192, 256), (160, 8192, 256),
    (float("inf"), 16384, 512),
)  # fmt: skip


def _default_chunk(device: Device) -> int:
    return next(chunk for below, chunk, _ in _BY_MEMORY if device.memory_bytes < below * 2**30)


def _default_batch(device: Device) -> int:
    return next(batch for below, _, batch in _BY_MEMORY if device.memory_bytes < below * 2**30)
