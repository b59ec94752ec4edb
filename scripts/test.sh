#!/usr/bin/env bash
# Everything CI checks, in virtual environments made from nothing: ruff, mypy, linter, pytest.
#
#   scripts/test.sh                   the whole suite
#   scripts/test.sh tests/unit -x     checks, then pytest with these arguments
#   scripts/test.sh -n 0              in one process
#
# $SPECPILOT_VENV names the environment (default .venv-test); .venv-sglang is where SGLang runs. A
# second run reuses both. $NO_SGLANG=1 does without the latter, and its tests are skipped.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/venv.sh

venv="${SPECPILOT_VENV:-.venv-test}"
unset SPECPILOT_VENV
ensure_venv "$venv" torch,report,test
venv="$(cd "$venv" && pwd)"
if [ -z "${NO_SGLANG:-}" ]; then
  ensure_sglang_venv .venv-sglang
fi
export PATH="$venv/bin:$PATH" PIP_DISABLE_PIP_VERSION_CHECK=1

step() { echo "== $*" >&2; "$@"; }
step ruff check --quiet .
step mypy --no-error-summary
step lint-imports --no-logo
# Their tests would do the same once more.
lint=tests/packaging/test_lint.py
step python -m pytest -q -n 2 --durations=15 --deselect "$lint::test_ruff_passes" \
  --deselect "$lint::test_mypy_passes" --deselect "$lint::test_import_rules_hold" "$@"
