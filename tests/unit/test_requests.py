"""What a request may ask for, by hand."""

import pytest

from vllm_evict.config import EvictionConfigError, parse_config
from vllm_evict.requests import asks_for_something, request_eviction, server_eviction

P = 32
H2O = {"policy": "h2o", "budget": 512}


def ask(xargs, num_prompt_tokens=1000, **settings):
    return request_eviction(parse_config(H2O | settings), xargs, P, num_prompt_tokens)


def refusal(xargs, **settings):
    with pytest.raises(EvictionConfigError) as error:
        ask(xargs, **settings)
    text = str(error.value)
    assert "\n" not in text
    return text


def test_who_asks_for_nothing():
    assert not asks_for_something(None) and not asks_for_something({}) and not asks_for_something({"top": 1})
    assert asks_for_something({"kv_eviction_budgett": 1})
    usual = server_eviction(parse_config(H2O), P)
    assert (usual.name, usual.budget.budget_pages, usual.floor) == ("h2o", 16, None)


def test_a_lower_budget_brings_its_own_window():
    lower = ask({"kv_eviction_budget": 256})
    assert (lower.budget.budget_pages, lower.budget.recent_pages) == (8, 4)
    # The server's own window yields.
    assert ask({"kv_eviction_budget": 256}, recent=400).budget.recent_pages == 7
    assert ask({"kv_eviction_budget": "256"}) == lower


def test_pins_in_pages():
    pinned = ask({"kv_eviction_pin": "0-31,40-64, 999-999"})
    assert pinned.budget.pinned_pages == (0, 1, 2, 31)
    assert pinned.budget.recent_pages == 8
    tight = ask({"kv_eviction_pin": "32-255", "kv_eviction_budget": 320})
    assert (tight.budget.budget_pages, len(tight.budget.pinned_pages), tight.budget.recent_pages) == (10, 7, 2)


@pytest.mark.parametrize("pin", ["", "5", "9-5", "a-b", "0-10,", "-3", "1.5-2"])
def test_wrong_pins(pin):
    assert "0-120,300-310" in refusal({"kv_eviction_pin": pin})


def test_pins_that_do_not_fit_name_the_least_budget():
    text = refusal({"kv_eviction_pin": "32-511", "kv_eviction_budget": 512})
    assert f"at least {17 * P}" in text
    assert ask({"kv_eviction_pin": "32-479", "kv_eviction_budget": 512}).budget.recent_pages == 1


@pytest.mark.parametrize("value", [513, "unlimited", 2**40])
def test_by_default_only_downwards(value):
    assert "at most 512" in refusal({"kv_eviction_budget": value})


@pytest.mark.parametrize("value", [1.5, True, -1, None, "many", [1]])
def test_wrong_budgets(value):
    assert "whole number of tokens" in refusal({"kv_eviction_budget": value}, overrides="any")


def test_overrides_none():
    for xargs in ({"kv_eviction_budget": 256}, {"kv_eviction_pin": "0-1"}, {"kv_eviction": "h2o"}):
        assert "--kv-eviction-overrides none" in refusal(xargs, overrides="none")


def test_overrides_any():
    none = ask({"kv_eviction": "none"}, overrides="any")
    assert (none.policy, none.budget.budget_pages, none.signals) == (None, None, ())
    assert ask({"kv_eviction": "streaming"}, overrides="any").name == "streaming"
    assert ask({"kv_eviction_budget": 4096}, overrides="any").budget.budget_pages == 128
    # What the server does not measure cannot be had.
    text = refusal({"kv_eviction": "keydiff"}, overrides="any")
    assert "none, streaming, h2o, random, keep-all" in text
    assert "h2o" not in refusal({"kv_eviction": "h2o"}, overrides="any", policy="streaming").split("choose one of")[1]


def test_unknown_keys():
    assert "kv_eviction_pin" in refusal({"kv_eviction_policy": "h2o"})


def test_a_budget_under_the_floor_has_none():
    assert ask({"kv_eviction_budget": 128}, floor=256).floor is None
    assert ask({"kv_eviction_budget": 300}, floor=256).floor.budget_pages == 8


@pytest.mark.parametrize(
    ("xargs", "settings", "num_tokens", "pages"),
    [
        ({"kv_eviction_budget": 512}, {}, 10_000, 16 + 16 + 1),
        ({"kv_eviction_budget": 512}, {}, 100, 4),
        ({"kv_eviction": "none"}, {"overrides": "any"}, 10_000, 313),
        ({"kv_eviction_budget": "unlimited"}, {"overrides": "any", "floor": 128}, 10_000, 4 + 16 + 1),
    ],
)
def test_pages_at_once(xargs, settings, num_tokens, pages):
    assert ask(xargs, **settings).most_pages(num_tokens, max_in_flight_tokens=512) == pages


@pytest.mark.parametrize(
    "xargs", [{"kv_eviction": "none"}, {"kv_eviction_budget": "unlimited"}, {"kv_eviction_budget": 513}]
)
def test_where_positions_rebase_nobody_holds_more_than_the_server(xargs):
    assert ask(xargs, overrides="any").name
    assert "at most 512" in refusal(xargs, overrides="any", positions="rebase")
    assert ask({"kv_eviction_budget": 256}, overrides="any", positions="rebase").budget.budget_pages == 8
