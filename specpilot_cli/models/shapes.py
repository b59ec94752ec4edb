"""The projections of a model, from its profile: name, how often, and [out_features, in_features].

Projections that engines fuse into one matrix product are one entry. `specpilot_kernels.w12.shapes`
lists the same matrices for tuning kernels; a test holds the two together.
"""

from __future__ import annotations

from dataclasses import dataclass

from specpilot_cli.schema.model_profile import (
    AttentionShape,
    ExpertsShape,
    MlpShape,
    ModelProfile,
    RecurrentShape,
)

# Endings of projections that add a mixer's output back to the stream: attention's and GDN's.
OUTPUT_ENDINGS = ("_o", "_out")


@dataclass(frozen=True, slots=True)
class Projection:
    """One matrix [out_features, in_features], `count` times in the model.

    `experts` and `active` are above 1 only for routed experts: `count` counts layers then.
    """

    name: str
    count: int
    out_features: int
    in_features: int
    experts: int = 1
    active: int = 1

    @property
    def weights(self) -> int:
        """Weights of all its copies, every expert included."""
        return self.count * self.experts * self.out_features * self.in_features

    def weights_read(self, rows: float) -> float:
        """Weights that a pass over `rows` rows reads.

        Routed experts are read if any row picks them; rows are taken to pick independently and
        evenly, which no router does exactly: experts · (1 - (1 - active / experts)^rows).
        """
        if self.experts == 1:
            return float(self.weights)
        touched: float = 1 - (1 - self.active / self.experts) ** rows
        return self.weights * touched

    @property
    def weights_per_row(self) -> float:
        """Weights that one row is multiplied by."""
        return self.weights * self.active / self.experts


def projections(model: ModelProfile) -> tuple[Projection, ...]:
    """Every projection of the layers, equal ones of several groups as one entry."""
    found: dict[tuple[str, int, int, int], Projection] = {}
    for group in model.layers:
        n = group.count.value
        mixer = group.mixer
        if isinstance(mixer, AttentionShape):
            entries = _attention(mixer, model)
        else:
            entries = _gdn(mixer, model)
        for item in (*entries, *_mlp(group.mlp, model)):
            key = (item.name, item.out_features, item.in_features, item.experts)
            before = found[key].count if key in found else 0
            found[key] = Projection(
                item.name, before + n, item.out_features, item.in_features, item.experts,
                item.active,
            )  # fmt: skip
    return tuple(found.values())


def head(model: ModelProfile) -> Projection:
    """The LM head; a tied one is the embedding table, and is read all the same."""
    return Projection("head", 1, model.vocab.value, model.hidden.value)


def context_projections(model: ModelProfile) -> tuple[Projection, ...]:
    """What a drafter runs on rows that were just committed: join features, keys and values."""
    if model.drafter is None:
        return ()
    hidden = model.hidden.value
    found = [Projection("fc", 1, hidden, model.drafter.features.value * hidden)]
    for group in model.layers:
        mixer = group.mixer
        if isinstance(mixer, AttentionShape):
            width = 2 * mixer.kv_heads.value * mixer.head_dim.value
            found.append(Projection("context_kv", group.count.value, width, hidden))
    return tuple(found)


def draft_extras(model: ModelProfile) -> tuple[Projection, ...]:
    """A drafter's matrices beside its layers that every drafted row passes."""
    drafter, hidden = model.drafter, model.hidden.value
    found: list[Projection] = []
    if drafter is None:
        return ()
    if drafter.selector_rank is not None:
        found.append(Projection("selector", 1, drafter.selector_rank.value, hidden))
    if drafter.conv_group is not None and drafter.conv_width is not None:
        taps = 2 * drafter.conv_width.value * hidden // drafter.conv_group.value
        found.append(Projection("conv_kernels", 2 * model.n_layers, taps, hidden))
    return tuple(found)


def _attention(mixer: AttentionShape, model: ModelProfile) -> tuple[Projection, ...]:
    hidden, prefix = model.hidden.value, mixer.prefix
    query = mixer.heads.value * mixer.head_dim.value
    key = mixer.kv_heads.value * mixer.head_dim.value
    shared = mixer.value_is_key is not None and mixer.value_is_key.value
    width = query * (2 if mixer.gate == "fused" else 1) + key * (1 if shared else 2)
    found = [Projection(f"{prefix}_{'qk' if shared else 'qkv'}", 1, width, hidden)]
    if mixer.gate == "separate":
        found.append(Projection(f"{prefix}_gate", 1, query, hidden))
    found.append(Projection(f"{prefix}_o", 1, hidden, query))
    return tuple(found)


def _gdn(mixer: RecurrentShape, model: ModelProfile) -> tuple[Projection, ...]:
    hidden, prefix = model.hidden.value, mixer.prefix
    value = mixer.value_heads.value * mixer.value_dim.value
    key = mixer.key_heads.value * mixer.key_dim.value
    return (
        Projection(f"{prefix}_in", 1, 2 * key + 2 * value, hidden),
        Projection(f"{prefix}_gates", 1, 2 * mixer.value_heads.value, hidden),
        Projection(f"{prefix}_out", 1, hidden, value),
    )


def _mlp(mlp: MlpShape | ExpertsShape, model: ModelProfile) -> tuple[Projection, ...]:
    hidden = model.hidden.value
    if isinstance(mlp, MlpShape):
        size = mlp.intermediate.value
        return (
            Projection("gate_up", 1, 2 * size, hidden), Projection("down", 1, hidden, size),
        )  # fmt: skip
    size, n, active = mlp.intermediate.value, mlp.experts.value, mlp.active.value
    found = [
        Projection("router", 1, n, hidden),
        Projection("expert_gate_up", 1, 2 * size, hidden, n, active),
        Projection("expert_down", 1, hidden, size, n, active),
    ]
    if mlp.shared_intermediate is not None:
        shared = mlp.shared_intermediate.value
        found.append(Projection("shared_gate_up", 1, 2 * shared, hidden))
        found.append(Projection("shared_down", 1, hidden, shared))
    return tuple(found)
