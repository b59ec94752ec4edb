"""The base of every file model."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class FileModel(BaseModel):
    """Frozen, and an unknown key is an error: a silently ignored typo is a wrong measurement.

    Pydantic lives at this boundary only; inside, code uses frozen dataclasses.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="constants")
