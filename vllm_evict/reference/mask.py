"""Who may look at whom. transformers' mask assumes that a cache holds the newest tokens; ours has gaps."""

from __future__ import annotations

import torch


def real_tokens(attention_mask: torch.Tensor | None, hidden_states: torch.Tensor) -> torch.Tensor:
    """Which of a step's tokens are not padding: bool ``[batch, num_queries]``.

    Args:
        attention_mask: what transformers made for eager attention, ``[batch, 1, num_queries, num_slots]``, 0 where a
            query may look. The last ``num_queries`` columns are the step's own tokens, and a token may look at itself
            unless it is padding.
        hidden_states: ``[batch, num_queries, hidden_size]``.

    """
    batch, num_queries = hidden_states.shape[:2]
    if attention_mask is None:
        return torch.ones((batch, num_queries), dtype=torch.bool, device=hidden_states.device)
    own = attention_mask[:, 0, :, -num_queries:]
    return (own.diagonal(dim1=-2, dim2=-1) == 0).expand(batch, num_queries)


def causal_mask(positions: torch.Tensor, *, num_queries: int, num_heads: int, dtype: torch.dtype) -> torch.Tensor:
    """0 where a query may look and the least number elsewhere: ``[batch, num_heads, num_queries, num_slots]``.

    Args:
        positions: long ``[batch, num_kv_heads, num_slots]``, -1 for padding; the last ``num_queries`` are the queries'.
        num_queries: tokens of this step.
        num_heads: query heads.
        dtype: of the attention logits.

    """
    query = positions[..., -num_queries:, None]
    key = positions[..., None, :]
    may_look = (key >= 0) & (key <= query)
    # Query head h reads KV head h // heads_per_kv_head.
    may_look = may_look.repeat_interleave(num_heads // positions.shape[1], dim=1)
    return torch.zeros_like(may_look, dtype=dtype).masked_fill(~may_look, torch.finfo(dtype).min)
