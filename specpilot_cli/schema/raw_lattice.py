"""What the recorder in an SGLang server leaves on disk: numbered shards and an index.

One folder per server process. A shard holds steps in the order in which the server took them, with
the server's own request ids; `specpilot record --url` joins them with the answers into a lattice
file (`schema/lattice.py`). Raw means: scores are as the drafter gave them, not normalised.

`S` lattices, `L` drafted positions, `K` candidates per position.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from specpilot_cli.schema.base import FileModel
from specpilot_cli.schema.step_profile import Sha256

INDEX_NAME = "index.json"
SHARD_KEY = "specpilot_raw_lattice"

Mode = Literal["dense", "anchored"]

#: Tensor name → dtype and axes. `request` indexes the shard's own list of request ids;
#: `prefix_len` counts the tokens before the anchor; `commit_len` the tokens the step committed.
RAW_TENSORS: dict[str, tuple[str, tuple[str, ...]]] = {
    "request": ("int32", ("S",)),
    "prefix_len": ("int32", ("S",)),
    "commit_len": ("int32", ("S",)),
    "anchor": ("int32", ("S",)),
    "stock_choice": ("int32", ("S", "L")),
    "candidate_ids": ("int32", ("S", "L", "K")),
    "scores": ("float32", ("S", "L", "K", "K")),
    "unary": ("float32", ("S", "L", "K")),
    "unary_logsumexp": ("float32", ("S", "L")),
}


class ShardInfo(FileModel):
    """Metadata of one shard.

    requests: the request ids that `request` counts. sha256: `io.lattice_digest.shard_digest`.
    """

    schema_version: Literal[1] = 1
    session: str = Field(min_length=1)
    shard: int = Field(ge=0)
    requests: list[str]
    sha256: Sha256


class RecorderIndex(FileModel):
    """What one server process has recorded so far; replaced whole after every shard.

    session: unlike that of any other process. algorithm: SGLang's name. block: the drafter's
    block B; positions: L, which is B - 1 (DFLASH) or B (DSPARK). shards: complete ones, numbered
    from 0. lattices: rows in them. problem: why recording stopped, or None.
    """

    schema_version: Literal[1] = 1
    session: str = Field(min_length=1)
    mode: Mode
    algorithm: Literal["DFLASH", "DSPARK"]
    engine: str = Field(min_length=1)
    block: int = Field(ge=1)
    positions: Annotated[int, Field(ge=1)]
    candidates: Annotated[int, Field(ge=1)]
    shards: int = Field(default=0, ge=0)
    lattices: int = Field(default=0, ge=0)
    problem: str | None = None


def shard_name(number: int) -> str:
    """File name of shard `number`."""
    return f"shard-{number:06d}.safetensors"
