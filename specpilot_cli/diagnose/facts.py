"""What model folders say about themselves, as far as the checks ask."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specpilot_cli.errors import InputError
from specpilot_cli.io.json_file import read_json, read_text

_MOST = 2**31  # token ids, sizes and layers lie below it


@dataclass(frozen=True, slots=True)
class TokenizerFacts:
    """added: id of each added token by its text. template: the chat template's text, or None."""

    added: Mapping[str, int]
    template: str | None
    bos: str | None

    @property
    def template_ids(self) -> frozenset[int]:
        """Ids of added tokens that the chat template writes."""
        if self.template is None:
            return frozenset()
        return frozenset(i for text, i in self.added.items() if text.strip() in self.template)


@dataclass(frozen=True, slots=True)
class TargetFacts:
    """A target's configuration. quantisation: the method's name, or None."""

    path: Path
    layers: int | None
    hidden_size: int | None
    vocab_size: int | None
    quantisation: str | None
    tokenizer: TokenizerFacts | None


@dataclass(frozen=True, slots=True)
class DrafterFacts:
    """A drafter's configuration; None where it says nothing."""

    path: Path
    block: int | None
    mask_token_id: int | None
    target_layer_ids: tuple[int, ...]
    target_layers: int | None
    hidden_size: int | None
    vocab_size: int | None
    sliding_window: int | None


def read_target(path: Path) -> TargetFacts:
    """Facts of the model folder at `path`. Raises InputError for a missing or broken config."""
    config = _object(path / "config.json")
    text = config.get("text_config", config)
    if not isinstance(text, Mapping):
        raise _broken("text_config", "no object", path)
    quantised = config.get("quantization_config") or text.get("quantization_config")
    method = None
    if isinstance(quantised, Mapping):
        method = str(quantised.get("quant_method") or quantised.get("quant_algo") or "unnamed")
    return TargetFacts(
        path=path,
        layers=_whole(text, "num_hidden_layers"),
        hidden_size=_whole(text, "hidden_size"),
        vocab_size=_whole(text, "vocab_size"),
        # W12 holds the BF16 weights bit for bit: what the drafter sees does not change.
        quantisation=None if method == "w12" else method,
        tokenizer=_tokenizer(path),
    )


def read_drafter(path: Path) -> DrafterFacts:
    """Facts of the drafter folder at `path`. Raises InputError for a missing or broken config."""
    config = _object(path / "config.json")
    own = config.get("dflash_config")
    inner = own if isinstance(own, Mapping) else config
    layers = inner.get("target_layer_ids", config.get("target_layer_ids"))
    ids = layers if isinstance(layers, list) else []
    if not all(type(item) is int and abs(item) < _MOST for item in ids):
        raise _broken("target_layer_ids", "no list of layers", path)
    return DrafterFacts(
        path=path,
        block=_whole(inner, "block_size") or _whole(config, "block_size"),
        mask_token_id=_whole(inner, "mask_token_id"),
        target_layer_ids=tuple(ids),
        target_layers=_whole(inner, "num_target_layers") or _whole(config, "num_target_layers"),
        hidden_size=_whole(config, "hidden_size"),
        vocab_size=_whole(config, "vocab_size"),
        sliding_window=_whole(config, "sliding_window"),
    )


def _broken(key: str, problem: str, folder: Path) -> InputError:
    return InputError(
        f"`{key}` is {problem}", where=str(folder / "config.json"),
        hint="compare config.json with the one on the model's card",
    )  # fmt: skip


def _object(path: Path) -> dict[str, Any]:
    content = read_json(path)
    if not isinstance(content, dict):
        raise InputError("not a JSON object", where=str(path), hint="copy the file again")
    return content


def _whole(config: Mapping[str, Any], key: str) -> int | None:
    value = config.get(key)
    return value if type(value) is int and abs(value) < _MOST else None


def _tokenizer(path: Path) -> TokenizerFacts | None:
    file = path / "tokenizer.json"
    if not file.is_file():
        return None
    tokens = _object(file).get("added_tokens")
    added = {
        item["content"]: item["id"]
        for item in (tokens if isinstance(tokens, list) else ())
        if isinstance(item, Mapping)
        and isinstance(item.get("content"), str)
        and _whole(item, "id") is not None
    }
    settings = path / "tokenizer_config.json"
    config = _object(settings) if settings.is_file() else {}
    bos = config.get("bos_token")
    if isinstance(bos, Mapping):
        bos = bos.get("content")
    return TokenizerFacts(added, _template(path, config), bos if isinstance(bos, str) else None)


def _template(path: Path, config: Mapping[str, Any]) -> str | None:
    file = path / "chat_template.jinja"
    if file.is_file():
        return read_text(file)
    stored = config.get("chat_template")
    if isinstance(stored, list):  # several named templates
        return "\n".join(str(item.get("template")) for item in stored if isinstance(item, Mapping))
    return stored if isinstance(stored, str) else None
