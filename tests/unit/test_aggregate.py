"""`PageMass` against formulas written out query by query."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_evict.scores.aggregate import EMA_HALF_LIFE_QUERIES, SCORE_KINDS, PageMass

PAGE_TOKENS = 4
DISTANT_TOKENS = 6
every_kind = pytest.mark.parametrize("kind", SCORE_KINDS)


def page_mass(kind, num_pages, *, distant_tokens=DISTANT_TOKENS, first_query=0):
    mass = PageMass(kind, PAGE_TOKENS, distant_tokens, first_query)
    mass.append(num_pages)
    return mass


def observe(mass, pages, positions, rows):
    mass.observe(np.array(pages, dtype=np.int32), np.array(positions, dtype=np.int64), np.array(rows, dtype=np.float32))


def scores(mass, pages, num_tokens):
    return mass.scores(np.array(pages, dtype=np.int32), num_tokens)


def attention(positions, pages, seed=0):
    """Random rows that sum to 1 over the pages a query can see. float32 `[queries, pages]`."""
    random = np.random.default_rng(seed)
    rows = random.random((len(positions), len(pages))) ** 3
    rows *= np.array(positions)[:, None] >= np.array(pages)[None, :] * PAGE_TOKENS
    return (rows / np.maximum(rows.sum(1, keepdims=True), 1e-9)).astype(np.float32)


def by_hand(kind, page, positions, column, num_tokens, first_query=0, distant_tokens=DISTANT_TOKENS):
    """One page's score, one query at a time, in Python floats."""
    first_token = page * PAGE_TOKENS
    last_token = first_token + PAGE_TOKENS - 1
    if kind == "distant-mean":
        counted = [m for q, m in zip(positions, column, strict=True) if q - last_token >= distant_tokens]
    else:
        counted = [m for q, m in zip(positions, column, strict=True) if q >= first_token]
    if not counted:
        return math.nan
    if kind == "ema":
        decay = 0.5 ** (1 / EMA_HALF_LIFE_QUERIES)
        average = 0.0
        for m in counted:
            average = decay * average + (1 - decay) * m
        return average / (1 - decay ** len(counted))
    mean = sum(counted) / len(counted)
    if kind == "sum":
        return mean * sum(1 for q in range(first_query, num_tokens) if q >= first_token)
    return mean


@st.composite
def observations(draw):
    """Steps of one request: which queries were observed in each, and what is resident (no eviction in between)."""
    num_pages = draw(st.integers(1, 6))
    pages = sorted(draw(st.sets(st.integers(0, 8), min_size=num_pages, max_size=num_pages)))
    first_query = draw(st.integers(0, 12))
    num_tokens = max((pages[-1] + 1) * PAGE_TOKENS, first_query + 1) + draw(st.integers(0, 12))
    candidates = range(first_query, num_tokens)
    observed = sorted(draw(st.sets(st.sampled_from(candidates), max_size=len(candidates))))
    cuts = sorted(draw(st.lists(st.integers(0, len(observed)), max_size=3)))
    return pages, first_query, num_tokens, observed, cuts, draw(st.integers(0, 100))


@every_kind
@given(case=observations())
def test_equals_the_formula_by_hand_however_the_queries_come_in_steps(kind, case):
    pages, first_query, num_tokens, observed, cuts, seed = case
    rows = attention(observed, pages, seed)
    mass = page_mass(kind, len(pages), first_query=first_query)
    for start, stop in zip([0, *cuts], [*cuts, len(observed)], strict=True):
        observe(mass, pages, observed[start:stop], rows[start:stop].reshape(stop - start, len(pages)))
    expected = [
        by_hand(kind, page, observed, rows[:, i].tolist(), num_tokens, first_query) for i, page in enumerate(pages)
    ]
    np.testing.assert_allclose(scores(mass, pages, num_tokens), expected, rtol=1e-9, atol=1e-15)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        # Pages 0, 1, 2 of 4 tokens; queries 7, 8, 10 observed of 12. Page 1 ends with token 7.
        ("sum", [(0.5 + 0.2 + 0.1) / 3 * 12, (0.5 + 0.5 + 0.3) / 3 * 8, (0.3 + 0.6) / 2 * 4]),
        ("mean", [(0.5 + 0.2 + 0.1) / 3, (0.5 + 0.5 + 0.3) / 3, (0.3 + 0.6) / 2]),
        # At least 3 behind the page's last token (3, 7, 11): queries 7, 8, 10 for page 0, query 10 for page 1.
        ("distant-mean", [(0.5 + 0.2 + 0.1) / 3, 0.3, math.nan]),
    ],
)
def test_three_queries_by_hand(kind, expected):
    mass = page_mass(kind, 3, distant_tokens=3)
    observe(mass, [0, 1, 2], [7, 8, 10], [[0.5, 0.5, 0], [0.2, 0.5, 0.3], [0.1, 0.3, 0.6]])
    np.testing.assert_allclose(scores(mass, [0, 1, 2], 12), expected, rtol=1e-6)


