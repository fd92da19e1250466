"""What the engine must compute: an eager Hugging Face forward of all tokens under an explicit mask.

Every token is present at its absolute position in every forward; an evicted page is not moved or
removed, only invisible to the queries that came after its eviction. Nothing here knows how the
product stores a cache.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel

from tests.oracle.visibility import Eviction, visibility_mask


def load(path: Path | str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Load a Hugging Face folder the way this oracle needs it: eager attention, evaluation mode."""
    return AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager", dtype=dtype).eval()


def window_mask(num_tokens: int, window_tokens: int) -> torch.Tensor:
    """Return bool `[query, key]`: a query sees itself and the `window_tokens - 1` before it."""
    distance_tokens = torch.arange(num_tokens)[:, None] - torch.arange(num_tokens)[None, :]
    return (distance_tokens >= 0) & (distance_tokens < window_tokens)


def _additive(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Bool `[n, n]` -> additive `[1, 1, n, n]`."""
    return torch.zeros(mask.shape, dtype=dtype).masked_fill(~mask, torch.finfo(dtype).min)[None, None]


@torch.inference_mode()
def masked_forward(
    model: PreTrainedModel, token_ids: Sequence[int], mask: torch.Tensor, *, attentions: bool = True
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Run all tokens at positions 0, 1, 2, ... under `mask`.

    Args:
        model: from `load`, or any causal model with eager attention and absolute positions.
        token_ids: n tokens.
        mask: bool `[n (query), n (key)]`, as from `visibility_mask`. Holes exist in full-attention
            layers only; a sliding layer of a hybrid model keeps its own window, untouched by
            evictions.
        attentions: False saves the memory of the second result, `layers * heads * n * n` floats.

    Returns:
        logits, fp32 `[n, vocab]`;
        attention weights of the full-attention layers in layer order, fp32 `[query heads, n (query), n (key)]`
        each; an empty list if not wanted.
    """
    output, kinds = _masked_call(model, token_ids, mask, output_attentions=attentions)
    weights = []
    if attentions:
        weights = [w[0].float() for kind, w in zip(kinds, output.attentions, strict=True) if kind == "full_attention"]
    return output.logits[0].float(), weights


@torch.inference_mode()
def masked_keys(model: PreTrainedModel, token_ids: Sequence[int], mask: torch.Tensor) -> list[torch.Tensor]:
    """The keys as a cache holds them, rotated: fp32 `[KV heads, n, head size]` of each full-attention layer."""
    cache = DynamicCache()
    _, kinds = _masked_call(model, token_ids, mask, use_cache=True, past_key_values=cache)
    return [layer.keys[0].float() for kind, layer in zip(kinds, cache.layers, strict=True) if kind == "full_attention"]


def _masked_call(model: PreTrainedModel, token_ids: Sequence[int], mask: torch.Tensor, **wanted: object):
    """The model's output, and the kind of each layer."""
    num_tokens = len(token_ids)
    if mask.shape != (num_tokens, num_tokens) or mask.dtype != torch.bool:
        raise ValueError(f"mask must be bool [{num_tokens}, {num_tokens}], got {mask.dtype} {list(mask.shape)}")
    if not mask.diagonal().all():
        raise ValueError("a token must see itself")
    if model.config._attn_implementation != "eager":
        raise ValueError(f"the oracle needs eager attention, this model has {model.config._attn_implementation!r}")
    kinds = getattr(model.config, "layer_types", None)
    if kinds is None:
        if getattr(model.config, "sliding_window", None):
            raise ValueError("a model with one sliding window and no layer_types has no full-attention layer to evict")
        kinds = ["full_attention"] * model.config.num_hidden_layers
    full = _additive(mask, model.dtype)
    attention_mask = full
    if "sliding_attention" in kinds:
        window = window_mask(num_tokens, model.config.sliding_window)
        attention_mask = {
            "full_attention": full,
            "sliding_attention": _additive(window, model.dtype),
        }
    arguments = {"use_cache": False} | wanted
    output = model(
        input_ids=torch.tensor([list(token_ids)]),
        attention_mask=attention_mask,
        position_ids=torch.arange(num_tokens)[None],
        **arguments,
    )
    return output, kinds


def greedy_reference(
    model: PreTrainedModel,
    prompt: Sequence[int],
    num_new_tokens: int,
    page_tokens: int,
    evictions: Iterable[Eviction],
) -> list[int]:
    """Return the greedy tokens after `prompt`, each from a fresh forward over everything before it."""
    evictions = tuple(evictions)
    tokens = list(prompt)
    for _ in range(num_new_tokens):
        happened = [e for e in evictions if e.num_computed_tokens <= len(tokens)]
        mask = visibility_mask(len(tokens), page_tokens, happened)
        logits, _ = masked_forward(model, tokens, mask, attentions=False)
        tokens.append(int(logits[-1].argmax()))
    return tokens[len(prompt) :]
