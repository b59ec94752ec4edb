#!/usr/bin/env python3
"""Train the demo pair from scratch on one GPU: two resumable stages of at most 8 minutes each.

    python scripts/demo_pair/corpus.py --output .train
    python scripts/train_demo_pair.py target  --data .train --out .train/run
    python scripts/train_demo_pair.py drafter --data .train --out .train/run
    python scripts/train_demo_pair.py export  --data .train --out .train/run --to recipes/demo-cpu
    python scripts/measure_demo_pair.py
    python scripts/train_demo_pair.py cards   --to recipes/demo-cpu

A stage that runs out of its minutes saves and exits; the same command continues it. `export` writes
the model folders and training reports, `cards` the model cards.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]


def parse_settings(kind: type[Any], pairs: Sequence[str]) -> Any:
    """A settings dataclass with `NAME=VALUE` overrides. Raises `SystemExit` naming a bad one."""
    types = {f.name: type(f.default) for f in dataclasses.fields(kind)}
    chosen = {}
    for pair in pairs:
        name, _, value = pair.partition("=")
        if name not in types:
            raise SystemExit(f"no setting `{name}`; there are: {', '.join(types)}")
        try:
            chosen[name] = types[name](value)
        except ValueError as error:
            raise SystemExit(f"{pair}: {error}") from error
    return kind(**chosen)


def main() -> None:
    """Run one stage."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("stage", choices=["target", "drafter", "export", "cards"])
    parser.add_argument("--data", type=Path, default=Path(".train"), help="what corpus.py wrote")
    parser.add_argument("--out", type=Path, default=Path(".train/run"), help="checkpoints, reports")
    parser.add_argument(
        "--to", type=Path, default=Path("recipes/demo-cpu"), help="for export, cards"
    )
    parser.add_argument("--minutes", type=float, default=8.0, help="limit of this call")
    parser.add_argument(
        "--set", nargs="*", default=[], metavar="NAME=VALUE", help="override settings"
    )
    args = parser.parse_args()
    if args.stage == "export":
        from demo_pair.export import export

        export(args.data, args.out, args.to)
        return
    if args.stage == "cards":
        from demo_pair.card import QUALITY, cards

        for path, text in cards(args.to, ROOT / QUALITY).items():
            path.write_text(text, encoding="utf-8")
        return
    args.out.mkdir(parents=True, exist_ok=True)
    from demo_pair.loop import Clock

    clock = Clock(args.minutes)
    if args.stage == "target":
        from demo_pair import train_target

        settings = parse_settings(train_target.TargetSettings, args.set)
        train_target.train(args.data, args.out, settings, clock)
    else:
        from demo_pair import train_drafter

        settings = parse_settings(train_drafter.DrafterSettings, args.set)
        train_drafter.train(args.data, args.out, settings, clock)


if __name__ == "__main__":
    main()
