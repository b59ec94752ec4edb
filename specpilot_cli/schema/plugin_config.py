"""What the SGLang plugin is asked to do, and what it says of itself.

A server finds its plugin configuration through one environment variable, since SGLang's worker
processes inherit nothing else. `GET /server_info` gives `PluginState` back, under
`internal_states[0]["specpilot"]`: SGLang logs a plugin's errors and serves without it, so whoever
starts a server compares the two.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from pydantic import Field, StringConstraints

from specpilot_cli.schema.base import FileModel
from specpilot_cli.schema.step_profile import Sha256

PLUGIN_ENV: Final = "SPECPILOT_PLUGIN"
"""Environment variable with the path of the configuration; unset or empty: the plugin is inert."""

PLUGIN_STATE_KEY: Final = "specpilot"
"""Key of `PluginState` in an internal state."""

QUANTIZATION: Final = "w12"
"""What `--quantization` is called, and `quant_method` of a converted folder."""

Mechanism = Literal["w12", "recorder"]

AbsolutePath = Annotated[str, StringConstraints(pattern=r"^/")]


class W12Plugin(FileModel):
    """W12 weights in the target's linear layers.

    The server needs `--quantization w12` besides, or a folder that `convert-w12` wrote.

    lm_head: encode the output head too, unless it is tied to the embedding table.
    tied_lm_head: give a tied head a W12 copy: faster logits for 3/4 of the table's memory.
    drafter: encode the draft model's layers too.
    verify: decode every encoded layer and compare it with the loaded weight, bit for bit, before
        that is dropped.
    chained: compute norms and gated activations before W12 layers by kernels that let the product
        behind them start early. Off until measured in a server.
    """

    lm_head: bool = True
    tied_lm_head: bool = False
    drafter: bool = False
    verify: bool = True
    chained: bool = False


class RecorderPlugin(FileModel):
    """Recording of drafter lattices, one folder per server.

    mode: `dense` has a lattice at every output position (the server commits one token a step),
        `anchored` those of the steps as they are. folder: absolute. max_steps: where it stops.
    """

    mode: Literal["dense", "anchored"]
    folder: AbsolutePath
    max_steps: Annotated[int, Field(ge=1)] = 1_000_000


class PluginConfig(FileModel):
    """The configuration file. None: that mechanism is not asked for."""

    schema_version: Literal[1] = 1
    w12: W12Plugin | None = None
    recorder: RecorderPlugin | None = None

    def asked(self) -> tuple[Mechanism, ...]:
        """The mechanisms asked for, in the order in which a handshake names them."""
        wanted: tuple[tuple[Mechanism, object], ...] = (
            ("w12", self.w12),
            ("recorder", self.recorder),
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
        CPU; `full` once `max_steps` is reached.
    problems: why something asked for is not active, or anything else that went wrong.
    """

    plugin_version: str
    sglang_version: str | None
    config_sha256: Sha256 | None
    active: dict[Mechanism, dict[str, Any]]
    problems: tuple[str, ...]
