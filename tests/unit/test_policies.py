"""One table of all policies feeds every generic test; each policy has its own table made by hand."""

import dataclasses
import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_evict.pages import SIGNALS, EvictionPlan, PageBudget, PageView, pages_for
from vllm_evict.policies import POLICIES, EvictionPolicy, get_policy
from vllm_evict.policies.base import evictable

PAGE_TOKENS = 4
NAN = math.nan

EVERY_POLICY = {
    "streaming": get_policy("streaming"),
    "h2o": get_policy("h2o"),
    "keydiff": get_policy("keydiff"),
    "h2o-keydiff": get_policy("h2o-keydiff"),
    "random": get_policy("random", seed=1),
    "keep-all": get_policy("keep-all"),
}
every_policy = pytest.mark.parametrize("policy", EVERY_POLICY.values(), ids=EVERY_POLICY)


def view(resident, num_tokens, num_processed_tokens=None, scores=None, keys=None):
    """`resident`: one character per logical page, "." a hole; `scores` by attention, `keys` by keys."""
    pages = [page for page, cell in enumerate(resident) if cell != "."]
    pages = np.array(pages, dtype=np.int32)
    signals = {"attention": scores} if keys is None else {"attention": scores, "keys": keys}
    signals = {signal: np.array(values, dtype=np.float64) for signal, values in signals.items() if values is not None}
    for array in (pages, *signals.values()):
        array.flags.writeable = False  # a policy that writes into its view fails
    return PageView(pages, num_tokens, num_tokens if num_processed_tokens is None else num_processed_tokens, signals)


def pages_of(drawn):
    """Logical pages marked `x` in a drawing."""
    return tuple(page for page, cell in enumerate(drawn) if cell == "x")


@st.composite
def situations(draw):
    """A request of up to 14 pages at the start of a step, whatever was evicted before, and a budget."""
    num_pages = draw(st.integers(1, 14))
    num_tokens = draw(st.integers((num_pages - 1) * PAGE_TOKENS + 1, num_pages * PAGE_TOKENS))
    num_processed_tokens = draw(st.integers(0, num_tokens))
    held = draw(st.lists(st.booleans(), min_size=num_pages, max_size=num_pages))
    resident = "".join("o" if keep else "." for keep in held)
    count = sum(held)
    # Few values, so that ties are common.
    score = st.sampled_from([0.0, 0.25, 0.5, 1.0, NAN])
    scores, keys = (draw(st.lists(score, min_size=count, max_size=count)) for _ in range(2))
    sink_pages = draw(st.integers(0, 3))
    recent_pages = draw(st.integers(1, 4))
    budget_pages = sink_pages + recent_pages + draw(st.integers(0, 4))
    return (
        view(resident, num_tokens, num_processed_tokens, scores, keys),
        PageBudget(PAGE_TOKENS, budget_pages, sink_pages, recent_pages),
    )


def test_the_table_knows_every_policy():
    assert set(EVERY_POLICY) == set(POLICIES)


# ---- what holds for every policy ----


@every_policy
@given(situation=situations())
def test_never_evicts_what_is_protected(policy, situation):
    seen, budget = situation
    plan = policy.plan(seen, budget)
    newest_page = pages_for(seen.num_tokens, PAGE_TOKENS) - 1
    assert list(plan.pages) == sorted(set(plan.pages))
    for page in plan.pages:
        assert type(page) is int and page in seen.pages
        assert page >= budget.sink_pages, "a sink"
        assert page <= newest_page - budget.recent_pages, "recent, or being written"
        assert (page + 1) * PAGE_TOKENS <= seen.num_processed_tokens, "a token of it is still in flight"


