"""The numbers of a `config.json` that decide how much memory a server needs.

Weights, KV cache and recurrent states follow from a handful of keys. A configuration whose memory
this module would get wrong (latent attention, experts, another family) is an error, never a guess.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from specpilot_cli.errors import InputError

BF16_BYTES = 2
_DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
# Families whose layers are the ones counted here.
_KNOWN = frozenset({"llama", "mistral", "qwen2", "qwen3", "qwen3_5", "qwen3_5_text"})
# Keys that mean another cache or other weights than those counted here.
_FOREIGN = ("kv_lora_rank", "num_local_experts", "n_routed_experts", "num_hash_heads")
_HINT = "the memory of this model cannot be worked out; apply the recipe of a known model"


@dataclass(frozen=True, slots=True)
class Matrix:
    """One linear layer's weight, BF16 [rows, columns]: outputs by inputs."""

    name: str
    rows: int
    columns: int
    count: int

    @property
    def bf16_bytes(self) -> int:
        """Bytes of all `count` of them."""
        return self.rows * self.columns * self.count * BF16_BYTES


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A decoder's layers: `attention_layers` with a KV cache, `gdn_layers` with a state.

    gdn_state_bytes: one recurrent state over all layers, one request; gdn_conv_bytes: its inputs
    of the short convolution. matrices: linear layers, head included; other_bytes: embedding,
    norms and all else that stays BF16. draft_tokens: block of a drafter, None for a target.
    """

    family: str
    hidden: int
    intermediate: int
    vocabulary: int
    attention_layers: int
    gdn_layers: int
    kv_bytes_per_token: int
    gdn_state_bytes: int
    gdn_conv_bytes: int
    context: int
    matrices: tuple[Matrix, ...]
    other_bytes: int
    draft_tokens: int | None

    @property
    def linear_bytes(self) -> int:
        """BF16 bytes of every linear layer, the output head included."""
        return sum(matrix.bf16_bytes for matrix in self.matrices)

    @property
    def weight_bytes(self) -> int:
        """BF16 bytes of the whole model."""
        return self.linear_bytes + self.other_bytes

    def first_difference(self, other: ModelShape) -> str | None:
        """The first field that differs, as `name: ours, theirs`; None if the shapes agree."""
        for field in fields(self):
            mine, theirs = getattr(self, field.name), getattr(other, field.name)
            if mine != theirs:
                return f"{field.name}: {mine}, {theirs}"
        return None


def read_shape(config: Mapping[str, Any], where: str) -> ModelShape:
    """The shape of the model with this `config.json`; `where` names it in errors.

    Raises `InputError` for a family whose memory is not known, and for a missing number.
    """
    text = config.get("text_config")
    reader = _Reader(dict(text) if isinstance(text, Mapping) else dict(config), config, where)
    reader.check_known()
    return reader.shape()


class _Reader:
    """One configuration; every number is asked for by its key, and missed by name."""

    def __init__(self, text: dict[str, Any], outer: Mapping[str, Any], where: str) -> None:
        self._text, self._outer, self._where = text, outer, where

    def check_known(self) -> None:
        family = self._text.get("model_type")
        foreign = [key for key in _FOREIGN if self._text.get(key)]
        if (self._text.get("num_experts") or 0) > 0:
            foreign.append("num_experts")
        if family not in _KNOWN or foreign:
            what = f"`{foreign[0]}`" if foreign else f"model_type `{family}`"
            raise InputError(f"unknown kind of model: {what}", where=self._where, hint=_HINT)

    def shape(self) -> ModelShape:
        attention, gdn = self._layers()
        hidden, vocabulary = self._number("hidden_size"), self._number("vocab_size")
        state, conv = self._gdn_bytes() if gdn else (0, 0)
        head = self._head()
        drafts = self._is_drafter()
        tied = bool(self._outer.get("tie_word_embeddings", self._text.get("tie_word_embeddings")))
        matrices = [*self._attention(attention), *(self._gdn(gdn) if gdn else ()), *self._mlp()]
        if not tied and not drafts:
            matrices.append(Matrix("lm_head", vocabulary, hidden, 1))
        if drafts:
            matrices.append(self._projection(hidden))
        return ModelShape(
            family=str(self._text["model_type"]),
            hidden=hidden,
            intermediate=self._number("intermediate_size"),
            vocabulary=vocabulary,
            attention_layers=attention,
            gdn_layers=gdn,
            kv_bytes_per_token=2 * attention * self._number("num_key_value_heads") * head
            * BF16_BYTES,
            gdn_state_bytes=state * gdn,
            gdn_conv_bytes=conv * gdn,
            context=self._number("max_position_embeddings"),
            matrices=tuple(matrices),
            other_bytes=self._other(vocabulary, hidden, drafts=drafts),
            draft_tokens=self._block() if drafts else None,
        )  # fmt: skip

    def _number(self, key: str, default: int | None = None) -> int:
        value = self._text.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise InputError(
                f"`{key}` should be a positive whole number, not {value!r}", where=self._where,
                hint=_HINT,
            )  # fmt: skip
        return value

    def _layers(self) -> tuple[int, int]:
        total, kinds = self._number("num_hidden_layers"), self._text.get("layer_types")
        if kinds is None:
            return total, 0
        if not isinstance(kinds, list) or len(kinds) != total:
            raise InputError("`layer_types` does not name every layer", where=self._where)
        gdn = kinds.count("linear_attention")
        odd = sorted(set(kinds) - {"full_attention", "linear_attention", "sliding_attention"})
        if odd:
            raise InputError(f"unknown kind of layer: `{odd[0]}`", where=self._where, hint=_HINT)
        return total - gdn, gdn

    def _head(self) -> int:
        default = self._number("hidden_size") // self._number("num_attention_heads")
        return self._number("head_dim", default)

    def _attention(self, layers: int) -> list[Matrix]:
        hidden, head = self._number("hidden_size"), self._head()
        queries = self._number("num_attention_heads") * head
        values = self._number("num_key_value_heads") * head
        gate = 2 if self._text.get("attn_output_gate") else 1
        return [
            Matrix("qkv_proj", gate * queries + 2 * values, hidden, layers),
            Matrix("o_proj", hidden, queries, layers),
        ]

    def _gdn_widths(self) -> tuple[int, int]:
        keys = self._number("linear_num_key_heads") * self._number("linear_key_head_dim")
        values = self._number("linear_num_value_heads") * self._number("linear_value_head_dim")
        return keys, values

    def _gdn(self, layers: int) -> list[Matrix]:
        hidden = self._number("hidden_size")
        keys, values = self._gdn_widths()
        return [
            Matrix("in_proj_qkvz", 2 * keys + 2 * values, hidden, layers),
            Matrix("out_proj", hidden, values, layers),
        ]

    def _gdn_bytes(self) -> tuple[int, int]:
        """Bytes of one layer's recurrent state, and of its last convolution inputs."""
        keys, values = self._gdn_widths()
        dtype = str(self._text.get("mamba_ssm_dtype", "float32"))
        if dtype not in _DTYPE_BYTES:
            raise InputError(f"unknown mamba_ssm_dtype `{dtype}`", where=self._where)
        state = values * self._number("linear_key_head_dim") * _DTYPE_BYTES[dtype]
        kept = self._number("linear_conv_kernel_dim") - 1
        return state, (2 * keys + values) * kept * BF16_BYTES

    def _mlp(self) -> list[Matrix]:
        hidden, inner = self._number("hidden_size"), self._number("intermediate_size")
        layers = self._number("num_hidden_layers")
        return [
            Matrix("gate_up_proj", 2 * inner, hidden, layers),
            Matrix("down_proj", hidden, inner, layers),
        ]

    def _other(self, vocabulary: int, hidden: int, *, drafts: bool) -> int:
        """Embedding and norms; a drafter shares the target's embedding and head."""
        layers = self._number("num_hidden_layers")
        norms = (2 * layers + 1) * hidden * BF16_BYTES
        _, gdn = self._layers()
        if gdn:
            # the two gates of a GDN layer stay BF16: one row per value head each
            norms += gdn * 2 * self._number("linear_num_value_heads") * hidden * BF16_BYTES
        if drafts:
            rank = self._draft("selector_rank", 0)
            return norms + 2 * vocabulary * rank * BF16_BYTES
        return norms + vocabulary * hidden * BF16_BYTES

    def _is_drafter(self) -> bool:
        return isinstance(self._text.get("dflash_config"), Mapping)

    def _draft(self, key: str, default: int) -> int:
        value = dict(self._text["dflash_config"]).get(key, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise InputError(f"`dflash_config.{key}` is {value!r}", where=self._where)
        return value

    def _block(self) -> int:
        return self._number("block_size", self._draft("block_size", 16))

    def _projection(self, hidden: int) -> Matrix:
        read = dict(self._text["dflash_config"]).get("target_layer_ids") or [0]
        return Matrix("fc", hidden, hidden * len(read), 1)
