#!/usr/bin/env bash
# Sets up .venv in this repository from the pinned locks; a second call returns at once.
#
#   deploy/setup/setup.sh run    what `make serve` needs
#   deploy/setup/setup.sh dev    the same and the tools of `make test`
#
# PYTHON=... names the Python 3.11 to use; DEVICE=cpu|gpu overrides the detection.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

UV_VERSION=0.13.9
setup=deploy/setup
in_progress=.bootstrap/in-progress

say() { printf '[set-up] %s\n' "$*" >&2; }
die() { say "ERROR: $*"; exit 1; }

case "${1:-}" in
    run | dev) level=$1 ;;
    *) die "usage: $0 run|dev" ;;
esac

device=${DEVICE:-cpu}
if [ -z "${DEVICE:-}" ] && nvidia-smi -L >/dev/null 2>&1; then device=gpu; fi
case $device in
    cpu | gpu) ;;
    *) die "DEVICE=$device is not known: use cpu or gpu" ;;
esac

# Each step leaves a stamp that holds what it was made from. A moved or copied repository needs a new
# .venv (scripts in it name their folder), and so does another device. git is there anyway, and
# hashes alike everywhere.
place="$device $PWD"
key() {
    local files
    case $1 in
        packages) files=("$setup/locks/$device.txt") ;;
        tools) files=("$setup/locks/dev.txt") ;;
        own) files=(pyproject.toml "$setup/vllm-name/pyproject.toml") ;;
    esac
    echo "$place $(cat "${files[@]}" | git hash-object --stdin)"
}
stamp() { echo ".venv/.setup-$1"; }
is_done() { [ "$(cat "$(stamp "$1")" 2>/dev/null)" = "$(key "$1")" ]; }
all_done() {
    [ ! -e "$in_progress" ] && is_done packages && is_done own && { [ "$level" = run ] || is_done tools; }
}
if all_done; then exit 0; fi

# Two `make` at once take turns. Where flock is missing they had better not.
mkdir -p .bootstrap
if command -v flock >/dev/null; then
    exec 9>.bootstrap/lock
    flock -n 9 || { say "waiting for another set-up of this folder"; flock 9; }
    if all_done; then exit 0; fi
fi

# --- the interpreter ------------------------------------------------------------------------------
# Prints the real interpreter: a version manager's shim or a virtual environment leads to its base.
# Without ensurepip and pip there is no way to get anything from the package index.
probe='
import sys
from importlib.util import find_spec
if sys.version_info[:2] != (3, 11):
    sys.exit("is Python %d.%d" % sys.version_info[:2])
if not (find_spec("ensurepip") or find_spec("pip")):
    sys.exit("has neither ensurepip nor pip")
print(getattr(sys, "_base_executable", sys.executable))
'
find_python() {
    local names=(python3.11 python3 python) name path found
    if [ -n "${PYTHON:-}" ]; then names=("$PYTHON"); fi
    for name in "${names[@]}"; do
        while read -r path; do
            if found=$("$path" -c "$probe" 2>&1); then
                echo "$found"
                return 0
            fi
            say "not usable: $path: ${found##*$'\n'}"
        done < <(type -aP "$name")
    done
    return 1
}
python=$(find_python) || die "no usable Python 3.11${PYTHON:+ at PYTHON=$PYTHON}.
    Install it (Debian, Ubuntu: apt-get install python3.11 python3.11-venv), or name one: make PYTHON=/path/to/python3.11 ..."

if [ "$device" = cpu ]; then
    # vLLM's CPU kernels are linked with it, and no Python package brings it.
    "$python" -c 'import ctypes; ctypes.CDLL("libnuma.so.1")' 2>/dev/null ||
        die "the system library libnuma.so.1 is missing (Debian, Ubuntu: apt-get install libnuma1; Fedora: dnf install numactl-libs)"
elif ! command -v cc >/dev/null && ! command -v gcc >/dev/null && ! command -v clang >/dev/null; then
    say "WARNING: no C compiler found; Triton needs one to start kernels on the GPU (Debian, Ubuntu: apt-get install gcc python3.11-dev)"
