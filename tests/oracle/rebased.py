"""What the engine must compute when positions are rebased: every query and key rotated afresh, for every query's time.

A rebase gives each resident page a new place; a query that comes after it sees all keys where they stand then. So the
tokens fall into eras, one per rebase, and in each era every token has one position. The forward takes queries and keys
of all tokens unrotated, and for the queries of each era rotates them and all keys to that era's positions. Nothing is
ever rotated twice, and nothing here knows how the product moves a key.

positions, pages of 2 tokens, page 1 evicted, then a rebase at 6 tokens with pages 0 and 2 resident:
    token        0  1  2  3  4  5  6  7
    first era    0  1  2  3  4  5
    second era   0  1  -  -  2  3  4  5       offset 2
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from transformers import AttentionInterface, PreTrainedModel

_NAME = "oracle-rebased"


@dataclass(frozen=True)
class Rebase:
    """Before token `num_computed_tokens` the i-th resident page moved to position i * page_tokens; later tokens stand
    `offset` below their places in the text."""

    num_computed_tokens: int
    offset: int
    resident: tuple[int, ...]


def eras(num_tokens: int, page_tokens: int, rebases: Iterable[Rebase]) -> list[tuple[int, torch.Tensor]]:
    """Return `(first query, int64 [num_tokens] positions)` of each era; -1 for a token that nobody may see then."""
    found = [(0, torch.arange(num_tokens))]
    for rebase in rebases:
        if list(rebase.resident) != sorted(set(rebase.resident)):
            raise ValueError(f"resident pages are not ascending: {rebase}")
        positions = torch.full((num_tokens,), -1)
        for place, page in enumerate(rebase.resident):
            stop = min((page + 1) * page_tokens, num_tokens)
            tokens = torch.arange(page * page_tokens, stop)
            positions[tokens] = tokens - page * page_tokens + place * page_tokens
        after = (rebase.resident[-1] + 1) * page_tokens
        positions[after:] = torch.arange(after, num_tokens) - rebase.offset
        if after < num_tokens and positions[after] != len(rebase.resident) * page_tokens:
            raise ValueError(f"the offset leaves a gap behind the resident pages: {rebase}")
        found.append((rebase.num_computed_tokens, positions))
    return found


@torch.inference_mode()
def rebased_forward(
    model: PreTrainedModel,
    token_ids: Sequence[int],
    mask: torch.Tensor,
    page_tokens: int,
    rebases: Iterable[Rebase],
) -> tuple[torch.Tensor, list[torch.Tensor], list[list[torch.Tensor]]]:
    """Run all tokens under `mask`, at the positions of each query's era.

    Args:
        model: from `load`; rotary positions, no sliding layers.
        token_ids: n tokens.
        mask: bool `[n (query), n (key)]`.
        page_tokens: tokens of a page.
        rebases: in order.

    Returns:
        logits, fp32 `[n, vocab]`;
        attention weights, per layer fp32 `[query heads, n, n]`;
        keys as a cache holds them, per era and layer fp32 `[KV heads, n, head size]`.
    """
    num_tokens = len(token_ids)
    times = eras(num_tokens, page_tokens, rebases)
    stops = [first for first, _ in times[1:]] + [num_tokens]
    for (first, positions), stop in zip(times, stops, strict=True):
        positions[stop:] = -1
        if mask[first:stop, positions < 0].any():
            raise ValueError(f"queries {first} to {stop - 1} see pages that were not resident at their rebase")
    [rotary] = [module for name, module in model.named_modules() if name.rpartition(".")[2] == "rotary_emb"]
    weights_of_layers, keys_of_eras = [], [[] for _ in times]
    unrotated = False

    def rotated(module: torch.nn.Module, states: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        apply = sys.modules[type(module).__module__].apply_rotary_pos_emb
        cos, sin = rotary(states, positions.clamp(min=0)[None])
        turned, _ = apply(states[..., : cos.shape[-1]], states[..., : cos.shape[-1]], cos, sin)
        return torch.cat([turned, states[..., cos.shape[-1] :]], dim=-1)

    def attend(module, query, key, value, attention_mask, scaling, **kwargs):
        nonlocal unrotated
        unrotated = False
        weights = torch.zeros(query.shape[1], num_tokens, num_tokens)
        repeats = query.shape[1] // key.shape[1]
        for era, ((first, positions), stop) in enumerate(zip(times, stops, strict=True)):
            keys = rotated(module, key, positions)
            keys_of_eras[era].append(keys[0].float())
            if first == stop:
                continue
            queries = rotated(module, query[:, :, first:stop], positions[first:stop])
            logits = queries[0] @ keys[0].repeat_interleave(repeats, dim=0).mT * scaling
            weights[:, first:stop] = logits.masked_fill(~mask[first:stop], float("-inf")).softmax(dim=-1)
        unrotated = True
        weights_of_layers.append(weights)
        output = weights @ value[0].repeat_interleave(repeats, dim=0)
        return output.transpose(0, 1)[None], None

    def without_rotation(module, args, output):
        return (torch.ones_like(output[0]), torch.zeros_like(output[1])) if unrotated else output

    AttentionInterface.register(_NAME, attend)
    hook = rotary.register_forward_hook(without_rotation)
    model.config._attn_implementation, before = _NAME, model.config._attn_implementation
    try:
        unrotated = True
        output = model(
            input_ids=torch.tensor([list(token_ids)]),
            attention_mask=torch.zeros(1, 1, num_tokens, num_tokens),
            position_ids=torch.zeros(1, num_tokens, dtype=torch.long),
            use_cache=False,
        )
    finally:
        model.config._attn_implementation = before
        hook.remove()
    return output.logits[0].float(), weights_of_layers, keys_of_eras
