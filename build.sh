#!/usr/bin/env bash
# The project's one script. It needs Linux, Python >= 3.11, Go >= 1.26 and git, and sets up everything else itself:
# Python packages, pinned with hashes, in a virtual environment under ~/.cache, and the test cluster's programs beside it.
set -euo pipefail

usage() {
  cat <<'EOF'
Usage: ./build.sh COMMAND

  demo [--keep] [--without-gate]  the hazard, and the gate that closes it, on a real control plane on this machine
                                  --keep leaves the cluster up and prints how to use it
                                  --without-gate shows what happens when nothing stands between the attempts
  test [--long] [ARGUMENT ...]    lint, types and all tests; arguments go to pytest
                                  --long runs the full counts and sizes
EOF
}

# Sets $python to the interpreter of an environment that has requirements/test.txt.
environment() {
  local base=${PYTHON:-python3} version key
  version=$("$base" -c 'import sys; print("%d.%d.%d" % sys.version_info[:3]); sys.exit(sys.version_info < (3, 11))') || {
    echo "build.sh: Python 3.11 or newer is needed; ${base} is ${version:-not there}. Install one, and name it with PYTHON=..." >&2
    exit 1
  }
  key=$( (echo "$version $base"; cat requirements/test.txt) | sha256sum | cut -c1-16)
  local folder="${XDG_CACHE_HOME:-$HOME/.cache}/dispatch-venv/$key"
  python="$folder/bin/python"
  if [ -e "$folder/complete" ]; then return; fi
  mkdir -p "$(dirname "$folder")"
  (
    flock 9 # another run may be setting it up
    if [ -e "$folder/complete" ]; then exit; fi
    echo "setting up the Python packages of requirements/test.txt (once)"
    rm -rf "$folder"
    "$base" -m venv "$folder" || { echo "build.sh: $base has no venv module; on Debian: apt-get install python3-venv" >&2; exit 1; }
    "$python" -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements/test.txt
    touch "$folder/complete"
  ) 9>"$folder.lock"
}

cd "$(dirname "${BASH_SOURCE[0]}")"
command=${1:-}
if [ $# -gt 0 ]; then shift; fi
case "$command" in
  demo)
    environment
    exec "$python" -m tests.demo "$@"
    ;;
  test)
    environment
    "$python" -m ruff check .
    "$python" -m ruff format --check .
    "$python" -m mypy
    exec "$python" -m pytest "$@"
    ;;
  -h | --help | help)
    usage
    ;;
  "")
    usage >&2
    exit 2
    ;;
  *)
    echo "build.sh: unknown command: $command" >&2
    usage >&2
    exit 2
    ;;
esac