@every_policy
@given(situation=situations())
def test_evicts_the_excess_and_less_only_where_pages_are_protected(policy, situation):
    seen, budget = situation
    plan = policy.plan(seen, budget)
    excess = max(len(seen.pages) - budget.budget_pages, 0)
    newest_page = (seen.num_tokens - 1) // PAGE_TOKENS
    open_pages = [
        page
        for page in seen.pages
        if budget.sink_pages <= page <= newest_page - budget.recent_pages
        and (page + 1) * PAGE_TOKENS <= seen.num_processed_tokens
    ]
    assert len(plan.pages) == (min(excess, len(open_pages)) if policy.evicts else 0)
    assert bool(plan) == (len(plan.pages) > 0)


@every_policy
@given(situation=situations())
def test_the_lowest_ranked_go_first_then_the_oldest_and_the_unjudged_last(policy, situation):
    """Against a sort of Python tuples."""
    seen, budget = situation
    rank = policy.rank(seen)
    assert rank.shape == seen.pages.shape and rank.dtype == np.float64
    order = sorted(
        (math.isnan(rank[i]), 0.0 if math.isnan(rank[i]) else rank[i], int(page))
        for i, page in enumerate(seen.pages)
        if evictable(seen, budget)[i]
    )
    excess = budget.excess_pages(len(seen.pages)) if policy.evicts else 0
    assert policy.plan(seen, budget).pages == tuple(sorted(page for _, _, page in order[:excess]))


@every_policy
@given(situation=situations())
def test_pure_and_deterministic(policy, situation):
    seen, budget = situation
    pages, signals = seen.pages.copy(), {signal: values.copy() for signal, values in seen.signals.items()}
    first = policy.plan(seen, budget)
    fresh = get_policy(next(name for name, one in EVERY_POLICY.items() if one is policy), **dataclasses.asdict(policy))
    assert policy.plan(seen, budget) == first == fresh.plan(seen, budget)
    np.testing.assert_array_equal(seen.pages, pages)
    np.testing.assert_equal(seen.signals, signals)


@every_policy
def test_at_the_budget_nothing_goes_and_without_a_budget_nothing_ever(policy):
    full = view("oooooooooo", 40, scores=[0.1] * 10, keys=[0.1] * 10)
    assert policy.plan(full, PageBudget(PAGE_TOKENS, 10, 1, 2)) == EvictionPlan()
    assert policy.plan(full, PageBudget(PAGE_TOKENS, None, 1, 1)) == EvictionPlan()
    assert bool(policy.plan(full, PageBudget(PAGE_TOKENS, 9, 1, 2))) is policy.evicts


@every_policy
def test_evicting_again_and_again_reaches_the_budget_and_stops(policy):
    """C27: every eviction makes progress, and a request within its budget is left alone."""
    budget = PageBudget(PAGE_TOKENS, 5, 1, 2)
    resident = list("o" * 10)
    for _ in range(3):
        equal = [0.1] * resident.count("o")
        seen = view("".join(resident), 40, scores=equal, keys=equal)
        for page in policy.plan(seen, budget).pages:
            resident[page] = "."
    assert resident.count("o") == (5 if policy.evicts else 10)


@every_policy
@given(situation=situations(), shift=st.integers(0, 3))
def test_tokens_in_flight_only_protect(policy, situation, shift):
    """What may go while tokens are in flight may go as well once they are processed."""
    seen, budget = situation
    later = dataclasses.replace(
        seen, num_processed_tokens=min(seen.num_processed_tokens + shift * PAGE_TOKENS, seen.num_tokens)
    )
    assert set(np.flatnonzero(evictable(seen, budget))) <= set(np.flatnonzero(evictable(later, budget)))
    assert len(policy.plan(seen, budget).pages) <= len(policy.plan(later, budget).pages)


@pytest.mark.parametrize("policy_class", POLICIES.values())
def test_a_policy_is_a_frozen_dataclass(policy_class):
    policy = policy_class()
    assert dataclasses.is_dataclass(policy) and isinstance(policy, EvictionPolicy)
    with pytest.raises(dataclasses.FrozenInstanceError):
        policy.anything = 1
    assert hash(policy) == hash(policy_class()) and policy == policy_class()


