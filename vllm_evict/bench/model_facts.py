"""What a benchmark must know of a model before it starts an engine."""

from __future__ import annotations

from pathlib import Path


def embedded_model() -> Path:
    """Folder of the embedded model, prepared if needed."""
    from vllm_evict.embedded_model import embedded_model_path

    return embedded_model_path()


def kv_bytes_per_token(model: str, dtype: str) -> int:
    """K and V of all layers of a plain full-attention model."""
    import torch
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(model)
    head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    elements = 2 * config.num_hidden_layers * config.num_key_value_heads * head_size
    return elements * getattr(torch, dtype).itemsize
