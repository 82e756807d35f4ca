#!/usr/bin/env bash
# The project's one script. It needs Linux, Python >= 3.11 (3.13 to package), Go >= 1.26 and git, and sets up everything
# else itself: Python packages, pinned with hashes, in virtual environments under ~/.cache, and the test cluster's programs
# beside them. Python is started with -I for that: a PYTHONPATH, or what lies in this folder, is not asked.
set -euo pipefail

usage() {
  cat <<'EOF'
Usage: ./build.sh [COMMAND]

  package                         dist/dispatch-admission.pyz, with its SHA-256 and SBOM; this is the default
  verify [FILE]                   compares an archive, file by file, with this checkout and the pinned packages
  image [TAG [OPTION ...]]        the container image, with docker, podman or buildah; options go to its `build`
  demo [--keep] [--without-gate]  the hazard, and the gate that closes it, on a real control plane on this machine
       [--real-node]              --keep leaves the cluster up and prints how to use it
                                  --without-gate shows what happens when nothing stands between the attempts
                                  --real-node shows it with real processes; it needs root, and a C compiler
  test [--long] [ARGUMENT ...]    lint, types and all tests; arguments go to pytest
                                  --long runs the full counts and sizes
                                  CLIENT=37 in the environment: with that version of the Kubernetes client, not 36
EOF
}

# Sets $python to the interpreter of an environment, made with interpreter $2, that has the packages of $1.
environment() {
  local requirements=$1 base=$2 version key
  version=$("$base" -I -c 'import sys; print("%d.%d.%d" % sys.version_info[:3]); sys.exit(sys.version_info < (3, 11))') || {
    echo "build.sh: Python 3.11 or newer is needed; ${base} is ${version:-not there}. Install one, and name it with PYTHON=..." >&2
    exit 1
  }
  if [ ! -e "$requirements" ]; then echo "build.sh: there is no $requirements" >&2; exit 1; fi
  key=$( (echo "$version $base"; cat "$requirements") | sha256sum | cut -c1-16)
  local folder="${XDG_CACHE_HOME:-$HOME/.cache}/dispatch-venv/$key"
  python="$folder/bin/python"
  if [ -e "$folder/complete" ]; then return; fi
  mkdir -p "$(dirname "$folder")"
  (
    flock 9 # another run may be setting it up
    if [ -e "$folder/complete" ]; then exit; fi
    echo "setting up the Python packages of $requirements (once)"
    rm -rf "$folder"
    "$base" -I -m venv "$folder" || { echo "build.sh: $base has no venv module; on Debian: apt-get install python3-venv" >&2; exit 1; }
    "$python" -I -m pip install --quiet --disable-pip-version-check --require-hashes -r "$requirements"
    touch "$folder/complete"
  ) 9>"$folder.lock"
}

# The same for packaging, which takes the image's Python: its bytecode goes into the archive.
packaging() {
  local base
  local candidates=(python3.13 python3 "${HOME:-}"/.pyenv/versions/3.13.*/bin/python3.13)
  for base in "${PYTHON:-${candidates[@]}}"; do
    if "$base" -I -c 'import sys; sys.exit(sys.version_info[:2] != (3, 13))' 2>/dev/null; then
      environment requirements/build.txt "$base"
      return
    fi
  done
  echo "build.sh: Python 3.13 is needed, the image's, for the bytecode; ${PYTHON:-python3.13} is not there or is another. Install it" \
    "(Debian 13: apt-get install python3.13-venv; else pyenv install 3.13 or uv python install 3.13), and name it with PYTHON=..." >&2
  exit 1
}

# Sets $COMMIT, unless it is given, when what goes into the archive is what a commit of this repository has.
commit() {
  if [ -z "${COMMIT:-}" ] && [ "$(git rev-parse --show-toplevel 2>/dev/null)" = "$(pwd -P)" ] &&
    [ -z "$(git status --porcelain -- admission.py requirements)" ]; then
    COMMIT=$(git rev-parse HEAD)
  fi
  export COMMIT=${COMMIT:-}
}

image() {
  local tag=${1:-dispatch-admission} tool found=""
  if [ $# -gt 0 ]; then shift; fi
  for tool in docker podman buildah; do
    if ! command -v "$tool" >/dev/null; then continue; fi
    if "$tool" info >/dev/null 2>&1; then
      commit
      context=$(mktemp -d)
      trap 'rm -rf "$context"' EXIT
      cp -r Dockerfile admission.py build.sh requirements "$context"
      "$tool" build --build-arg "COMMIT=$COMMIT" -t "$tag" "$@" "$context"
      return
    fi
    found+=" $tool is here, but \`$tool info\` fails."
  done
  echo "build.sh: no docker, podman or buildah that works.$found Install one, or start its service." >&2
  exit 1
}

from=$PWD
CDPATH="" cd "$(dirname "${BASH_SOURCE[0]}")"
command=${1:-package}
if [ $# -gt 0 ]; then shift; fi
case "$command" in
  package)
    if [ $# -gt 0 ]; then usage >&2; exit 2; fi
    packaging
    commit
    exec "$python" -I requirements/package.py build
    ;;
  verify)
    if [[ ${1:-/} != /* ]]; then set -- "$from/$1" "${@:2}"; fi # FILE is the caller's
    packaging
    exec "$python" -I requirements/package.py verify "$@"
    ;;
  image)
    image "$@"
    ;;
  demo)
    environment requirements/test.txt "${PYTHON:-python3}"
    exec "$python" -m tests.demo "$@"
    ;;
  test)
    environment "requirements/test${CLIENT:+-$CLIENT}.txt" "${PYTHON:-python3}"
    "$python" -m ruff check .
    "$python" -m ruff format --check .
    "$python" -m mypy
    "$python" -m tests.cluster build
    exec "$python" -m pytest --numprocesses 2 "$@" # two test clusters: most tests wait most of the time
    ;;
  -h | --help | help)
    usage
    ;;
  *)
    echo "build.sh: unknown command: $command" >&2
    usage >&2
    exit 2
    ;;
esac
