"""Key difference, slowly: how far a page's keys point away from the mean direction of all keys held."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def key_difference(
    keys: Sequence[torch.Tensor], page_tokens: int, *, resident: Sequence[int], num_tokens: int
) -> dict[int, float]:
    """Per resident page, minus the mean cosine of its keys to the anchor; mean over KV heads and layers.

    Args:
        keys: per layer `[KV heads, n, head size]` of all tokens, as from `masked_keys`.
        page_tokens: tokens of a page.
        resident: logical pages held.
        num_tokens: tokens computed so far; the last page may be partial.
    """
    tokens_of = {page: range(page * page_tokens, min((page + 1) * page_tokens, num_tokens)) for page in resident}
    held = [token for tokens in tokens_of.values() for token in tokens]
    total, num_heads = dict.fromkeys(resident, 0.0), 0
    for layer_keys in keys:
        for head_keys in layer_keys.double():
            direction = head_keys / head_keys.norm(dim=1, keepdim=True)
            anchor = direction[held].mean(dim=0)
            cosine = direction @ anchor / anchor.norm()
            for page, tokens in tokens_of.items():
                total[page] -= cosine[tokens.start : tokens.stop].mean().item()
            num_heads += 1
    return {page: value / num_heads for page, value in total.items()}