fi

# --- uv: resolves and unpacks several times faster than pip, and keeps a cache across attempts ----
uv=.bootstrap/bin/uv
if [ "$("$uv" --version 2>/dev/null | cut -d' ' -f2)" != "$UV_VERSION" ]; then
    say "1/4 installing uv $UV_VERSION into .bootstrap (25 MB)"
    rm -rf .bootstrap/{bin,lib,lib64,include,share,pyvenv.cfg}
    if "$python" -c 'import ensurepip' 2>/dev/null; then
        "$python" -m venv .bootstrap
        .bootstrap/bin/python -m pip install --quiet "uv==$UV_VERSION"
    else
        "$python" -m pip install --quiet --target .bootstrap --upgrade "uv==$UV_VERSION"
    fi
else
    say "1/4 uv $UV_VERSION is there"
fi
# uv does not read pip's settings; these are the ones that decide whether a download works at all.
export UV_HTTP_TIMEOUT=${UV_HTTP_TIMEOUT:-${PIP_DEFAULT_TIMEOUT:-120}}
if [ -n "${PIP_INDEX_URL:-}" ]; then export UV_DEFAULT_INDEX=${UV_DEFAULT_INDEX:-$PIP_INDEX_URL}; fi
export UV_PYTHON_DOWNLOADS=never

# --- the environment ------------------------------------------------------------------------------
# A killed set-up can leave a package that looks whole and is not, so start over after one; uv's cache
# keeps that cheap. The mark stands outside .venv, which may be half made or half removed.
made_for=$(cat .venv/.setup-packages 2>/dev/null) || true
if [ -e "$in_progress" ]; then
    new_venv="the last set-up was interrupted"
elif ! .venv/bin/python -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null; then
    new_venv="there is none yet that works"
elif [ -n "$made_for" ] && [[ "$made_for" != "$place "* ]]; then
    new_venv="the old one was made for: ${made_for% *}"
else
    new_venv=
fi
touch "$in_progress"
if [ -n "$new_venv" ]; then
    say "2/4 making .venv with $python ($new_venv)"
    "$uv" venv --quiet --clear --python "$python" .venv
else
    say "2/4 updating .venv"
fi

# --no-deps: the locks are complete, nothing is resolved here. --compile-bytecode: some machines set
# PYTHONDONTWRITEBYTECODE, and without compiled files every start of the server costs 25 s more.
install=("$uv" pip install --python .venv/bin/python --no-deps --compile-bytecode)

step() { # step NAME WHAT-TO-SAY INSTALL-ARGUMENTS...
    local name=$1 what=$2
    shift 2
    if is_done "$name"; then return; fi
    say "$what"
    "${install[@]}" "$@" || die "installing failed, see above; run the same command again, what was downloaded is kept"
    key "$name" > "$(stamp "$name")"
}

torch_source=()
if [ "$device" = cpu ]; then
    # torch+cpu is not on PyPI: it lies in a folder of wheels, or in PyTorch's own index.
    if [ -n "${PIP_FIND_LINKS:-}" ]; then
        for wheels in $PIP_FIND_LINKS; do torch_source+=(--find-links "$wheels"); done
    else
        torch_source=(--torch-backend cpu)
    fi
    download="0.7 GB"
else
    download="4 GB"
fi
step packages "3/4 installing the pinned packages for $device (up to $download to download, then a minute to compile)" \
    "${torch_source[@]}" -r "$setup/locks/$device.txt"
if [ "$level" = dev ]; then step tools "3/4 installing the tools of make test" -r "$setup/locks/dev.txt"; fi

own=(-e .)
if [ "$device" = cpu ]; then own+=("./$setup/vllm-name"); fi
# --no-build-isolation: the lock has setuptools, so building needs no download.
step own "4/4 installing vllm-evict itself" --quiet --no-build-isolation "${own[@]}"

rm "$in_progress"
say "done: $(.venv/bin/vllm-evict --version)"