def test_ema_by_hand():
    """One half-life of queries that ignore the page halves what it had, compared with a page they love."""
    mass = page_mass("ema", 2)
    observe(mass, [0, 1], [8], [[1.0, 0.0]])
    np.testing.assert_allclose(scores(mass, [0, 1], 9), [1, 0])
    n = EMA_HALF_LIFE_QUERIES
    observe(mass, [0, 1], np.arange(9, 9 + n), np.tile([[0.0, 1.0]], (n, 1)))
    decay = 0.5 ** (1 / n)
    left = (1 - decay) * 0.5 / (1 - decay ** (n + 1))
    np.testing.assert_allclose(scores(mass, [0, 1], 9 + n), [left, 1 - left], rtol=1e-6)


# ---- distance ----


@pytest.mark.parametrize("distant_tokens", [1, 2, 6])
@pytest.mark.parametrize("page", [0, 3])
def test_distant_mean_counts_from_exactly_the_distance_on(distant_tokens, page):
    last_token = page * PAGE_TOKENS + PAGE_TOKENS - 1
    too_near, near_enough = last_token + distant_tokens - 1, last_token + distant_tokens
    mass = page_mass("distant-mean", 1, distant_tokens=distant_tokens)
    observe(mass, [page], [too_near], [[0.75]])
    assert np.isnan(scores(mass, [page], too_near + 1))
    observe(mass, [page], [near_enough], [[0.25]])
    assert scores(mass, [page], near_enough + 1) == 0.25
    observe(mass, [page], [near_enough + 1], [[0.5]])
    assert scores(mass, [page], near_enough + 2) == 0.375


@pytest.mark.parametrize("kind", ["sum", "mean", "ema"])
def test_the_others_count_from_the_page_s_first_token_on(kind):
    mass = page_mass(kind, 1)
    observe(mass, [2], [7], [[0.0]])  # the token before page 2
    assert np.isnan(scores(mass, [2], 8))
    observe(mass, [2], [8], [[0.5]])
    np.testing.assert_allclose(scores(mass, [2], 9), 0.5)


# ---- equal terms: skipping queries, and age ----


@every_kind
@given(every=st.integers(2, 9), phase=st.integers(0, 8))
def test_skipping_queries_does_not_bias_a_steady_attention(kind, every, phase):
    """Every query puts the same mass on a page: then whichever were observed, the score is the same."""
    pages, num_tokens = [0, 2, 5], 60
    rows = np.tile([[0.5, 0.3, 0.2]], (num_tokens, 1))
    all_queries, some = page_mass(kind, 3), page_mass(kind, 3)
    positions = np.arange(24, num_tokens)  # all three pages are visible from here on
    observe(all_queries, pages, positions, rows[24:])
    observe(some, pages, positions[phase::every], rows[24:][phase::every])
    np.testing.assert_allclose(scores(some, pages, num_tokens), scores(all_queries, pages, num_tokens), rtol=1e-6)


@pytest.mark.parametrize("kind", ["mean", "distant-mean"])
def test_a_mean_over_a_subset_is_the_mean_of_that_subset(kind):
    pages, positions = [0, 1], np.arange(20, 60)
    rows = attention(positions, pages)
    mass = page_mass(kind, 2)
    observe(mass, pages, positions[1::4], rows[1::4])
    np.testing.assert_allclose(scores(mass, pages, 60), rows[1::4].mean(0), rtol=1e-6)


def test_sum_with_every_query_observed_is_the_running_sum_of_the_paper():
    pages, positions = [0, 1, 2, 3], np.arange(16)
    rows = attention(positions, pages)
    mass = page_mass("sum", 4)
    observe(mass, pages, positions, rows)
    np.testing.assert_allclose(scores(mass, pages, 16), rows.sum(0, dtype=np.float64), rtol=1e-6)


def test_sum_after_a_prefix_hit_counts_the_queries_that_ran():
    """12 tokens came from the prefix cache: their queries never ran, so pages 0 to 2 were seen by 8, page 3 by 6."""
    pages, positions = [0, 1, 2, 3], np.arange(10, 18)
    rows = attention(positions, pages)
    mass = page_mass("sum", 4, first_query=10)
    observe(mass, pages, positions, rows)
    np.testing.assert_allclose(scores(mass, pages, 18), rows.sum(0, dtype=np.float64), rtol=1e-6)


