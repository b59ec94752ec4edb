"""What the SGLang plugin is asked to do, and what it says of itself.

A server finds its plugin configuration through one environment variable, since SGLang's worker
processes inherit nothing else. `GET /server_info` gives `PluginState` back, under
`internal_states[0]["specpilot"]`: SGLang logs a plugin's errors and serves without it, so whoever
starts a server compares the two.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from pydantic import Field, StringConstraints, model_validator

from specpilot_cli.schema.base import FileModel
from specpilot_cli.schema.step_profile import Sha256

PLUGIN_ENV: Final = "SPECPILOT_PLUGIN"
"""Environment variable with the path of the configuration; unset or empty: the plugin is inert."""

PLUGIN_STATE_KEY: Final = "specpilot"
"""Key of `PluginState` in an internal state."""

QUANTIZATION: Final = "w12"
"""What `--quantization` is called, and `quant_method` of a converted folder."""

TREE_ALGORITHM: Final = "SPECPILOT_TREE"
"""What `--speculative-algorithm` is called for a tree."""

Mechanism = Literal["w12", "recorder", "tree"]

AbsolutePath = Annotated[str, StringConstraints(pattern=r"^/")]


class W12Plugin(FileModel):
    """W12 weights in the target's linear layers.

    The server needs `--quantization w12` besides, or a folder that `convert-w12` wrote.

    lm_head: encode the output head too, unless it is tied to the embedding table.
    tied_lm_head: give a tied head a W12 copy: faster logits for 3/4 of the table's memory.
    drafter: encode the draft model's layers too.
    verify: decode every encoded layer and compare it with the loaded weight, bit for bit, before
        that is dropped.
    chained: in steps of few tokens, compute norms and gated activations before W12 layers by
        kernels that let the product behind them start early.
    """

    lm_head: bool = True
    tied_lm_head: bool = False
    drafter: bool = False
    verify: bool = True
    chained: bool = True


class RecorderPlugin(FileModel):
    """Recording of drafter lattices, one folder per server.

    mode: `dense` has a lattice at every output position (the server commits one token a step),
        `anchored` those of the steps as they are. folder: absolute. max_steps: where it stops.
    """

    mode: Literal["dense", "anchored"]
    folder: AbsolutePath
    max_steps: Annotated[int, Field(ge=1)] = 1_000_000


class TreeCalibration(FileModel):
    """What `specpilot replay --calibrate --json` fits: `temperature` divides every score.

    recall_by_position_ratio: how often the true token is a candidate at all, by drafted position.
    """

    temperature: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    recall_by_position_ratio: Annotated[
        tuple[Annotated[float, Field(gt=0, le=1)], ...], Field(min_length=1)
    ]


class TreePlugin(FileModel):
    """Best-first draft trees instead of a chain (paper §4.2).

    The server needs `--speculative-algorithm SPECPILOT_TREE` besides.

    drafter: the stock algorithm that serves this drafter's chain. block: rows of that chain, the
    last committed token included, so a tree is at most `block - 1` deep; another than the trained
    one is allowed, as with stock. nodes: drafted tokens of a tree; a step verifies one row more.
    max_depth: a lower cap on the depth. scoring: by the pair of a token and its predecessor, or by
    each token alone. calibration: of conditional scores; they are used as they are without.
    """

    drafter: Literal["DFLASH", "DSPARK"] = "DFLASH"
    block: Annotated[int, Field(ge=2, le=64)]
    nodes: Annotated[int, Field(ge=1, le=128)]
    max_depth: Annotated[int, Field(ge=1)] | None = None
    scoring: Literal["conditional", "marginal"] = "conditional"
    calibration: TreeCalibration | None = None

    @model_validator(mode="after")
    def _calibration_fits(self) -> TreePlugin:
        if self.calibration is None:
            return self
        if self.scoring == "marginal":
            raise ValueError("a calibration is of conditional scores")
        positions = len(self.calibration.recall_by_position_ratio)
        if positions < self.block - 1:
            raise ValueError(
                f"the calibration has {positions} positions, the block drafts {self.block - 1}"
            )
        return self

    @property
    def rows(self) -> int:
        """Rows of a verify pass: the nodes and the last committed token."""
        return self.nodes + 1

    @property
    def depth(self) -> int:
        """The most nodes on one path."""
        return min(self.block - 1, self.nodes, self.max_depth or self.block)

    @property
    def record_states(self) -> int:
        """Recurrent states that a request's replay records get the memory of.

        A row's records take an 84th of a state in Qwen3.8-27B; a little more is allowed for.
        """
        return -(-self.rows // 64)

    @property
    def window(self) -> int:
        """KV slots that a step writes: the drafted block and the tree share them."""
        return max(self.rows, self.block)


class PluginConfig(FileModel):
    """The configuration file. None: that mechanism is not asked for."""

    schema_version: Literal[1] = 1
    w12: W12Plugin | None = None
    recorder: RecorderPlugin | None = None
    tree: TreePlugin | None = None

    @model_validator(mode="after")
    def _one_of_recorder_and_tree(self) -> PluginConfig:
        if self.recorder is not None and self.tree is not None:
            raise ValueError("`recorder` records the steps of a chain, which `tree` replaces")
        return self

    def asked(self) -> tuple[Mechanism, ...]:
        """The mechanisms asked for, in the order in which a handshake names them."""
        wanted: tuple[tuple[Mechanism, object], ...] = (
            ("w12", self.w12),
            ("recorder", self.recorder),
            ("tree", self.tree),
        )
        return tuple(name for name, part in wanted if part is not None)


class PluginState(FileModel):
    """What the plugin of a running server says of itself.

    config_sha256: of the configuration file's bytes; None if it could not be read.
    active: mechanism -> its facts, only for mechanisms that are at work. Those of `w12`, of one
        tensor-parallel rank: `layers`, `weights`, `bf16_bytes` and `encoded_bytes` (before and
        after), `fused` (weights that several layers share), `not_fused` (reasons why layers that
        could share one do not), `freed_bytes`, `verified`, `kept_bf16` (layers that stay BF16, as
        "name: reason"), `form` ("kernel", or "decoded reference" on a CPU), `checkpoint`
        ("bf16" or "w12"), `tp_size`, `seconds`. Those of `recorder`: `mode`, `algorithm`,
        `block`, `positions`, `candidates`; `folder` and `session` of this process; `steps` and
        `lattices` taken, `written_lattices` on disk, `dropped_steps`, `bytes`; `seconds` in hooks
        of the scheduler's thread, `step_seconds` of the steps around them, `writer_seconds` of
        CPU; `full` once `max_steps` is reached. Those of `tree`: `drafter`, `nodes`, `rows`,
        `block`, `depth`, `scoring`, `calibrated`; `kernels`, what computes each part; `graphs`, the
        passes that run in a captured graph; `steps` taken; `record_bytes` of one request, and the
        `snapshot_bytes` that stock would keep for its rows.
    problems: why something asked for is not active, or anything else that went wrong.
    """

    plugin_version: str
    sglang_version: str | None
    config_sha256: Sha256 | None
    active: dict[Mechanism, dict[str, Any]]
    problems: tuple[str, ...]
