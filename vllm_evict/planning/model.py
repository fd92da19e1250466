"""What a model's own config says about its KV cache."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
KV_DTYPE_BYTES = {**DTYPE_BYTES, "fp8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1}

# Keys of a config whose cache is none of those computed here. Better no number than a wrong one.
_NOT_UNDERSTOOD = {
    "attention_chunk_size": "chunked local attention",
    "attn_config": "attention settings of its own kind",
    "attn_layer_indices": "state-space layers",
    "block_configs": "layers that differ from each other",
    "compress_ratios": "a compressed cache",
    "full_attention_interval": "linear-attention layers",
    "global_head_dim": "heads of more than one size",
    "hybrid_override_pattern": "state-space layers",
    "index_topk": "a sparse-attention index beside the cache",
    "is_encoder_decoder": "an encoder and cross-attention",
    "layers_block_type": "state-space layers",
    "linear_attn_config": "linear-attention layers",
    "mamba_d_state": "state-space layers",
    "multi_query": "a key/value layout of its own kind",
    "rswa_window": "reference sliding-window attention",
    "ssm_cfg": "state-space layers",
    "state_size": "state-space layers",
}
_KV_HEADS = ("n_head_kv", "num_kv_heads", "num_key_value_heads", "multi_query_group_num", "num_attention_groups")
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_HEADS = ("num_attention_heads", "n_head", "n_heads")
_HIDDEN = ("hidden_size", "n_embd", "d_model")
_MAX_TOKENS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")


class PlanError(ValueError):
    """The plan cannot be made. The message is one line for the user."""


@dataclass(frozen=True)
class ModelShape:
    """As much of a model as its KV cache depends on.

    Args:
        model_type: its name in the config.
        dtype: of weights and, unless set otherwise, of the cache.
        num_heads: query heads.
        num_kv_heads: key/value heads; 1 for MLA, whose heads share one latent vector.
        head_size: elements of one head's key; of the whole latent vector for MLA.
        num_full_layers: layers that keep the cache of every token.
        num_window_layers: layers that keep `window_tokens` only.
        window_tokens: width of the sliding window; None without one.
        latent: whether the cache is MLA's: one vector a token, no separate value.
        max_tokens: positions the model was made for; None if the config does not say.

    """

    model_type: str
    dtype: str
    num_heads: int
    num_kv_heads: int
    head_size: int
    num_full_layers: int
    num_window_layers: int = 0
    window_tokens: int | None = None
    latent: bool = False
    max_tokens: int | None = None

    @property
    def num_layers(self) -> int:
        """Layers with a cache of their own."""
        return self.num_full_layers + self.num_window_layers

    @property
    def attention(self) -> str:
        """MHA, GQA, MQA or MLA."""
        if self.latent:
            return "MLA"
        if self.num_kv_heads == self.num_heads:
            return "MHA"
        return "MQA" if self.num_kv_heads == 1 else "GQA"

    def layer_token_bytes(self, kv_dtype: str, num_ranks: int = 1) -> int:
        """Bytes that one token takes in one layer, on one of `num_ranks` tensor-parallel ranks.

        A head lives whole on a rank: with more ranks than heads each has a copy of one.
        """
        num_heads = max(self.num_kv_heads // num_ranks, 1)
        num_vectors = 1 if self.latent else 2  # key and value
        return num_heads * num_vectors * self.head_size * KV_DTYPE_BYTES[kv_dtype]


def shape_of(config: Mapping[str, Any], dtype: str | None = None) -> ModelShape:
    """The shape that a text model's `config` describes.

    Args:
        config: the entries of config.json, defaults filled in.
        dtype: overrides the config's own. Unset, a float32 model counts as bfloat16, as which vLLM runs it.

    Raises:
        PlanError: the config lacks an entry, or its cache is of a kind not understood here.

    """
    for key, what in _NOT_UNDERSTOOD.items():
        if config.get(key):
            raise PlanError(f"the config has {key}, that is, {what}: the size of such a cache is not known here.")
    num_layers, num_heads = _first(config, _LAYERS), _first(config, _HEADS)
    num_layers -= config.get("num_kv_shared_layers") or 0  # the last ones read the cache of earlier ones
    num_window_layers = _num_window_layers(config, num_layers)
    latent = bool(config.get("kv_lora_rank"))
    if latent:
        num_kv_heads, head_size = 1, config["kv_lora_rank"] + config["qk_rope_head_dim"]
    else:
        num_kv_heads = _first(config, _KV_HEADS, num_heads)
        head_size = config.get("head_dim") or _first(config, _HIDDEN) // num_heads
    if latent and num_window_layers:
        raise PlanError("the config has MLA with sliding windows: the size of such a cache is not known here.")
    return ModelShape(
        model_type=str(config.get("model_type", "unknown")),
        dtype=_dtype(config, dtype),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        num_full_layers=num_layers - num_window_layers,
        num_window_layers=num_window_layers,
        window_tokens=config["sliding_window"] if num_window_layers else None,
        latent=latent,
        max_tokens=_first(config, _MAX_TOKENS, None),
    )


def kv_dtype_of(config: Mapping[str, Any], shape: ModelShape, wanted: str) -> str:
    """What `--kv-cache-dtype wanted` means for this model; `auto` follows the checkpoint, else the model's dtype.

    Raises:
        PlanError: the checkpoint asks for a quantised cache of a kind not understood here.

    """
    if wanted != "auto":
        return wanted
    quantised = config.get("quantization_config") or {}
    scheme = quantised.get("kv_cache_scheme") or quantised.get("kv_cache_quant_algo")
    if not scheme:
        return shape.dtype
    if scheme == "FP8" or (isinstance(scheme, dict) and scheme.get("num_bits") == 8 and scheme.get("type") == "float"):
        return "fp8"
    raise PlanError(f"the checkpoint asks for a cache quantised as {scheme!r}; set --kv-dtype to what you will serve.")


def _first(config: Mapping[str, Any], names: tuple[str, ...], *default: Any) -> Any:
    for name in names:
        if config.get(name) is not None:
            return config[name]
    if default:
        return default[0]
    raise PlanError(f"the config has none of {', '.join(names)}.")


def _num_window_layers(config: Mapping[str, Any], num_layers: int) -> int:
    kinds = config.get("layer_types")
    if kinds:
        count = Counter(kinds[:num_layers])
        others = sorted(set(count) - {"full_attention", "sliding_attention"})
        if others:
            raise PlanError(f"the config has layers of type {', '.join(others)}: their cache is not known here.")
        return count["sliding_attention"]
    every_layer = bool(config.get("sliding_window")) and config.get("use_sliding_window") is not False
    return num_layers if every_layer else 0


def _dtype(config: Mapping[str, Any], wanted: str | None) -> str:
    if wanted is not None:
        return wanted
    found = str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch.")
    if found not in DTYPE_BYTES:
        raise PlanError(f"the config has dtype {found!r}; set --dtype to one of {', '.join(DTYPE_BYTES)}.")
    return "bfloat16" if found == "float32" else found
