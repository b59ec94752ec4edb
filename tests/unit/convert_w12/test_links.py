"""Links in a checkpoint folder: to where its weights lie, and to somewhere else."""

from __future__ import annotations

from pathlib import Path

import pytest

from specpilot_cli.errors import InputError
from specpilot_cli.io.hf_folder import open_hf_folder
from tests.unit.convert_w12.conftest import MakeCheckpoint


@pytest.mark.parametrize("name", ["note.txt", "templates/note.txt", "config.json"])
def test_a_file_that_is_a_link_to_somewhere_else_is_refused(
    name: str, make_checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    source, secret = make_checkpoint(), tmp_path / "secret"
    secret.write_text("{}", encoding="utf-8")
    (source / name).unlink(missing_ok=True)
    (source / name).symlink_to(secret)
    with pytest.raises(InputError, match=f"`{name}` is a link to `{secret}`"):
        open_hf_folder(source)


def test_links_inside_the_folder_and_to_where_the_weights_lie_are_followed(
    make_checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    source, view = make_checkpoint(), tmp_path / "view"
    view.mkdir()
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (view / name).symlink_to(source / name)
    (view / "again.json").symlink_to("tokenizer.json")
    (view / "own.txt").write_text("x", encoding="utf-8")
    (view / "other.txt").symlink_to("own.txt")
    found = open_hf_folder(view)
    assert found.carried == ("again.json", "other.txt", "own.txt", "tokenizer.json")
