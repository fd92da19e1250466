"""A copy of the installed vLLM with patches applied, made of links wherever nothing changes.

    python -m tests.patches.patched_vllm FOLDER

Put FOLDER first on PYTHONPATH, and set PYTHONDONTWRITEBYTECODE: compiled files of unchanged modules are links too.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

PATCHES = sorted((Path(__file__).parents[2] / "patches").glob("*.patch"))


def installed_vllm() -> Path:
    """The folder of the installed package, found without importing it."""
    spec = importlib.util.find_spec("vllm")
    assert spec is not None and spec.origin is not None, "vLLM is not installed"
    return Path(spec.origin).parent


def patched_files(patches: Iterable[Path]) -> set[str]:
    """What the patches change, as `vllm/...`."""
    return {name for patch in patches for name in re.findall(r"^\+\+\+ b/(\S+)$", patch.read_text(), re.MULTILINE)}


def copy_sources(folder: Path, patches: Iterable[Path]) -> None:
    """Only the files that `patches` change, as released."""
    for name in patched_files(patches):
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes((installed_vllm().parent / name).read_bytes())


def git_apply(folder: Path, patches: Iterable[Path], *options: str) -> subprocess.CompletedProcess:
    """`git apply` in a folder that is no repository."""
    command = ["git", "apply", *options, *map(str, patches)]
    environment = os.environ | {"GIT_CEILING_DIRECTORIES": str(folder.parent)}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


def make_patched_vllm(folder: Path, patches: Iterable[Path] = PATCHES) -> Path:
    """Link the package into `folder`/vllm, with copies of what `patches` change, and apply them."""
    patches = list(patches)
    source = installed_vllm()
    changed = {Path(name).relative_to("vllm") for name in patched_files(patches)}
    # A changed module must not find the compiled file of the released one under its name, nor write there.
    stale = {path.parent / "__pycache__" / path.stem for path in changed}
    for at, folders, files in os.walk(source):
        here = Path(at).relative_to(source)
        for name in folders:
            (folder / "vllm" / here / name).mkdir(parents=True, exist_ok=True)
        for name in files:
            path = here / name
            if path not in changed and path.parent / name.split(".")[0] not in stale:
                (folder / "vllm" / path).symlink_to(source / path)
    copy_sources(folder, patches)
    done = git_apply(folder, patches)
    assert done.returncode == 0, done.stderr
    return folder


if __name__ == "__main__":
    print(make_patched_vllm(Path(sys.argv[1]).resolve()))
