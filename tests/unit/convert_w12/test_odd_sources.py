"""Sources that are unusual but right, and sources that change while or after they are read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from specpilot_cli.convert_w12.convert import convert_folder
from specpilot_cli.convert_w12.plan import Selection
from specpilot_cli.convert_w12.restore import restore_folder
from specpilot_cli.convert_w12.verify import verify_folder
from specpilot_cli.errors import InputError
from specpilot_cli.io.hf_folder import open_hf_folder
from specpilot_cli.io.safetensors_stream import write_safetensors
from tests.unit.convert_w12.conftest import MakeCheckpoint, convert, digests, weights

NOT_FINITE = '{"model_type": "m", "limit": [0.0, Infinity], "low": -Infinity, "x": NaN, "y": 1e999}'


def test_config_with_infinity_converts_and_comes_back(
    make_checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    """Mamba configurations hold `time_step_limit: [0.0, Infinity]`."""
    source = make_checkpoint({"a.weight": weights(0, 256, 256)}, config=NOT_FINITE, shards=1)
    convert(source, tmp_path / "w12")
    text = (tmp_path / "w12" / "config.json").read_text(encoding="utf-8")
    assert "Infinity" in text
    written = json.loads(text)
    assert written["limit"] == [0.0, float("inf")]
    assert written["x"] != written["x"]
    assert verify_folder(tmp_path / "w12", source).verdict == "identical"
    restore_folder(tmp_path / "w12", tmp_path / "back")
    assert digests(tmp_path / "back") == digests(source)


CHANGES = {
    "config.json": lambda s: (s / "config.json").write_text('{"model_type": "y"}', "utf-8"),
    "tokenizer.json": lambda s: (s / "tokenizer.json").write_text("{}", "utf-8"),
    "new.txt": lambda s: (s / "new.txt").write_text("x", "utf-8"),
    "templates/chat.jinja": lambda s: (s / "templates" / "chat.jinja").unlink(),
    "model.safetensors": lambda s: write_safetensors(
        s / "model.safetensors", {"a.weight": weights(0, 256, 256)}, {"format": "np"}, force=True
    ),
}


@pytest.mark.parametrize("changed", CHANGES)
def test_every_change_of_the_source_is_named(
    changed: str, make_checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    source, target = make_checkpoint({"a.weight": weights(0, 256, 256)}), tmp_path / "w12"
    convert(source, target)
    CHANGES[changed](source)
    found = verify_folder(target, source)
    assert [problem.name for problem in found.problems] == [changed]
    with pytest.raises(InputError, match=f"not a conversion of this source: .*`{changed}`"):
        convert_folder(open_hf_folder(source), target, Selection(), resume=True)
