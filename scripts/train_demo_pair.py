#!/usr/bin/env python3
"""Train the demo pair from scratch on one GPU: two resumable stages of at most 8 minutes each.

    python scripts/demo_pair/corpus.py .train             # texts by package name, tokenizer, arrays
    python scripts/train_demo_pair.py target  --data .train --out .train/run
    python scripts/train_demo_pair.py drafter --data .train --out .train/run
    python scripts/train_demo_pair.py export  --data .train --out .train/run --to recipes/demo-cpu

A stage that runs out of its minutes saves and exits; the same command continues it.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stage", choices=["target", "drafter", "export"])
    parser.add_argument("--data", type=Path, default=Path(".train"))
    parser.add_argument("--out", type=Path, default=Path(".train/run"))
    parser.add_argument("--to", type=Path, default=Path("recipes/demo-cpu"))
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--set", nargs="*", default=[], metavar="NAME=VALUE", help="override a setting")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    if args.stage == "export":
        from demo_pair.export import export

        export(args.data, args.out, args.to)
        return
    if args.stage == "target":
        from demo_pair.train_target import TargetSettings as Settings
        from demo_pair.train_target import train
    else:
        from demo_pair.train_drafter import DrafterSettings as Settings
        from demo_pair.train_drafter import train
    kinds = {f.name: type(f.default) for f in dataclasses.fields(Settings)}
    chosen = {k: kinds[k](v) for k, v in (pair.split("=", 1) for pair in args.set)}
    train(args.data, args.out, Settings(**chosen), minutes=args.minutes)


if __name__ == "__main__":
    main()
