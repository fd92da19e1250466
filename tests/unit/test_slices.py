"""Queries cut into slices of one length: every query has one place, and stands where a causal kernel looks for it."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_evict.engine.attention.slices import cut_queries, power_of_two

NOBODY = 10**6


def cut(lengths, queries_per_slice, requests=None):
    query_start = np.concatenate([[0], np.cumsum(lengths)])
    requests = np.flatnonzero(lengths) if requests is None else np.array(requests)
    return query_start, cut_queries(
        query_start=query_start, requests=requests, queries_per_slice=queries_per_slice, padding_tokens=NOBODY
    )


def test_the_example_of_the_docstring():
    _, slices = cut([5, 3], 2, requests=[1])
    assert slices.source.tolist() == [5, 6, 7, 7]
    assert slices.request.tolist() == [1, 1]
    assert slices.tokens_after.tolist() == [1, 0]
    assert slices.place.tolist() == [0, 1, 3]
    assert slices.query.tolist() == [5, 6, 7]


def test_slices_of_one_are_the_queries():
    _, slices = cut([1, 3, 0, 1], 1)
    assert slices.source.tolist() == [0, 1, 2, 3, 4, 0, 0, 0]
    assert slices.request.tolist() == [0, 1, 1, 1, 3, 0, 0, 0]
    assert slices.tokens_after.tolist() == [0, 2, 1, 0, 0, NOBODY, NOBODY, NOBODY]
    assert slices.query.tolist() == slices.place.tolist() == [0, 1, 2, 3, 4]


@given(st.lists(st.integers(0, 40), min_size=1, max_size=6).filter(any), st.sampled_from([1, 2, 16]))
def test_every_query_has_one_place(lengths, queries_per_slice):
    query_start, slices = cut(lengths, queries_per_slice)
    assert slices.num_rows == power_of_two(slices.num_rows)
    assert len(slices.source) == slices.num_rows * queries_per_slice
    assert slices.query.tolist() == list(range(sum(lengths)))
    assert (slices.source[slices.place] == slices.query).all()
    for place, query in zip(slices.place, slices.query, strict=True):
        row, column = divmod(place, queries_per_slice)
        request = slices.request[row]
        assert query_start[request] <= query < query_start[request + 1]
        # The last place of a row is the row's last query; the kernel counts back from there.
        after = slices.tokens_after[row] + queries_per_slice - 1 - column
        assert query == query_start[request + 1] - 1 - after
    padding = np.setdiff1d(np.arange(slices.num_rows), slices.place // queries_per_slice)
    assert (slices.tokens_after[padding] == NOBODY).all()


@pytest.mark.parametrize("number, power", [(1, 1), (2, 2), (3, 4), (4, 4), (5, 8), (1000, 1024)])
def test_power_of_two(number, power):
    assert power_of_two(number) == power
