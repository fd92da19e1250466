"""Who may look at whom.

transformers takes the slots of a cache for the newest tokens of the text. Ours has gaps, so where padding stands
between tokens (a second turn of a batch) that mask would hide tokens and show padding.
"""

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


def causal_mask(positions: torch.Tensor, *, num_queries: int, dtype: torch.dtype) -> torch.Tensor:
    """0 where a query may look and the least number elsewhere: ``[batch, 1, num_queries, num_slots]``.

    One mask for all heads: they may hold different tokens, but all older than the queries, and padding stands in the
    same slots of each, for it leaves before any token does.

    Args:
        positions: long ``[batch, num_slots]`` of any head, -1 for padding; the last ``num_queries`` are the queries'.
        num_queries: tokens of this step.
        dtype: of the attention logits.

    """
    query = positions[:, None, -num_queries:, None]
    key = positions[:, None, None, :]
    may_look = (key >= 0) & (key <= query)
    return torch.zeros_like(may_look, dtype=dtype).masked_fill(~may_look, torch.finfo(dtype).min)
