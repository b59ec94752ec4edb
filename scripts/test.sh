#!/usr/bin/env bash
# Everything CI checks, in a virtual environment made from nothing: ruff, mypy, import-linter, pytest.
#
#   scripts/test.sh                   the whole suite
#   scripts/test.sh tests/unit -x     checks, then pytest with these arguments
#
# $SPECPILOT_VENV names the environment (default .venv-test). A second run reuses it.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/venv.sh

venv="${SPECPILOT_VENV:-.venv-test}"
unset SPECPILOT_VENV
ensure_venv "$venv" torch,report,test
venv="$(cd "$venv" && pwd)"
export PATH="$venv/bin:$PATH" PIP_DISABLE_PIP_VERSION_CHECK=1

step() { echo "== $*" >&2; "$@"; }
step ruff check --quiet .
step mypy --no-error-summary
step lint-imports --no-logo
step python -m pytest -q --durations=15 "$@"