def test_an_unknown_name_lists_those_that_exist():
    with pytest.raises(ValueError, match="unknown policy 'h20'") as error:
        get_policy("h20")
    for name in POLICIES:
        assert name in str(error.value)


@pytest.mark.parametrize(
    ("name", "signals", "evicts"),
    [
        ("streaming", (), True),
        ("h2o", ("attention",), True),
        ("keydiff", ("keys",), True),
        ("h2o-keydiff", ("attention", "keys"), True),
        ("random", (), True),
        ("keep-all", (), False),
    ],
)
def test_what_each_policy_asks_of_the_engine(name, signals, evicts):
    assert (POLICIES[name].signals, POLICIES[name].evicts) == (signals, evicts)
    assert set(signals) <= set(SIGNALS)


# ---- who may go at all: pages of 4 tokens, `x` = open to eviction ----


@pytest.mark.parametrize(
    ("resident", "num_tokens", "num_processed_tokens", "sink_pages", "recent_pages", "expected"),
    [
        ("oooooooooo", 40, 40, 1, 2, ".xxxxxxx.."),
        ("oooooooooo", 37, 37, 1, 2, ".xxxxxxx.."),  # the page being written counts as recent
        ("oooooooooo", 40, 40, 0, 1, "xxxxxxxxx."),
        ("oooooooooo", 40, 40, 3, 4, "...xxx...."),
        ("oooooooooo", 40, 40, 5, 5, ".........."),
        ("oooooooooo", 40, 40, 1, 20, ".........."),  # a window longer than the request
        ("oooooooooo", 40, 36, 1, 1, ".xxxxxxxx."),
        ("oooooooooo", 40, 35, 1, 1, ".xxxxxxx.."),  # 35 = 8 pages and three tokens: page 8 is in flight
        ("oooooooooo", 40, 8, 1, 2, ".x........"),  # a prefill chunk of 8 pages in flight
        ("oooooooooo", 40, 7, 1, 2, ".........."),
        ("oooooooooo", 40, 0, 0, 1, ".........."),
        ("o.o.o.oooo", 40, 40, 1, 2, "..x.x.xx.."),  # holes do not move positions
        ("o.......oo", 40, 40, 1, 2, ".........."),
        ("o", 1, 1, 0, 1, "."),
        ("o", 4, 4, 0, 1, "."),
        ("oo", 5, 5, 0, 1, "x."),
    ],
)
def test_evictable_by_hand(resident, num_tokens, num_processed_tokens, sink_pages, recent_pages, expected):
    seen = view(resident, num_tokens, num_processed_tokens)
    budget = PageBudget(PAGE_TOKENS, None, sink_pages, recent_pages)
    assert tuple(seen.pages[evictable(seen, budget)]) == pages_of(expected)


# ---- streaming: sinks and newest stay ----


@pytest.mark.parametrize(
    ("resident", "num_tokens", "budget", "expected"),
    [
        # budget: pages, sink, recent
        ("oooooooooo", 40, (6, 1, 2), ".xxxx....."),
        ("oooooooooo", 37, (6, 1, 5), ".xxxx....."),
        ("oooooooooo", 40, (6, 0, 6), "xxxx......"),
        ("oooooooooo", 40, (9, 1, 8), ".x........"),
        ("oooooooooo", 40, (10, 1, 9), ".........."),
        ("oooooooooo", 40, (2, 1, 1), ".xxxxxxxx."),
        ("oooooooooo", 40, (6, 3, 3), "...xxxx..."),
        ("o....ooooo", 40, (5, 1, 4), ".....x...."),  # decoding: one page a time
        ("o.o.o.o.oo", 40, (4, 1, 1), "..x.x....."),
    ],
)
def test_streaming_by_hand(resident, num_tokens, budget, expected):
    plan = get_policy("streaming").plan(view(resident, num_tokens), PageBudget(PAGE_TOKENS, *budget))
    assert plan.pages == pages_of(expected)


