"""Token ids as text for people; never the other way round."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class TextDecoder(Protocol):
    """Turns token ids into text for people; `TokenizerFile` is one."""

    def decode(self, ids: Sequence[int]) -> str:
        """Readable text of some token ids."""
        ...
