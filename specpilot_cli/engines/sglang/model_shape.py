"""What a model profile means for a server's memory: weights, KV cache, recurrent states."""

from __future__ import annotations

from dataclasses import dataclass, fields
from itertools import zip_longest

from specpilot_cli.models.shapes import draft_extras, head, projections
from specpilot_cli.schema.model_profile import (
    AttentionShape,
    LayerGroup,
    ModelProfile,
    RecurrentShape,
)

CACHE_BYTES = 2
"""Bytes of a cached key or value, and of a kept convolution input, in BF16."""

HEAD = "head"
# Linear layers that the plugin leaves as they are: too narrow, or no linear layer of SGLang's.
_KEPT = ("gdn_gates", "router")


@dataclass(frozen=True, slots=True)
class Matrix:
    """`count` linear layers' weights [rows, columns]: outputs by inputs."""

    name: str
    rows: int
    columns: int
    count: int
    weight_bytes: int = 2

    @property
    def n_bytes(self) -> int:
        """Bytes of all `count` of them, not encoded."""
        return self.rows * self.columns * self.count * self.weight_bytes


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A model as its server's memory sees it.

    widest: of an MLP's inner layer. kv_bytes_per_token: over all attention layers.
    gdn_state_bytes, gdn_conv_bytes: one request's recurrent states, and the kept inputs of their
    convolutions, over all layers. matrices: linear layers that can be W12, head included unless
    it is tied. other_bytes: everything else. draft_tokens: a drafter's block, None for a target.
    """

    hidden: int
    widest: int
    vocabulary: int
    kv_bytes_per_token: int
    gdn_state_bytes: int
    gdn_conv_bytes: int
    matrices: tuple[Matrix, ...]
    other_bytes: int
    draft_tokens: int | None

    @property
    def linear_bytes(self) -> int:
        """Bytes of the matrices, not encoded."""
        return sum(matrix.n_bytes for matrix in self.matrices)

    @property
    def weight_bytes(self) -> int:
        """Bytes of the whole model, not encoded."""
        return self.linear_bytes + self.other_bytes

    def first_difference(self, other: ModelShape) -> str | None:
        """What differs first, as `name: ours, theirs`; None if the shapes agree."""
        for mine, theirs in zip_longest(self.matrices, other.matrices):
            if mine != theirs:
                return f"{(mine or theirs).name}: {_words(mine)}, {_words(theirs)}"
        for field in fields(self):
            own, others = getattr(self, field.name), getattr(other, field.name)
            if own != others:
                return f"{field.name}: {own}, {others}"
        return None


def _words(matrix: Matrix | None) -> str:
    if matrix is None:
        return "none"
    return f"{matrix.count} of [{matrix.rows}, {matrix.columns}]"


def shape_of(model: ModelProfile) -> ModelShape:
    """The memory of the model with this profile.

    Layers with a window are counted as if they cached every token, which no server exceeds.
    """
    matrices, kept = _split(model)
    return ModelShape(
        hidden=model.hidden.value,
        widest=max(group.mlp.intermediate.value for group in model.layers),
        vocabulary=model.vocab.value,
        kv_bytes_per_token=sum(_cached_bytes(group) for group in model.layers),
        gdn_state_bytes=sum(_state_bytes(group) for group in model.layers),
        gdn_conv_bytes=sum(_conv_bytes(group) for group in model.layers),
        matrices=matrices,
        other_bytes=kept + _tables_bytes(model),
        draft_tokens=None if model.drafter is None else model.drafter.block.value,
    )


def _split(model: ModelProfile) -> tuple[tuple[Matrix, ...], int]:
    """The matrices that can be W12, and the bytes of the other projections."""
    size, found, kept = model.weight_bytes.value, [], 0
    own = projections(model)
    for each in own:
        if each.name in _KEPT or each.experts > 1:
            kept += each.weights * size
        else:
            found.append(Matrix(each.name, each.out_features, each.in_features, each.count, size))
    if model.drafter is None and not model.tied_head.value:
        last = head(model)
        found.append(Matrix(HEAD, last.out_features, last.in_features, 1, size))
    if model.drafter is not None:
        joined = model.drafter.features.value * model.hidden.value
        kept += joined * model.hidden.value * size
        kept += sum(each.weights for each in draft_extras(model)) * size
    return tuple(found), kept


def _tables_bytes(model: ModelProfile) -> int:
    """Embedding and norms; a drafter has the target's embedding, and tables of its selector."""
    norms = (2 * model.n_layers + 1) * model.hidden.value
    if model.drafter is None:
        rows = model.hidden.value
    else:
        rank = model.drafter.selector_rank
        rows = 0 if rank is None else 2 * rank.value
    return (norms + model.vocab.value * rows) * model.weight_bytes.value


def _cached_bytes(group: LayerGroup) -> int:
    mixer = group.mixer
    if not isinstance(mixer, AttentionShape):
        return 0
    return group.count.value * 2 * mixer.kv_heads.value * mixer.head_dim.value * CACHE_BYTES


def _state_bytes(group: LayerGroup) -> int:
    mixer = group.mixer
    if not isinstance(mixer, RecurrentShape):
        return 0
    state = mixer.value_heads.value * mixer.key_dim.value * mixer.value_dim.value
    return group.count.value * state * mixer.state_bytes.value


def _conv_bytes(group: LayerGroup) -> int:
    mixer = group.mixer
    if not isinstance(mixer, RecurrentShape):
        return 0
    keys = mixer.key_heads.value * mixer.key_dim.value
    values = mixer.value_heads.value * mixer.value_dim.value
    kept = mixer.conv_width.value - 1
    return group.count.value * (2 * keys + values) * kept * CACHE_BYTES
