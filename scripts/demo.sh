#!/usr/bin/env bash
# The whole job on the demo pair, from nothing: a virtual environment of its own, then
# `specpilot apply recipe demo-cpu`. Arguments go to that command; --help lists them.
#
# $SPECPILOT_VENV names the environment (default .venv-demo). A second run reuses it.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/venv.sh

venv="${SPECPILOT_VENV:-.venv-demo}"
unset SPECPILOT_VENV
ensure_venv "$venv" torch,report
# Whether a tree pays on this CPU is what the verdict says, and no gain is an answer too; a system
# that is not lossless still fails.
exec "$venv/bin/specpilot" apply recipe demo-cpu --exit-zero "$@"
