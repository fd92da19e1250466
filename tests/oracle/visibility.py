"""Who could see whom: the mask that an eviction schedule implies.

page        0   1   2        pages of 2 tokens, 6 tokens; page 1 evicted when 4 tokens were computed
query 0     x.  ..  ..
query 1     xx  ..  ..
query 2     xx  x.  ..
query 3     xx  xx  ..
query 4     xx  ..  x.       from here on page 1 is a hole
query 5     xx  ..  xx
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Eviction:
    """Pages that became holes before any token with index >= `num_computed_tokens` was computed."""

    num_computed_tokens: int
    pages: tuple[int, ...]


def validate_evictions(page_tokens: int, evictions: Iterable[Eviction]) -> None:
    """Raise ValueError for a schedule that no correct engine can record.

    A page is evicted at most once (of one epoch), and only when its last token has been computed.
    """
    gone: set[int] = set()
    for eviction in evictions:
        for page in eviction.pages:
            if page in gone:
                raise ValueError(
                    f"page {page} is evicted twice; the second time at {eviction.num_computed_tokens} tokens"
                )
            if page < 0 or (page + 1) * page_tokens > eviction.num_computed_tokens:
                raise ValueError(
                    f"page {page} holds tokens {page * page_tokens} to {(page + 1) * page_tokens - 1}, but is evicted "
                    f"when only {eviction.num_computed_tokens} tokens were computed"
                )
            gone.add(page)


def visibility_mask(num_tokens: int, page_tokens: int, evictions: Iterable[Eviction]) -> torch.Tensor:
    """Return bool `[query, key]`, `num_tokens` each: causal, less the pages evicted before the query.

    Token index is position: nothing moves when a page goes.
    """
    evictions = tuple(evictions)
    validate_evictions(page_tokens, evictions)
    mask = torch.ones(num_tokens, num_tokens, dtype=torch.bool).tril()
    for eviction in evictions:
        for page in eviction.pages:
            mask[eviction.num_computed_tokens :, page * page_tokens : (page + 1) * page_tokens] = False
    return mask
