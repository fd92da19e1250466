"""Attention kinds beside `tiny`'s: models to serve with the oracle, and configs (without weights) to be refused."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from unittest import mock

import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    OPTConfig,
    OPTForCausalLM,
    PreTrainedModel,
)
from transformers.models.gpt_oss import modeling_gpt_oss
from transformers.models.granite import modeling_granite

from tests.models.tiny import _COMMON, _GAIN, HEAD_SIZE, HIDDEN, VOCAB_TOKENS, _init, _save, tiny
from tests.oracle.forward import load


def tiny_learned(path: Path, *, seed: int = 21) -> Path:
    """OPT: learned absolute positions, added to the embedding; 4 heads, 2 layers."""
    common = {name: value for name, value in _COMMON.items() if name != "intermediate_size"}
    config = OPTConfig(
        **common | {"max_position_embeddings": 1024},
        ffn_dim=512,
        word_embed_proj_dim=HIDDEN,
        num_hidden_layers=2,
        dropout=0.0,
    )
    model = OPTForCausalLM(config)
    gain = {"q_proj": 1.3, "k_proj": 1.3, "v_proj": 1.0, "out_proj": 3.0, "fc1": 1.0, "fc2": 1.0, "lm_head": 3.0}
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        owner, kind = name.split(".")[-2:]
        noise = torch.randn(parameter.shape, generator=generator)
        if "norm" in owner:
            parameter.data += 0.1 * noise
        elif kind == "bias":
            parameter.data = 0.1 * noise
        elif owner in ("embed_tokens", "embed_positions"):
            parameter.data = noise
        else:
            parameter.data = noise * gain[owner] / math.sqrt(parameter.shape[1])
    return _save(model, path)


def tiny_softcap(path: Path, *, seed: int = 22) -> Path:
    """Gemma 2: attention logits squeezed through tanh, a window in every other layer; 4 query and 2 KV heads."""
    config = Gemma2Config(
        **_COMMON | {"tie_word_embeddings": True},
        num_hidden_layers=4,
        num_key_value_heads=2,
        head_dim=HEAD_SIZE,
        query_pre_attn_scalar=HEAD_SIZE,
        sliding_window=64,
        attn_logit_softcapping=3.0,
        final_logit_softcapping=30.0,
    )
    model = Gemma2ForCausalLM(config)
    _init(model, seed=seed, gain=_GAIN | {"embed_tokens": 1 / math.sqrt(HIDDEN)})
    return _save(model, path)


def tiny_gemma(path: Path, *, num_layers: int = 12, window_tokens: int = 64, seed: int = 23) -> Path:
    """Gemma 3 in its own proportions: every sixth layer full, 4 query heads and 1 KV head of size 256."""
    config = Gemma3TextConfig(
        **_COMMON,
        num_hidden_layers=num_layers,
        num_key_value_heads=1,
        head_dim=256,
        query_pre_attn_scalar=256,
        sliding_window=window_tokens,
        layer_types=["full_attention" if layer % 6 == 5 else "sliding_attention" for layer in range(num_layers)],
        rope_parameters={
            "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
            "full_attention": {"rope_type": "default", "rope_theta": 1_000_000.0},
        },
    )
    model = Gemma3ForCausalLM(config)
    _init(model, seed=seed, gain=_GAIN | {"embed_tokens": 1 / math.sqrt(HIDDEN)})
    for layer in model.model.layers:
        layer.self_attn.q_norm.weight.data += _GAIN["q_proj"] - 1
        layer.self_attn.k_norm.weight.data += _GAIN["k_proj"] - 1
    return _save(model, path)


def tiny_sinks(path: Path, *, seed: int = 24) -> tuple[Path, Callable[[], PreTrainedModel]]:
    """Granite, each head with a learned sink: a logit that takes attention and gives nothing. And the oracle's model.

    transformers has no sinks in Granite, but in GPT-OSS: the oracle calls that one's attention.
    """
    config = GraniteConfig(
        **_COMMON,
        num_hidden_layers=2,
        num_key_value_heads=2,
        attention_multiplier=HEAD_SIZE**-0.5,
        attention_sinks=True,
    )
    model = GraniteForCausalLM(config)
    _init(model, seed=seed)
    _save(model, path)
    weights = load_file(path / "model.safetensors")
    sinks = torch.randn(2, 4, generator=torch.Generator().manual_seed(seed)) + 3  # about half of the attention
    weights |= {f"model.layers.{layer}.self_attn.sinks": sinks[layer].clone() for layer in range(2)}
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})

    def oracle() -> PreTrainedModel:
        model = load(path)
        for layer, values in zip(model.model.layers, sinks, strict=True):
            layer.self_attn.sinks = values
        forward = model.forward

        def forward_with_sinks(*args, **kwargs):
            with mock.patch.object(
                modeling_granite, "eager_attention_forward", modeling_gpt_oss.eager_attention_forward
            ):
                return forward(*args, **kwargs)

        model.forward = forward_with_sinks
        return model

    return path, oracle


class UnevenConfig(LlamaConfig):
    """Nemotron-NAS: the number of KV heads may differ from layer to layer."""

    model_type = "nemotron-nas"

    def __init__(self, block_configs: Sequence[dict] = (), **fields) -> None:
        super().__init__(**fields)
        self.block_configs = [json.loads(json.dumps(block), object_hook=_Block) for block in block_configs]


class _Block(dict):
    """JSON whose fields are attributes, as vLLM reads them."""

    def __getattr__(self, name: str) -> object:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


def tiny_uneven(path: Path) -> tuple[Path, Path]:
    """Layers with 2 KV heads and with 1; and the same function as a Llama (the oracle's), with that one twice."""
    AutoConfig.register("nemotron-nas", UnevenConfig, exist_ok=True)
    even = tiny(path / "even")
    weights = load_file(even / "model.safetensors")
    for matrix in ("k_proj", "v_proj"):
        name = f"model.layers.1.self_attn.{matrix}.weight"
        one_head = weights[name][:HEAD_SIZE]
        weights[name] = torch.cat([one_head, one_head])
    save_file(weights, even / "model.safetensors", metadata={"format": "pt"})
    for matrix in ("k_proj", "v_proj"):
        name = f"model.layers.1.self_attn.{matrix}.weight"
        weights[name] = weights[name][:HEAD_SIZE].clone()
    uneven = path / "uneven"
    fields = json.loads((even / "config.json").read_text())
    blocks = [
        {"attention": {"no_op": False, "n_heads_in_group": group}, "ffn": {"no_op": False, "intermediate_size": 512}}
        for group in (2, 4)
    ]
    fields |= {"architectures": ["DeciLMForCausalLM"], "model_type": "nemotron-nas", "block_configs": blocks}
    uneven.mkdir()
    (uneven / "config.json").write_text(json.dumps(fields))
    save_file(weights, uneven / "model.safetensors", metadata={"format": "pt"})
    return uneven, even


_SMALL = {"vocab_size": VOCAB_TOKENS, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
_MLA = {"kv_lora_rank": 32, "q_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16}

# Name: (architecture, model type, fields). Real Hugging Face configs, the smallest that vLLM reads.
CONFIGS: dict[str, tuple[str, str, dict[str, object]]] = {
    "MLA": ("DeepseekV2ForCausalLM", "deepseek_v2", _SMALL | _MLA | {"num_key_value_heads": 4}),
    "encoder-decoder": (
        "WhisperForConditionalGeneration",
        "whisper",
        {"d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "vocab_size": VOCAB_TOKENS},
    ),
    "SSM hybrid": ("FalconH1ForCausalLM", "falcon_h1", _SMALL | {"num_key_value_heads": 4, "head_dim": 16}),
    "SSM alone": ("MambaForCausalLM", "mamba", {"vocab_size": VOCAB_TOKENS, "hidden_size": 64, "num_hidden_layers": 2}),
    "linear attention": ("Qwen3NextForCausalLM", "qwen3_next", _SMALL | {"num_hidden_layers": 4}),
    "M-RoPE": (
        "Qwen2ForCausalLM",  # what every Qwen-VL has inside
        "qwen2",
        _SMALL
        | {
            "num_key_value_heads": 4,
            "intermediate_size": 128,
            "rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 10_000.0},
        },
    ),
    "ALiBi": ("BloomForCausalLM", "bloom", {"vocab_size": VOCAB_TOKENS, "hidden_size": 64, "n_layer": 2, "n_head": 4}),
    "chunked local attention": (
        "Llama4ForCausalLM",
        "llama4_text",
        _SMALL | {"num_key_value_heads": 4, "head_dim": 16, "intermediate_size": 128, "attention_chunk_size": 8192},
    ),
    "encoder only": ("BertModel", "bert", _SMALL | {"intermediate_size": 128}),
}


def config_only(path: Path, name: str) -> Path:
    """A folder with nothing but the config of a model of that kind: whoever asks for weights fails."""
    architecture, model_type, fields = CONFIGS[name]
    config_class = type(AutoConfig.for_model(model_type))
    config = config_class(**fields)
    config.architectures = [architecture]
    config.save_pretrained(path)
    if model_type == "whisper":  # vLLM asks for the processor of such models
        (path / "preprocessor_config.json").write_text(json.dumps({}))
    return path
