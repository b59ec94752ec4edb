"""A model folder's own `tokenizer.json`: prompts to token ids, and token ids to readable text.

Outputs are only ever decoded for people to read; they are never encoded again.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from specpilot_cli.errors import InputError, MachineError


class TokenizerFile:
    """A tokenizer read from a folder with `tokenizer.json` (or from that file).

    Raises InputError for a missing or damaged file, MachineError without the `tokenizers` library.
    """

    def __init__(self, path: Path) -> None:
        file = path / "tokenizer.json" if path.is_dir() else path
        if not file.is_file():
            raise InputError(
                f"no tokenizer at `{file}`",
                where=str(file),
                hint="give the model's folder, the one that holds tokenizer.json",
            )
        self._tokenizer = _load(file)

    def encode(self, text: str) -> tuple[int, ...]:
        """Token ids of a prompt, with the special tokens that the tokenizer adds by itself."""
        return tuple(self._tokenizer.encode(text).ids)

    def encode_plain(self, text: str) -> tuple[int, ...]:
        """Token ids of a text that already holds its special tokens, as chat templates write."""
        return tuple(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def decode(self, ids: Sequence[int]) -> str:
        """Readable text of some token ids; bytes that end mid-character show as U+FFFD."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False))


def _load(file: Path) -> Any:
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise MachineError(
            "the package `tokenizers` is not installed",
            hint="pip install '.[torch]' in the clone, or leave out --tokenizer",
        ) from error
    try:
        return Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises bare Exception for a bad file
        raise InputError(
            f"`{file}` is no tokenizer: {error}",
            where=str(file),
            hint="copy tokenizer.json from the checkpoint again",
        ) from error
