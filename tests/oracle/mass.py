"""Page mass, slowly: the probability that each query puts on each page, and the scores made of it.

Position and index are one here: row q of every tensor is the query at position q, page p holds
tokens `[p * page_tokens, (p + 1) * page_tokens)`. A query that was not observed is a row of NaN, so
that it cannot be averaged in by mistake.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


def page_mass(
    attentions: Sequence[torch.Tensor], page_tokens: int, *, observed: torch.Tensor | None = None
) -> torch.Tensor:
    """Mean over layers and query heads of the probability that a query puts on a page's tokens.

    Args:
        attentions: per layer `[query heads, num_queries, num_keys]`, as from `masked_forward`.
        page_tokens: tokens of a page; the last page may be partial.
        observed: bool `[num_queries]`, the queries that count (default: all).

    Returns:
        fp64 `[num_queries, num_pages]`; an observed row sums to 1.
    """
    num_queries, num_keys = attentions[0].shape[1:]
    num_pages = -(-num_keys // page_tokens)
    mass = torch.zeros(num_queries, num_pages, dtype=torch.float64)
    for weights in attentions:
        for head_weights in weights.double():
            for page in range(num_pages):
                mass[:, page] += head_weights[:, page * page_tokens : (page + 1) * page_tokens].sum(dim=1)
    mass /= sum(weights.shape[0] for weights in attentions)
    if observed is not None:
        mass[~observed] = torch.nan
    return mass


def accumulated_mass(mass: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """The H2O score `sum`, `[num_pages]`: the mass of all observed queries before `num_tokens`."""
    return torch.nansum(mass[:num_tokens], dim=0)


def _mean_of_queries_from(mass: torch.Tensor, num_tokens: int, first_query: Sequence[int]) -> torch.Tensor:
    """Per page, the mean mass of observed queries in `[first_query[page], num_tokens)`, or NaN."""
    scores = torch.full((mass.shape[1],), torch.nan, dtype=torch.float64)
    for page, first in enumerate(first_query):
        rows = mass[first:num_tokens, page]
        rows = rows[~rows.isnan()]
        if len(rows):
            scores[page] = rows.mean()
    return scores


def mean_mass(mass: torch.Tensor, page_tokens: int, num_tokens: int) -> torch.Tensor:
    """The score `mean`: per page, over observed queries at or after its first token.

    These are the queries that could see any of it. Returns `[num_pages]`; NaN where there was none.
    """
    return _mean_of_queries_from(mass, num_tokens, [page * page_tokens for page in range(mass.shape[1])])


def distant_mean(mass: torch.Tensor, page_tokens: int, num_tokens: int, distance_tokens: int) -> torch.Tensor:
    """The score `distant-mean`: per page, over observed queries that stand far behind it.

    Far: at least `distance_tokens` after its last token, so the first query that counts for page p
    stands at `(p + 1) * page_tokens - 1 + distance_tokens`. Returns `[num_pages]`; NaN for a page
    that nobody was far enough from.
    """
    last_token = [(page + 1) * page_tokens - 1 for page in range(mass.shape[1])]
    return _mean_of_queries_from(mass, num_tokens, [last + distance_tokens for last in last_token])


def ema_mass(mass: torch.Tensor, page_tokens: int, num_tokens: int, half_life_queries: float) -> torch.Tensor:
    """The score `ema`: per page, the weighted mean over the queries of `mean`, where a query weighs half
    as much as the one `half_life_queries` observed queries after it. `[num_pages]`; NaN where there was none.
    """
    scores = torch.full((mass.shape[1],), torch.nan, dtype=torch.float64)
    for page in range(mass.shape[1]):
        rows = mass[page * page_tokens : num_tokens, page]
        rows = rows[~rows.isnan()]
        age = torch.arange(len(rows) - 1, -1, -1, dtype=torch.float64)  # in observed queries
        weights = 0.5 ** (age / half_life_queries)
        if len(rows):
            scores[page] = (weights * rows).sum() / weights.sum()
    return scores