def test_streaming_keeps_what_the_paper_keeps():
    """Token by token for 40 pages: always the sinks and an unbroken run of the newest pages."""
    budget = PageBudget(PAGE_TOKENS, 5, 1, 4)
    resident = []
    for num_tokens in range(1, 40 * PAGE_TOKENS + 1):
        drawn = "".join("o" if page in resident else "." for page in range(max(resident, default=-1) + 1))
        if resident:
            plan = get_policy("streaming").plan(view(drawn, num_tokens - 1), budget)
            resident = [page for page in resident if page not in plan.pages]
        page = (num_tokens - 1) // PAGE_TOKENS
        if page not in resident:
            resident.append(page)
        assert resident == [0, *range(max(1, page - len(resident) + 2), page + 1)]
        assert len(resident) == min(page + 1, 6 if num_tokens % PAGE_TOKENS == 1 else 5)


# ---- h2o: the pages with the least attention go ----


@pytest.mark.parametrize(
    ("resident", "scores", "budget", "expected"),
    [
        # pages   0   1   2   3   4   5   6   7   8   9
        ("oooooooooo", [0, 9, 1, 8, 2, 7, 3, 6, 0, 0], (6, 1, 2), "..x.x.xx.."),
        ("oooooooooo", [0, 9, 1, 8, 2, 7, 3, 6, 0, 0], (9, 1, 2), "..x......."),
        ("oooooooooo", [0, 9, 1, 8, 2, 7, 3, 6, 0, 0], (4, 1, 1), "..x.xxxxx."),
        ("oooooooooo", [5, 5, 5, 5, 5, 5, 5, 5, 5, 5], (6, 1, 2), ".xxxx....."),  # equal: the oldest
        ("oooooooooo", [0, 5, 5, 1, 5, 5, 1, 5, 5, 5], (6, 1, 2), ".xxx..x..."),
        # Too young to judge: on trial while judged pages are left, then the oldest of them.
        ("oooooooooo", [0, 9, 1, 8, 2, NAN, NAN, NAN, NAN, NAN], (6, 1, 2), ".xxxx....."),
        ("oooooooooo", [0, 9, 1, 8, 2, NAN, NAN, NAN, NAN, NAN], (5, 1, 2), ".xxxxx...."),
        ("oooooooooo", [NAN] * 10, (6, 1, 2), ".xxxx....."),
        ("oooooooooo", [0, NAN, 1, 8, 2, 7, 3, 6, 0, 0], (9, 1, 2), "..x......."),
        ("o..oo.oooo", [0, 8, 2, 3, 6, 0, 0], (6, 1, 2), "....x....."),  # scores go with resident pages
        ("o..oo.oooo", [0, 1, 2, 3, 6, 0, 0], (4, 1, 1), "...xx...x."),
        ("oooooooooo", [0, 1e-300, 0, 1e300, -1, 7, 3, 6, 0, 0], (7, 1, 2), ".xx.x....."),
    ],
)
def test_h2o_by_hand(resident, scores, budget, expected):
    plan = get_policy("h2o").plan(view(resident, 40, scores=scores), PageBudget(PAGE_TOKENS, *budget))
    assert plan.pages == pages_of(expected)


def test_ties_go_to_the_oldest_among_many_pages():
    """With few pages every sort is stable."""
    num_pages = 200
    scores = [float(page % 3) for page in range(num_pages)]
    seen = view("o" * num_pages, num_pages * PAGE_TOKENS, scores=scores)
    plan = get_policy("h2o").plan(seen, PageBudget(PAGE_TOKENS, num_pages - 40, 1, 1))
    assert plan.pages == tuple(range(3, 121, 3))  # page 0 is the sink


