#!/usr/bin/env bash
# Writes the locks anew from the .in files (`make lock`). Pins already in a lock stay; delete a line,
# or the whole file, to let that package move.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
uv=../../../.bootstrap/bin/uv
compile=("$uv" pip compile --quiet --no-header --no-annotate --python-version 3.11)
header="# Written by \`make lock\`; edit the .in file instead."

lock() {  # lock NAME OPTIONS...
    local name=$1
    shift
    "${compile[@]}" "$@" "$name.in" -o "$name.txt"
    printf '%s\n%s\n' "$header" "$(cat "$name.txt")" > "$name.txt"
}

torch_source=(--torch-backend cpu)
if [ -n "${PIP_FIND_LINKS:-}" ]; then
    torch_source=()
    for place in $PIP_FIND_LINKS; do torch_source+=(--find-links "$place"); done
fi
lock cpu --overrides leave-out-cpu.txt --overrides leave-out-model.txt "${torch_source[@]}"
# Without --find-links: a `torch+cpu` found there would satisfy `torch==2.13.0` and hide the CUDA one.
lock gpu --overrides leave-out-model.txt
# The tools follow the CPU lock, so that they change nothing the server runs on.
lock dev --constraints cpu.txt --overrides leave-out-dev.txt
