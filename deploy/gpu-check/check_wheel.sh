#!/usr/bin/env bash
# Checks a GPU wheel of vLLM against everything that this project relies on, without installing or running it.
#
#   deploy/gpu-check/check_wheel.sh 0.33.0
#
# Downloads the wheel (several hundred MB, alone), reads its Python files, and deletes it. PYTHON names the Python 3.11
# to use; it needs pip and nothing else.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

version=${1:?usage: $0 VERSION of vllm}
python=${PYTHON:-python3.11}
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

echo "[check-wheel] vllm $version: downloading" >&2
"$python" -m pip download --quiet --disable-pip-version-check --no-deps --only-binary :all: \
    --python-version 3.11 --implementation cp --abi abi3 \
    --platform manylinux_2_28_x86_64 --platform manylinux_2_31_x86_64 --platform manylinux_2_34_x86_64 \
    --dest "$folder" "vllm==$version"
"$python" - "$folder" <<'EOF'
import sys
import zipfile
from pathlib import Path

folder = Path(sys.argv[1])
(wheel,) = folder.glob("*.whl")
with zipfile.ZipFile(wheel) as archive:
    archive.extractall(folder, [name for name in archive.namelist() if name.endswith(".py")])
print(f"[check-wheel] {wheel.name}", file=sys.stderr)
wheel.unlink()
EOF
"$python" -m vllm_evict.engine.upstream "$folder"
