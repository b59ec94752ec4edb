"""The base of every file model."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class FileModel(BaseModel):
    """Frozen, and an unknown key is an error: a silently ignored typo is a wrong measurement.

    So is a number that is not finite: YAML can spell one, and every later sum would be lost.
    Pydantic lives at this boundary only; inside, code uses frozen dataclasses.
    """

    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, ser_json_inf_nan="constants"
    )
