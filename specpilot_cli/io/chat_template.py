"""A model folder's own chat template: one user message to the text that the model is sent."""

from __future__ import annotations

import hashlib
import json
from datetime import datetime
from pathlib import Path
from typing import Any

from specpilot_cli.errors import InputError


class ChatTemplate:
    """The template in `chat_template.jinja` or `tokenizer_config.json` of a folder.

    Rendered in jinja's sandbox with what templates expect of `transformers`. `sha256` is that of
    the template's text. Raises InputError for a folder without a template, or one that does not
    compile.
    """

    def __init__(self, folder: Path) -> None:
        from jinja2 import TemplateError

        self._where = str(folder)
        config = _read_config(folder)
        text = _template_text(folder, config)
        self.sha256 = hashlib.sha256(text.encode()).hexdigest()
        self._special = {key: _token_text(config.get(key)) for key in ("bos_token", "eos_token")}
        try:
            self._template = _environment().from_string(text)
        except TemplateError as error:
            raise InputError(
                f"the chat template does not compile: {error}", where=self._where
            ) from error

    def render(self, text: str, *, thinking: bool | None) -> str:
        """One user message, ready for the model's answer. thinking: None leaves its default."""
        from jinja2 import TemplateError

        switch = {} if thinking is None else {"enable_thinking": thinking}
        try:
            return str(
                self._template.render(
                    messages=[{"role": "user", "content": text}],
                    add_generation_prompt=True,
                    **self._special,
                    **switch,
                )
            )
        except (TemplateError, TypeError, ValueError) as error:
            raise InputError(f"the chat template fails: {error}", where=self._where) from error


def _environment() -> Any:
    from jinja2.exceptions import TemplateError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def fail(message: str) -> None:
        raise TemplateError(message)

    def to_json(value: Any, indent: int | None = None) -> str:
        return json.dumps(value, ensure_ascii=False, indent=indent)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = fail
    environment.globals["strftime_now"] = lambda form: datetime.now().astimezone().strftime(form)
    return environment


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / "tokenizer_config.json"
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"cannot read `{path}`: {error}", where=str(path)) from error
    return found if isinstance(found, dict) else {}


def _template_text(folder: Path, config: dict[str, Any]) -> str:
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    found = config.get("chat_template")
    if isinstance(found, list):  # several by name; the plain one is called default
        found = next((one.get("template") for one in found if one.get("name") == "default"), None)
    if not isinstance(found, str):
        raise InputError(
            f"no chat template in `{folder}`",
            where=str(folder),
            hint="give the folder of an instruction-tuned model, or leave out --chat",
        )
    return found


def _token_text(value: Any) -> str:
    return str(value.get("content", "")) if isinstance(value, dict) else str(value or "")
