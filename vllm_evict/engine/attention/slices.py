"""A batch's queries cut into slices of one length, for kernels that want every row to ask equally much.

Nothing here imports vLLM or torch.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class QuerySlices:
    """Rows of ``queries_per_slice`` places. A slice that has fewer queries fills its row from the end.

    A causal kernel lines the last query of a row up with the last token the row may see, so every query
    stands where it should; what the places before a short slice compute is nobody's.

    Args:
        queries_per_slice: places in a row.
        source: int64 ``[rows * queries_per_slice]`` the query of the batch that each place is filled from.
        request: int64 ``[rows]`` whose slice it is.
        tokens_after: int64 ``[rows]`` tokens of the request that come after the slice's last query.
        place: int64 ``[n]`` where each of the ``n`` queries sits.
        query: int64 ``[n]`` which query of the batch it is.

    """

    queries_per_slice: int
    source: np.ndarray
    request: np.ndarray
    tokens_after: np.ndarray
    place: np.ndarray
    query: np.ndarray

    @property
    def num_rows(self) -> int:
        """Slices, padding included."""
        return len(self.request)


def cut_queries(
    *, query_start: np.ndarray, requests: np.ndarray, queries_per_slice: int, padding_tokens: int
) -> QuerySlices:
    """Cut the queries of ``requests`` into slices; the number of rows is rounded up to a power of two.

    Example, slices of 2, one request of 3 queries at 5, 6, 7 of the batch:
        row 0 holds 5, 6 and one token comes after it; row 1 holds (7), 7 and none does
        source 5 6 7 7, place 0 1 3, query 5 6 7

    Args:
        query_start: int ``[requests of the batch + 1]`` first query of each, and the end.
        requests: int ``[k]`` those to cut; each has at least one query.
        queries_per_slice: places in a row.
        padding_tokens: ``tokens_after`` of rows that are padding.

    """
    start = query_start[requests].astype(np.int64)
    num_queries = query_start[requests + 1] - start
    num_slices = -(-num_queries // queries_per_slice)
    row_in_request = np.arange(num_slices.sum()) - np.repeat(np.cumsum(num_slices) - num_slices, num_slices)
    num_queries, start = np.repeat(num_queries, num_slices), np.repeat(start, num_slices)
    first = row_in_request * queries_per_slice
    end = np.minimum(first + queries_per_slice, num_queries)

    offset = end[:, None] - queries_per_slice + np.arange(queries_per_slice)  # [rows, places], within the request
    place = np.flatnonzero(offset >= first[:, None])
    source = (start[:, None] + np.maximum(offset, first[:, None])).ravel()

    padding = power_of_two(len(first)) - len(first)
    return QuerySlices(
        queries_per_slice,
        source=np.pad(source, (0, padding * queries_per_slice)),
        request=np.pad(np.repeat(requests, num_slices).astype(np.int64), (0, padding)),
        tokens_after=np.pad(num_queries - end, (0, padding), constant_values=padding_tokens),
        place=place,
        query=source[place],
    )


def power_of_two(number: int) -> int:
    """The least power of two that is not below ``number``."""
    return 1 << max(0, number - 1).bit_length()
