"""Where a low-precision pass agrees with the exact one: one JSON line per request."""

from __future__ import annotations

from typing import Annotated

from pydantic import StringConstraints

from specpilot_cli.schema.base import FileModel, Label


class QAgreement(FileModel):
    """agrees: one `1` or `0` per output token of the request, in order.

    `1` where the low-precision pass, given the exact outputs before, has the output token as its
    argmax.
    """

    request_id: Label
    agrees: Annotated[str, StringConstraints(pattern=r"^[01]+$")]
