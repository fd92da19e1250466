"""From attention mass to a page's score, on equal terms for old and young pages.

For every resident page a request accumulates ``mass``, the attention probability
that *observed* queries put on the page (mean over query heads, mean over layers),
and ``queries``, how many observed queries that was. Not every query is observed
(:class:`vllm_evict.config.EvictionConfig`), so every kind divides by ``queries``
before anything else and skipping does not bias it.

==============  ===========================================================
sum             mean x number of queries that could see the page: the running
                sum of H2O (arXiv 2306.14048). Favours old pages.
mean            mass per observed query. Favours young pages, which every
                page's own neighbours love.
distant-mean    mean over queries at least ``distant_tokens`` behind the page's
                last token. Default.
ema             exponential moving average per observed query (half-life
                ``EMA_HALF_LIFE_QUERIES``). Follows a change of subject.
==============  ===========================================================

Nothing here imports torch or vLLM.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

SCORE_KINDS = ("distant-mean", "sum", "mean", "ema")
EMA_HALF_LIFE_QUERIES = 64
_EMA_DECAY = 0.5 ** (1 / EMA_HALF_LIFE_QUERIES)


@dataclass
class PageMass:
    """Accumulated attention mass of one request's resident pages.

    Args:
        kind: one of ``SCORE_KINDS``.
        page_tokens: tokens in a page.
        distant_tokens: for ``distant-mean``: least distance in tokens from a
            page's last token to a query that counts.
        first_query: position of the first query that could have been observed
            (tokens before it came from the prefix cache).

    Arrays are float64/int64 ``[n]`` aligned with the resident pages.

    """

    kind: str
    page_tokens: int
    distant_tokens: int
    first_query: int = 0
    mass: np.ndarray = field(default_factory=lambda: np.zeros(0))
    queries: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))

    def __post_init__(self) -> None:
        assert self.kind in SCORE_KINDS

    def append(self, num_pages: int) -> None:
        """Add ``num_pages`` new pages at the end, unseen so far."""
        self.mass = np.concatenate([self.mass, np.zeros(num_pages)])
        self.queries = np.concatenate([self.queries, np.zeros(num_pages, dtype=np.int64)])

    def keep(self, kept: np.ndarray) -> None:
        """Drop evicted pages. ``kept``: bool ``[n]``."""
        self.mass = self.mass[kept]
        self.queries = self.queries[kept]

    def observe(self, pages: np.ndarray, positions: np.ndarray, page_mass: np.ndarray) -> None:
        """Add what a step's observed queries saw.

        Args:
            pages: int32 ``[n]`` resident logical pages, ascending.
            positions: int ``[q]`` positions of the queries in the full sequence, ascending.
            page_mass: float32 ``[q, n]`` probability each query put on each page;
                rows sum to 1.

        """
        if len(positions) == 0:
            return
        first_token = pages.astype(np.int64) * self.page_tokens
        if self.kind == "distant-mean":
            visible_from = first_token + self.page_tokens - 1 + self.distant_tokens
        else:
            visible_from = first_token
        counted = positions[:, None] >= visible_from[None, :]
        if self.kind == "ema":
            # After k counted queries: mass = sum_j (1 - d) d^(k-1-j) m_j.
            later = counted.sum(axis=0)[None, :] - np.cumsum(counted, axis=0)
            weights = np.where(counted, (1 - _EMA_DECAY) * _EMA_DECAY**later, 0.0)
            self.mass *= _EMA_DECAY ** counted.sum(axis=0)
            self.mass += (weights * page_mass).sum(axis=0, dtype=np.float64)
        else:
            self.mass += np.where(counted, page_mass, 0).sum(axis=0, dtype=np.float64)
        self.queries += counted.sum(axis=0)

    def scores(self, pages: np.ndarray, num_tokens: int) -> np.ndarray:
        """float64 ``[n]``: higher = keep; NaN where no counted query has looked yet.

        Args:
            pages: int32 ``[n]`` resident logical pages.
            num_tokens: tokens processed so far.

        """
        seen = self.queries > 0
        queries = np.where(seen, self.queries, 1)
        if self.kind == "ema":
            # Undo the start at zero, so that a page of few queries is not punished.
            score = self.mass / (1 - _EMA_DECAY**queries)
        else:
            score = self.mass / queries
        if self.kind == "sum":
            first_token = pages.astype(np.int64) * self.page_tokens
            score = score * (num_tokens - np.maximum(first_token, self.first_query))
        return np.where(seen, score, np.nan)
