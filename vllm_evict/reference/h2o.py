"""H2O: keep the tokens that attention keeps coming back to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch

from vllm_evict.reference.cache import EvictingCache
from vllm_evict.reference.layer import EvictingLayer


class H2OCache(EvictingCache):
    """A token is worth the attention it has received so far.

    Every query spreads a probability of 1 over the cached tokens; each token sums up what it gets. Over
    budget, the token with the smallest sum outside sinks and recent window goes.

    Based on H2O, Heavy-Hitter Oracle (arXiv 2306.14048).
    Differs from the paper: sinks may be protected (0 = the paper); under grouped-query attention the query
    heads that share a KV head are averaged, since they share its keys.

    Args:
        max_budget: tokens a layer may hold between steps.
        sink_size: first tokens, never evicted.
        recent_size: newest tokens, never evicted. The paper: half the budget.
        one_decision: False, the paper: every layer and KV head keeps its own tokens. True, as in vllm-evict:
            one choice for all, by the mean over layers and heads.
        positions: see :class:`EvictingCache`.

    """

    def __init__(
        self,
        max_budget: int,
        sink_size: int = 0,
        recent_size: int = 1,
        *,
        one_decision: bool = False,
        positions: Literal["cache", "original"] = "original",
    ):
        super().__init__(max_budget, sink_size, recent_size, one_decision=one_decision, positions=positions)

    def observe(self, layer: EvictingLayer, weights: torch.Tensor) -> None:
        """Add one step's attention. ``weights``: ``[batch, num_heads, num_queries, num_slots]``, rows sum to 1."""
        # Query head h reads KV head h // heads_per_kv_head.
        per_kv_head = weights.double().unflatten(1, (layer.num_kv_heads, -1)).mean(dim=2)
        layer.scores = layer.scores + per_kv_head.sum(dim=2)  # over the queries

    def worth(self, layers: Sequence[EvictingLayer]) -> torch.Tensor:
        scores = torch.stack([layer.scores for layer in layers]).mean(dim=0)  # [batch, num_kv_heads, num_slots]
        return scores.mean(dim=1, keepdim=True).expand_as(scores) if self.one_decision else scores