@pytest.mark.parametrize("kind", ["mean", "distant-mean", "ema"])
def test_old_and_young_pages_that_are_loved_alike_score_alike(kind):
    """Invariant 11. `sum` is left out: it favours the old, as documented."""
    mass = page_mass(kind, 2)
    observe(mass, [0, 10], np.arange(4, 44), np.tile([[0.25, 0.0]], (40, 1)))
    observe(mass, [0, 10], np.arange(50, 60), np.tile([[0.25, 0.25]], (10, 1)))
    old, young = scores(mass, [0, 10], 60)
    if kind == "mean":  # queries 40 to 43 lie inside the young page and count
        np.testing.assert_allclose([old, young], [0.25, 0.25 * 10 / 14])
    elif kind == "ema":
        assert young < old
    else:
        np.testing.assert_allclose([old, young], [0.25, 0.25])


# ---- pages come and go ----


@every_kind
def test_nothing_seen_is_not_a_number(kind):
    mass = page_mass(kind, 3)
    assert np.isnan(scores(mass, [0, 1, 2], 12)).all()
    observe(mass, [0, 1, 2], [], np.empty((0, 3)))
    assert np.isnan(scores(mass, [0, 1, 2], 12)).all()
    assert len(scores(page_mass(kind, 0), [], 0)) == 0


@every_kind
def test_a_page_never_looked_at_but_seen_is_zero_and_not_nan(kind):
    mass = page_mass(kind, 1)
    observe(mass, [0], [30], [[0.0]])
    assert scores(mass, [0], 31) == 0


@every_kind
def test_appended_pages_are_unseen_and_change_nobody_else(kind):
    mass = page_mass(kind, 2)
    observe(mass, [0, 1], [20, 21], [[0.75, 0.25], [0.5, 0.5]])
    before = scores(mass, [0, 1], 22)
    mass.append(2)
    after = scores(mass, [0, 1, 5, 6], 22)
    np.testing.assert_array_equal(after[:2], before)
    assert np.isnan(after[2:]).all()


@every_kind
def test_kept_pages_keep_their_scores(kind):
    pages, positions = [0, 1, 2, 3], np.arange(30, 40)
    mass = page_mass(kind, 4)
    observe(mass, pages, positions, attention(positions, pages))
    before = scores(mass, pages, 40)
    mass.keep(np.array([True, False, True, True]))
    np.testing.assert_array_equal(scores(mass, [0, 2, 3], 40), before[[0, 2, 3]])
    # And what comes later lands on the right pages.
    mass.append(1)
    observe(mass, [0, 2, 3, 10], [44], [[0.0, 1.0, 0.0, 0.0]])
    changed = scores(mass, [0, 2, 3, 10], 40)
    assert changed[1] > before[2] and changed[0] < before[0] and changed[2] < before[3]


@every_kind
def test_a_page_evicted_and_the_rest_equal_to_never_having_tracked_it(kind):
    positions, later = np.arange(20, 30), np.arange(30, 40)
    pages = [0, 1, 2]
    rows, later_rows = attention(positions, pages), attention(later, [0, 2])
    with_it = page_mass(kind, 3)
    observe(with_it, pages, positions, rows)
    with_it.keep(np.array([True, False, True]))
    without_it = page_mass(kind, 2)
    observe(without_it, [0, 2], positions, rows[:, [0, 2]])
    for mass in (with_it, without_it):
        observe(mass, [0, 2], later, later_rows)
    np.testing.assert_array_equal(scores(with_it, [0, 2], 40), scores(without_it, [0, 2], 40))


# ---- numbers ----


@every_kind
def test_inputs_are_left_alone_and_the_result_is_a_copy(kind):
    pages, positions = np.array([0, 1], dtype=np.int32), np.arange(20, 30)
    rows = attention(positions, pages)
    for array in (pages, positions, rows):
        array.flags.writeable = False
    mass = page_mass(kind, 2)
    mass.observe(pages, positions, rows)
    first = mass.scores(pages, 30)
    first_again = first.copy()
    mass.observe(pages, positions + 10, rows[::-1])
    np.testing.assert_array_equal(first, first_again)
    assert first.dtype == np.float64 and mass.scores(pages, 40).dtype == np.float64


def test_a_million_small_masses_are_not_lost():
    """float32 stops growing at 2**24 times the addend."""
    mass = page_mass("sum", 1)
    mass.mass += 1e6
    mass.queries += 1
    observe(mass, [0], np.arange(100, 1100), np.full((1000, 1), 1e-4))
    np.testing.assert_allclose(mass.mass, 1e6 + 0.1, rtol=0, atol=1e-6)


def test_an_unknown_kind_is_our_own_mistake():
    with pytest.raises(AssertionError):
        PageMass("median", PAGE_TOKENS, DISTANT_TOKENS)
