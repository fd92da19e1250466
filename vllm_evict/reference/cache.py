"""A Hugging Face cache that evicts: what happens around each layer's attention.

A cache alone sees keys and values. Attention weights, the mask and positions pass through the attention module, so
while attached the cache listens there with torch's module hooks. They sit on this model's own modules, act on this
cache only, and go when the ``with`` block ends.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from vllm_evict.reference.choose import kept_slots
from vllm_evict.reference.layer import EvictingLayer
from vllm_evict.reference.mask import causal_mask, real_tokens
from vllm_evict.reference.rotary import CacheRotary
from vllm_evict.reference.support import attention_modules, check_eager


class EvictingCache(Cache):
    """Holds every layer to ``max_budget`` tokens. A step attends to all it may see, then the cache shrinks.

    Batches may be padded: padding is never attended to, never counted and leaves first, so each row keeps what
    it would keep alone.

    Args:
        max_budget: tokens a layer may hold between steps, at least ``sink_size + recent_size``.
        sink_size: first tokens, never evicted.
        recent_size: newest tokens, never evicted; at least 1.
        one_decision: whether all layers and heads keep the same tokens.
        positions: ``original``: a token keeps its place in the text. ``cache``: its place among the tokens held, so
            a stream never leaves the length the model was trained for. Needs rotary positions.

    """

    def __init__(
        self,
        max_budget: int,
        sink_size: int,
        recent_size: int,
        *,
        one_decision: bool = False,
        positions: Literal["cache", "original"] = "original",
    ):
        super().__init__(layers=[])
        _validate(max_budget, sink_size, recent_size, positions)
        self.max_budget, self.sink_size, self.recent_size = max_budget, sink_size, recent_size
        self.one_decision, self.inside_positions = one_decision, positions == "cache"
        self._rotary: CacheRotary | None = None
        self._attached = False
        self._begun: int | None = None

    # ---- what a method decides ----

    @abstractmethod
    def worth(self, layers: Sequence[EvictingLayer]) -> torch.Tensor:
        """What each token is worth: double ``[batch, num_kv_heads, num_slots]``, higher = keep.

        ``layers``: one, or with ``one_decision`` all of them.
        """

    def observe(self, layer: EvictingLayer, weights: torch.Tensor) -> None:
        """Look at a step's attention, ``[batch, num_heads, num_queries, num_slots]``; rows of padding are zero."""

    # ---- around one layer's attention, in this order ----

    def begin(self, layer_idx: int, real: torch.Tensor) -> None:
        """Make room for a step's tokens. ``real``: bool ``[batch, num_queries]``, False = padding."""
        self.layers[layer_idx].append(real)
        self._begun = layer_idx

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args, **kwargs
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """transformers hands over a step's keys and values and gets all that are held.

        Both ``[batch, num_kv_heads, num_new or num_slots, head_size]``.
        """
        if self._begun != layer_idx:
            raise ValueError(
                f"{type(self).__name__} does not see this model's attention weights. "
                "Call the model inside `with cache.attached_to(model):`."
            )
        self._begun = None
        keys, values = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        if self._rotary is not None:
            layer = self.layers[layer_idx]
            keys = self._rotary.move(keys, layer.cache_positions() - layer.written_at)
        return keys, values

    def end(self, layer_idx: int, weights: torch.Tensor) -> None:
        """Look at the attention and evict. ``weights``: ``[batch, num_heads, num_queries, num_slots]``."""
        layer = self.layers[layer_idx]
        real = layer.positions[:, 0, -weights.shape[2] :] >= 0  # [batch, num_queries]
        self.observe(layer, weights * real[:, None, :, None])
        if not self.one_decision:
            self._evict([layer])
        elif layer_idx == len(self.layers) - 1:
            self._evict(self.layers)

    def _evict(self, layers: Sequence[EvictingLayer]) -> None:
        if layers[0].num_slots <= self.max_budget:
            return
        slots = kept_slots(
            positions=layers[0].positions,
            worth=self.worth(layers),
            max_budget=self.max_budget,
            sink_size=self.sink_size,
            recent_size=self.recent_size,
        )
        for layer in layers:
            layer.keep(slots)

    # ---- listening to a model ----

    @contextmanager
    def attached_to(self, model: PreTrainedModel) -> Iterator[EvictingCache]:
        """Inside the block ``model`` may be called, or generate, with ``past_key_values=self``.

        Raises:
            ValueError: the model does not run eager attention (others compute no weights), or is of a kind that
                one budget for all layers does not fit.

        """
        modules = attention_modules(model)
        if self._attached:
            raise ValueError("the cache is attached already; leave that `with` block first, or make a second cache")
        if not self.layers:
            config = model.config.get_text_config(decoder=True)
            num_kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
            self.layers.extend(EvictingLayer(num_kv_heads) for _ in modules)
        if self.inside_positions:
            self._rotary = CacheRotary(model, modules[0])
        hooks = [module.register_forward_pre_hook(self._before, with_kwargs=True) for module in modules]
        hooks += [module.register_forward_hook(self._after, with_kwargs=True) for module in modules]
        self._attached = True
        try:
            yield self
        finally:
            self._attached = False
            for hook in hooks:
                hook.remove()

    def _before(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]] | None:
        if kwargs.get("past_key_values") is not self:
            return None  # somebody else's call
        check_eager(module)
        hidden_states = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]  # [batch, queries, hidden]
        num_queries = hidden_states.shape[1]
        self.begin(module.layer_idx, real_tokens(kwargs["attention_mask"], hidden_states))
        layer = self.layers[module.layer_idx]
        changed: dict[str, Any] = {
            "attention_mask": causal_mask(layer.positions[:, 0], num_queries=num_queries, dtype=hidden_states.dtype)
        }
        if self._rotary is not None:
            # All heads hold the same number of tokens, so the new ones' places are the same in each.
            positions = layer.cache_positions()[:, 0, -num_queries:]
            changed["position_embeddings"] = self._rotary.embeddings(hidden_states, positions)
        return args, kwargs | changed

    def _after(self, module: nn.Module, args: tuple, kwargs: dict[str, Any], output: tuple) -> None:
        if kwargs.get("past_key_values") is self:
            self.end(module.layer_idx, output[1])


def _validate(max_budget: int, sink_size: int, recent_size: int, positions: str) -> None:
    if sink_size < 0 or recent_size < 1:
        raise ValueError(
            f"sink_size {sink_size} must be at least 0 and the recent window {recent_size} at least 1 token"
        )
    if max_budget < sink_size + recent_size:
        raise ValueError(
            f"max_budget {max_budget} cannot hold sink_size {sink_size} and recent_size {recent_size}; "
            f"set it to at least {sink_size + recent_size}"
        )
    if positions not in ("cache", "original"):
        raise ValueError(f"unknown positions {positions!r}; choose 'cache' or 'original'")
