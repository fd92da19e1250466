"""Where a model's config and the size of its weights come from: a file, a folder, or a model hub."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

from vllm_evict.planning.model import DTYPE_BYTES, PlanError

_CASTABLE = {"F32", "F16", "BF16", "F64"}  # loaded as the model's dtype, whatever they are stored as
_STORED_BYTES = {
    name: num_bytes
    for num_bytes, names in {
        8: ("F64", "I64", "U64"),
        4: ("F32", "I32", "U32"),
        2: ("F16", "BF16", "I16", "U16"),
        1: ("F8_E4M3", "F8_E5M2", "F8_E8M0", "I8", "U8", "BOOL"),
    }.items()
    for name in names
}


def config_path(source: str) -> Path:
    """The config.json that `source` (a file, a folder or the name of a model) means.

    Raises:
        PlanError: there is none.

    """
    path = Path(source)
    if path.is_dir():
        path = path / "config.json"
    if path.is_file():
        return path
    if path.suffix == ".json" or path.is_absolute() or source.startswith("."):
        raise PlanError(f"there is no file {path}.")
    from transformers.utils import cached_file

    try:
        return Path(cached_file(source, "config.json"))
    except OSError as error:
        reason = str(error).strip().splitlines()[0]
        raise PlanError(f"{source!r} is neither a file nor a folder here, and no model to be had: {reason}") from None


def read_config(path: Path) -> dict[str, Any]:
    """The text model's entries of a config.json, with the defaults of its model type filled in.

    Raises:
        PlanError: it is not JSON, or not a model's config.

    """
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise PlanError(f"{path} is not a model's config: {error}") from None
    if not isinstance(raw, dict) or not ("model_type" in raw or "architectures" in raw):
        raise PlanError(f"{path} is not a model's config: it has neither model_type nor architectures.")
    hf_config = _hf_config(raw)
    filled = hf_config.get_text_config().to_dict() if hf_config is not None else {}
    # What the file says wins: transformers renames and recomputes some entries.
    nested = raw.get("text_config")
    own = nested if isinstance(nested, dict) else raw
    outer = {key: raw[key] for key in ("quantization_config", "dtype", "torch_dtype") if raw.get(key) is not None}
    return {**filled, **outer, **own}


def weight_bytes(path: Path, dtype: str) -> tuple[int, str]:
    """Size of the weights once loaded as `dtype`, and how it is known.

    Weights beside the config are read off their headers; without them, parameters are counted on the architecture
    that transformers builds from the config, which allocates nothing.

    Raises:
        PlanError: neither is possible.

    """
    files = _weight_files(path.parent)
    if files:
        total = sum(_header_bytes(file, dtype) for file in files)
        return total, f"from the headers of {len(files)} file(s)"
    raw = json.loads(path.read_text(encoding="utf-8"))
    if raw.get("quantization_config"):
        raise PlanError("the size of quantised weights does not follow from the config; say it with --weights.")
    num_parameters = _count_parameters(raw)
    return num_parameters * DTYPE_BYTES[dtype], f"{num_parameters / 1e9:.2f} billion parameters, counted"


def _hf_config(raw: Mapping[str, Any]):
    """transformers' own reading of a config; None for a model type it does not know."""
    from transformers import CONFIG_MAPPING

    if raw.get("model_type") not in CONFIG_MAPPING:
        return None
    return CONFIG_MAPPING[raw["model_type"]].from_dict(dict(raw))


def _weight_files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        return sorted({folder / name for name in json.loads(index.read_text())["weight_map"].values()})
    return sorted(file for file in folder.glob("*.safetensors") if not file.name.startswith("consolidated"))


def _header_bytes(file: Path, dtype: str) -> int:
    try:
        with file.open("rb") as stream:
            header = json.loads(stream.read(struct.unpack("<Q", stream.read(8))[0]))
    except (OSError, ValueError, struct.error) as error:
        raise PlanError(f"{file} has no readable header ({error}); say the size with --weights.") from None
    header.pop("__metadata__", None)
    total = 0
    for tensor in header.values():
        stored = tensor["dtype"]
        if stored not in _STORED_BYTES:
            raise PlanError(f"{file} holds {stored} tensors, whose size is not known here; say it with --weights.")
        num_bytes = DTYPE_BYTES[dtype] if stored in _CASTABLE else _STORED_BYTES[stored]
        total += prod(tensor["shape"]) * num_bytes
    return total


def _count_parameters(raw: Mapping[str, Any]) -> int:
    config = _hf_config(raw)
    if config is None:
        raise PlanError(f"transformers does not know {raw.get('model_type')!r}; say the size with --weights.")
    import torch
    from transformers import AutoModelForCausalLM

    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
    except ValueError as error:
        raise PlanError(f"transformers has no text model for it ({error}); say the size with --weights.") from None
    return sum(parameter.numel() for parameter in model.parameters())  # tied ones count once
