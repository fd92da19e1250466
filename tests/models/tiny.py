"""Tiny random models, saved as Hugging Face folders (fp32, no tokenizer).

A default initialisation (std 0.02) gives attention that is uniform to three digits and logits
closer together than rounding error; such a model cannot tell a right cache from a wrong one. Here
every matrix is scaled by its fan-in, so that attention logits have a standard deviation near 1.6 (a
query lives on a few per cent of its keys), attention moves the residual stream as much as the
embedding does, and output logits have a standard deviation near 3.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    Glm4Config,
    Glm4ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    StableLmConfig,
    StableLmForCausalLM,
)

VOCAB_TOKENS = 512
HIDDEN = 256
HEADS = 4
HEAD_SIZE = 64
MAX_POSITIONS = 4096

_COMMON = {
    "vocab_size": VOCAB_TOKENS,
    "hidden_size": HIDDEN,
    "intermediate_size": 512,
    "num_attention_heads": HEADS,
    "max_position_embeddings": MAX_POSITIONS,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "dtype": "float32",
}

# Output standard deviation of each matrix for inputs of unit variance. The value path is large
# because averaging over keys shrinks it.
_GAIN = {
    "embed_tokens": 1.0,
    "q_proj": 1.3,
    "k_proj": 1.3,
    "v_proj": 1.0,
    "o_proj": 3.0,
    "gate_proj": 1.0,
    "up_proj": 1.0,
    "down_proj": 1.0,
    "lm_head": 3.0,
}


def _init(model: PreTrainedModel, *, seed: int, gain: dict[str, float] = _GAIN) -> None:
    """Fill every parameter of `model` from one seeded generator."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        owner = name.split(".")[-2]
        noise = torch.randn(parameter.shape, generator=generator)
        if owner == "embed_tokens":
            parameter.data = noise * gain[owner]
        elif owner in gain:
            parameter.data = noise * gain[owner] / math.sqrt(parameter.shape[1])
        elif "norm" in owner:  # near the neutral value, but not at it: a forgotten norm weight is seen
            parameter.data = parameter.data.mean() + 0.1 * noise
        else:
            raise ValueError(f"no rule to initialise parameter {name!r}; add its matrix to _GAIN")


def _save(model: PreTrainedModel, path: Path) -> Path:
    model.generation_config.eos_token_id = None
    model.save_pretrained(path)
    return Path(path)


def tiny(
    path: Path,
    *,
    num_kv_heads: int = 2,
    num_layers: int = 2,
    seed: int = 0,
    max_positions: int = MAX_POSITIONS,
    rope: tuple[tuple[str, object], ...] = (("rope_type", "default"),),
) -> Path:
    """Llama: 2 layers, 4 query heads of size 64, 512 tokens, 4096 positions. `rope`: further rotary parameters."""
    config = LlamaConfig(
        **_COMMON | {"max_position_embeddings": max_positions},
        num_hidden_layers=num_layers,
        num_key_value_heads=num_kv_heads,
        head_dim=HEAD_SIZE,
        rope_parameters={"rope_theta": 10_000.0, **dict(rope)},
    )
    model = LlamaForCausalLM(config)
    _init(model, seed=seed)
    return _save(model, path)


def tiny_mha(path: Path, *, seed: int = 1) -> Path:
    """`tiny` with one KV head per query head."""
    return tiny(path, num_kv_heads=HEADS, seed=seed)


def tiny_mqa(path: Path, *, seed: int = 2) -> Path:
    """`tiny` with one KV head for all query heads."""
    return tiny(path, num_kv_heads=1, seed=seed)


def tiny_partial_rotary(
    path: Path, *, rotary_share: float = 0.5, max_positions: int = MAX_POSITIONS, seed: int = 13
) -> Path:
    """StableLM: the second part of every head carries no position; 4 query and 2 KV heads."""
    config = StableLmConfig(
        **_COMMON | {"max_position_embeddings": max_positions},
        num_hidden_layers=2,
        num_key_value_heads=2,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 10_000.0,
            "partial_rotary_factor": rotary_share,
        },
    )
    model = StableLmForCausalLM(config)
    _init(model, seed=seed)
    return _save(model, path)


def tiny_interleaved(path: Path, *, max_positions: int = MAX_POSITIONS, seed: int = 14) -> Path:
    """GLM 4: rotary pairs side by side, in the first half of every head; 4 query and 2 KV heads."""
    config = Glm4Config(
        **_COMMON | {"max_position_embeddings": max_positions},
        num_hidden_layers=2,
        num_key_value_heads=2,
        head_dim=HEAD_SIZE,
        attention_bias=False,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5},
    )
    model = Glm4ForCausalLM(config)
    _init(model, seed=seed, gain=_GAIN | {"gate_up_proj": 1.0})
    return _save(model, path)


def tiny_swa(path: Path, *, window_tokens: int = 64, num_layers: int = 4, seed: int = 4) -> Path:
    """Gemma 3: sliding and full layers in turn, the first one sliding; 4 query and 2 KV heads."""
    kinds = ["sliding_attention", "full_attention"]
    config = Gemma3TextConfig(
        **_COMMON,
        num_hidden_layers=num_layers,
        num_key_value_heads=2,
        head_dim=HEAD_SIZE,
        query_pre_attn_scalar=HEAD_SIZE,
        sliding_window=window_tokens,
        layer_types=[kinds[layer % 2] for layer in range(num_layers)],
        rope_parameters={
            "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
            "full_attention": {"rope_type": "default", "rope_theta": 1_000_000.0},
        },
    )
    model = Gemma3ForCausalLM(config)
    # Gemma multiplies embeddings by sqrt(hidden size), and sets the scale of queries and keys in
    # their norms.
    _init(model, seed=seed, gain=_GAIN | {"embed_tokens": 1 / math.sqrt(HIDDEN)})
    for layer in model.model.layers:
        layer.self_attn.q_norm.weight.data += _GAIN["q_proj"] - 1
        layer.self_attn.k_norm.weight.data += _GAIN["k_proj"] - 1
    return _save(model, path)


MODELS: dict[str, Callable[[Path], Path]] = {
    "tiny": tiny,
    "tiny-mha": tiny_mha,
    "tiny-mqa": tiny_mqa,
    "tiny-swa": tiny_swa,
    "tiny-partial-rotary": tiny_partial_rotary,
    "tiny-interleaved": tiny_interleaved,
}
