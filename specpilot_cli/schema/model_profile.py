"""The shape of a model: what a step reads and computes follows from these numbers alone.

One form for bundled profiles (`profiles/models/NAME.yaml`) and for a Hugging Face `config.json`
read by `specpilot_cli.models.hf_config`. Every number says whether its source states it or it is
derived, and names the source. Layers of one kind form a group; their order does not matter here.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, StringConstraints, model_validator

from specpilot_cli.schema.base import FileModel
from specpilot_cli.schema.gpu_profile import ProfileName, Sentence
from specpilot_cli.schema.quantities import impossible

Origin = Literal["stated", "derived"]
Word = Annotated[str, StringConstraints(pattern=r"^[a-z][a-z0-9_]*$")]


_LARGEST = {
    "weight_bytes": 8, "state_bytes": 8, "conv_width": 1024, "count": 10_000, "heads": 65_536,
    "kv_heads": 65_536, "key_heads": 65_536, "value_heads": 65_536, "head_dim": 65_536,
    "key_dim": 65_536, "value_dim": 65_536, "experts": 65_536, "active": 65_536,
    "vocab": 10**8, "window": 10**9,
}  # fmt: skip
_SIZE_HINT = "sizes are of one layer, in elements; weights and states in bytes each, not in bits"


class Count(FileModel):
    """A whole number above zero; `source` is a key of the profile's `sources`."""

    value: Annotated[int, Field(ge=1, le=10**9)]
    kind: Origin
    source: Word


class Flag(FileModel):
    """A yes or no, sourced like a `Count`."""

    value: bool
    kind: Origin
    source: Word


class AttentionShape(FileModel):
    """Softmax attention. `prefix` names its projections (`attn_qkv`, `attn_o`).

    window: keys a query sees at most; absent = all. gate: where the output gate's projection is:
    `fused` with the query's, a matrix of its own, or none. value_is_key: one projection serves
    keys and values, which are still cached apart.
    """

    type: Literal["attention"]
    prefix: Word = "attn"
    heads: Count
    kv_heads: Count
    head_dim: Count
    window: Count | None = None
    gate: Literal["none", "fused", "separate"] = "none"
    value_is_key: Flag | None = None


class RecurrentShape(FileModel):
    """Gated DeltaNet (paper Eq. 2): one state [key_dim, value_dim] per value head."""

    type: Literal["gated_delta_net"]
    prefix: Word = "gdn"
    key_heads: Count
    value_heads: Count
    key_dim: Count
    value_dim: Count
    conv_width: Count
    state_bytes: Count


class MlpShape(FileModel):
    """A gated MLP: gate and up [intermediate, hidden], down [hidden, intermediate]."""

    type: Literal["dense"]
    intermediate: Count


class ExpertsShape(FileModel):
    """A mixture of gated MLPs: `active` of `experts` a token, and a shared one if there is."""

    type: Literal["experts"]
    experts: Count
    active: Count
    intermediate: Count
    shared_intermediate: Count | None = None

    @model_validator(mode="after")
    def _active_fit(self) -> ExpertsShape:
        if self.active.value > self.experts.value:
            raise ValueError(f"{self.active.value} active of {self.experts.value} experts")
        return self


Mixer = Annotated[AttentionShape | RecurrentShape, Field(discriminator="type")]
FeedForward = Annotated[MlpShape | ExpertsShape, Field(discriminator="type")]


class LayerGroup(FileModel):
    """`count` layers of one shape."""

    count: Count
    mixer: Mixer
    mlp: FeedForward


class DrafterShape(FileModel):
    """What a DFlash or DFlash2 drafter has beside its layers. Embedding and head are the target's.

    features: target layers whose hidden states are joined into one by `fc`. The selector's tables
    [vocab, rank] are gathered, never streamed. conv_group: channels that share one correction of
    the two-tap convolutions around attention and MLP; absent = no convolutions.
    """

    block: Count
    features: Count
    selector_rank: Count | None = None
    selector_top_k: Count | None = None
    conv_group: Count | None = None
    conv_width: Count | None = None

    @model_validator(mode="after")
    def _pairs(self) -> DrafterShape:
        for one, other in (
            ("selector_rank", "selector_top_k"), ("conv_group", "conv_width"),
        ):  # fmt: skip
            if (getattr(self, one) is None) != (getattr(self, other) is None):
                raise ValueError(f"{one} and {other} belong together")
        return self


class StatedTotal(FileModel):
    """A total that a source prints, to check the shape against; `digits` after the point count.

    `unembedded_bytes`: all projections and the LM head, without embedding tables.
    """

    gigabytes: Annotated[float, Field(gt=0)]
    digits: Annotated[int, Field(ge=0, le=4)]
    source: Word


class ModelProfile(FileModel):
    """One model's shape. Matrices are [out_features, in_features] in `weight_bytes` per weight.

    tied_head: the LM head is the embedding table; it is read by every step all the same.
    """

    schema_version: Literal[1]
    name: ProfileName
    title: Sentence
    aliases: tuple[str, ...] = ()
    sources: Annotated[dict[Word, Sentence], Field(min_length=1)]
    hidden: Count
    vocab: Count
    weight_bytes: Count
    tied_head: Flag
    layers: Annotated[tuple[LayerGroup, ...], Field(min_length=1)]
    drafter: DrafterShape | None = None
    streamed: StatedTotal | None = None
    notes: tuple[Sentence, ...] = ()

    @model_validator(mode="after")
    def _sources_known(self) -> ModelProfile:
        used = set(_sources(self))
        if missing := used - set(self.sources):
            raise ValueError(f"no such source: {', '.join(sorted(missing))}")
        if unused := set(self.sources) - used:
            raise ValueError(f"a source that no number names: {', '.join(sorted(unused))}")
        return self

    @model_validator(mode="after")
    def _possible(self) -> ModelProfile:
        """Sizes that no model has are slips: bits for bytes, a total for one layer's number."""
        sizes = [("weight_bytes", self.weight_bytes), ("hidden", self.hidden),
                 ("vocab", self.vocab)]  # fmt: skip
        for group in self.layers:
            sizes += [("count", group.count)]
            for part in (group.mixer, group.mlp):
                sizes += [(n, v) for n in type(part).model_fields
                          if isinstance(v := getattr(part, n), Count)]  # fmt: skip
        for name, count in sizes:
            if count.value > _LARGEST.get(name, 10**7):
                raise impossible(f"no model has {name} {count.value}", _SIZE_HINT)
        if self.n_layers > _LARGEST["count"]:
            raise impossible(f"no model has {self.n_layers} layers", _SIZE_HINT)
        return self

    @property
    def n_layers(self) -> int:
        """Layers in all groups."""
        return sum(group.count.value for group in self.layers)

    @property
    def is_hybrid(self) -> bool:
        """True if some layers are recurrent."""
        return any(isinstance(group.mixer, RecurrentShape) for group in self.layers)


def _sources(model: FileModel) -> list[str]:
    """Source keys of every number below `model`."""
    found = [model.source] if isinstance(model, Count | Flag | StatedTotal) else []
    for name in type(model).model_fields:
        value = getattr(model, name)
        for item in value if isinstance(value, tuple) else (value,):
            if isinstance(item, FileModel):
                found += _sources(item)
    return found
