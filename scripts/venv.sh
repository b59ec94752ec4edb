# Sourced by test.sh and demo.sh: make a virtual environment from nothing, or reuse a current one.
#
#   ensure_venv FOLDER EXTRAS     for example: ensure_venv .venv-test torch,report,test
#
# $PYTHON picks the interpreter (default python3; 3.11 or later). A stamp of pyproject.toml, the
# interpreter, the extras and this checkout's path makes a second call immediate.

# One tested version; without a GPU its CPU build is enough, and asking for exactly this version
# keeps pip from choosing a newer one that brings gigabytes of CUDA libraries.
SPECPILOT_CPU_TORCH="torch==2.13.0"

ensure_venv() {
  local folder="$1" extras="$2" python="${PYTHON:-python3}" stamp
  if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
    echo "error: $python is older than Python 3.11; set PYTHON to a newer one" >&2
    return 3
  fi
  stamp="$( { cat pyproject.toml; "$python" -VV; echo "$extras $SPECPILOT_CPU_TORCH $PWD"; } \
    | sha256sum | cut -d' ' -f1)"
  if [ -x "$folder/bin/specpilot" ] && [ "$(cat "$folder/.stamp" 2>/dev/null)" = "$stamp" ]; then
    return 0
  fi
  echo "setting up $folder (once)" >&2
  rm -f "$folder/.stamp"
  "$python" -m venv "$folder" || return 3
  case ",$extras," in
    *,torch,*)
      if ! command -v nvidia-smi >/dev/null; then
        "$folder/bin/python" -m pip install -qq "$SPECPILOT_CPU_TORCH" >&2 || return 3
      fi ;;
  esac
  "$folder/bin/python" -m pip install -qq -e ".[$extras]" >&2 || return 3
  echo "$stamp" > "$folder/.stamp"
}

# SGLang on a CPU, for tests/sglang: an environment of its own, since SGLang pins most of what the
# test suite leaves open. Every package has its version, so that nothing but torch is resolved,
# whose CUDA builds need more packages than its CPU builds.
#
#   ensure_sglang_venv FOLDER
ensure_sglang_venv() {
  local folder="$1" python="${PYTHON:-python3}" engine=tests/sglang/cpu_engine stamp
  stamp="$( { cat pyproject.toml "$engine/requirements.txt"; "$python" -VV
    echo "$SPECPILOT_CPU_TORCH $PWD"; } | sha256sum | cut -d' ' -f1)"
  if [ -x "$folder/bin/specpilot" ] && [ "$(cat "$folder/.stamp" 2>/dev/null)" = "$stamp" ]; then
    return 0
  fi
  echo "setting up $folder (once)" >&2
  rm -f "$folder/.stamp"
  "$python" -m venv "$folder" || return 3
  local install=("$folder/bin/python" -m pip install -qq --no-compile --no-warn-conflicts)
  "${install[@]}" "$SPECPILOT_CPU_TORCH" >&2 || return 3
  "${install[@]}" --no-deps -r "$engine/requirements.txt" >&2 || return 3
  "${install[@]}" --no-deps -e . >&2 || return 3
  # compiles what servers import, a third of all modules, whatever the shell says about that
  PYTHONDONTWRITEBYTECODE="" PYTHONPATH="$engine/site" SGLANG_USE_CPU_ENGINE=1 \
    "$folder/bin/python" -W ignore "$engine/imports.py" >&2 || return 3
  echo "$stamp" > "$folder/.stamp"
}