def test_h2o_lets_the_kept_set_change_for_ever():
    """Invariant 11: pages that were heavy once go when younger ones are heavier."""
    budget = PageBudget(PAGE_TOKENS, 4, 1, 1)
    resident = [0]
    for page in range(1, 60):
        resident.append(page)
        drawn = "".join("o" if p in resident else "." for p in range(page + 1))
        scores = [float(p) for p in resident]  # the subject moves on
        plan = get_policy("h2o").plan(view(drawn, (page + 1) * PAGE_TOKENS, scores=scores), budget)
        resident = [p for p in resident if p not in plan.pages]
    assert resident == [0, 57, 58, 59]


# ---- keydiff: the pages of the most common keys go; h2o-keydiff: the lowest sum of both places ----


def test_keydiff_by_hand():
    budget = PageBudget(PAGE_TOKENS, 6, 1, 2)
    keys = [-0.1, -0.5, -0.9, -0.4, -0.8, -0.3, -0.7, -0.6, 0, 0]
    seen = view("oooooooooo", 40, scores=[9] * 10, keys=keys)
    assert get_policy("keydiff").plan(seen, budget).pages == pages_of("..x.x.xx..")


@pytest.mark.parametrize(
    ("attention", "keys", "num_victims", "expected"),
    [
        # Pages 1 to 4 are open; 0 and 5 have the top places in both.
        # places by attention 0 3 1 2, by keys 3 0 1 2: sums 3 3 2 4
        ([9, 1, 7, 2, 3, 9], [0, -0.2, -0.8, -0.6, -0.4, 0], 1, "...x.."),
        ([9, 1, 7, 2, 3, 9], [0, -0.2, -0.8, -0.6, -0.4, 0], 2, ".x.x.."),  # 3 and 3: the older
        # Equal values share a place: by attention 0 0 0 3, by keys 0 1 2 3.
        ([9, 1, 1, 1, 3, 9], [0, -0.8, -0.6, -0.4, -0.2, 0], 2, ".xx..."),
        # Too young in one is too young in both, and takes no place from the others.
        ([9, NAN, 7, 2, 3, 9], [0, -0.2, -0.8, -0.6, -0.4, 0], 3, "..xxx."),
        ([9, 1, 7, 2, 3, 9], [0, -0.2, NAN, -0.6, -0.4, 0], 1, "...x.."),
        ([NAN] * 6, [NAN] * 6, 2, ".xx..."),
    ],
)
def test_h2o_keydiff_by_hand(attention, keys, num_victims, expected):
    seen = view("oooooo", 24, scores=attention, keys=keys)
    plan = get_policy("h2o-keydiff").plan(seen, PageBudget(PAGE_TOKENS, 6 - num_victims, 1, 1))
    assert plan.pages == pages_of(expected)


# ---- random: uniform, by seed and length only ----


def random_victims(seed, num_tokens=40, scores=None):
    seen = view("oooooooooo", num_tokens, scores=scores)
    return get_policy("random", seed=seed).plan(seen, PageBudget(PAGE_TOKENS, 6, 1, 2)).pages


def test_random_is_uniform_over_the_unprotected_pages():
    counts = Counter(page for seed in range(1400) for page in random_victims(seed))
    # 4 of 7 open pages, 1400 draws: 800 each, standard deviation below 19.
    assert set(counts) == set(range(1, 8))
    assert all(abs(count - 800) < 5 * 19 for count in counts.values()), counts


def test_random_depends_on_seed_and_token_count_only():
    assert random_victims(3) == random_victims(3, scores=[9.0] * 10)
    assert len({random_victims(seed) for seed in range(30)}) > 10
    assert len({random_victims(3, num_tokens) for num_tokens in (37, 38, 39, 40)}) > 1


# ---- keep-all ----


def test_keep_all_keeps_all():
    for resident in ("oooooooooo", "o.o.o.o.oo"):
        seen = view(resident, 40)
        assert get_policy("keep-all").plan(seen, PageBudget(PAGE_TOKENS, 2, 1, 1)) == EvictionPlan()
