"""Clients that come and go at random, more than the pool holds; afterwards nothing is left of them."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.serve.conftest import BUDGET_TOKENS
from tests.serve.test_eviction import IDLE_SECONDS, IGNORE_EOS

pytestmark = pytest.mark.serve

CLIENTS = 200


def test_two_hundred_clients_cancelled_at_random(server, plain, text_tokens):
    """Every tenth prompt is over the budget; the pool holds four requests of that size, and eight may run."""
    chance = random.Random(0)
    plans = []
    for number in range(CLIENTS):
        start = chance.randrange(8000)
        length = BUDGET_TOKENS + chance.randrange(200) if number % 10 == 0 else chance.randrange(8, 200)
        plans.append((text_tokens[start : start + length], chance.randrange(0, 30)))

    def client(plan) -> int:
        prompt, num_events = plan
        received = 0
        with server.event_stream("/v1/completions", {"prompt": prompt, "max_tokens": 500, **IGNORE_EOS}) as answer:
            assert answer.status == 200
            while received < num_events:
                received += answer.readline().startswith(b"data: {")
        return received

    with ThreadPoolExecutor(16) as pool:
        assert list(pool.map(client, plans)) == [num_events for _, num_events in plans]
    server.wait_idle(IDLE_SECONDS)
    assert server.metric("vllm:kv_cache_usage_perc") == 0
    assert server.metric("vllm:kv_eviction_resident_tokens") == server.metric("vllm:kv_eviction_logical_tokens") == 0

    question = text_tokens[9000:9200]
    expected = plain.complete(question, 24, logprobs=1).choices[0]
    assert server.complete(question, 24, logprobs=1).choices[0].model_dump() == expected.model_dump()
