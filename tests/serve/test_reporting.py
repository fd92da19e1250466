"""What the client is told, what it may ask for, and what /metrics says; h2o, default --kv-eviction-overrides."""

from __future__ import annotations

import json

import openai
import pytest

from tests.serve.conftest import BUDGET_TOKENS
from tests.serve.test_eviction import BUDGET_PAGES, IDLE_SECONDS, IGNORE_EOS, P, only_lines

pytestmark = pytest.mark.serve

LONG = BUDGET_TOKENS + 600


def told(answer) -> dict:
    """The field that stock clients carry along and ignore."""
    return answer.model_extra["kv_transfer_params"]["kv_eviction"]


def evicted_tokens(server, answer) -> int:
    return P * sum(len(line.pages) for line in only_lines(server, answer))


# ---- the answer ----


def test_below_the_budget_nothing_was_dropped(server, text_tokens):
    answer = server.complete(text_tokens[:100], 10, extra_body=IGNORE_EOS)
    # The last token was sampled, not computed.
    assert told(answer) == {"policy": "h2o", "evicted_tokens": 0, "resident_tokens": 109}


def test_above_the_budget_the_trace_agrees(server, text_tokens):
    answer = server.complete(text_tokens[:LONG], 40, extra_body=IGNORE_EOS)
    report = told(answer)
    assert report["evicted_tokens"] == evicted_tokens(server, answer) >= 600 - P
    assert report["resident_tokens"] == answer.usage.prompt_tokens + 39 - report["evicted_tokens"]
    assert answer.usage.prompt_tokens == LONG


def test_chat(server, text_tokens):
    answer = server.chat("What is the capital of France?", 8)
    assert told(answer)["evicted_tokens"] == 0 and told(answer)["policy"] == "h2o"


@pytest.mark.parametrize("route", ["completions", "chat/completions"])
def test_a_stream_says_it_on_the_usage_chunk(server, text_tokens, route):
    text = server.client.post(
        f"{server.url}/detokenize", body={"model": server.model, "tokens": text_tokens[:LONG]}, cast_to=object
    )["prompt"]
    ask = {"prompt": text} if route == "completions" else {"messages": [{"role": "user", "content": text}]}
    body = {**ask, "max_tokens": 5, "stream_options": {"include_usage": True}, **IGNORE_EOS}
    with server.event_stream(f"/v1/{route}", body) as answer:
        events = answer.read().decode().split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    chunks = [json.loads(event.removeprefix("data: ")) for event in events[:-2]]
    assert chunks[-1]["choices"] == [] and chunks[-1]["usage"]["completion_tokens"] == 5
    assert chunks[-1]["kv_transfer_params"]["kv_eviction"]["evicted_tokens"] >= 500
    assert not any("kv_transfer_params" in chunk for chunk in chunks[:-1])


def test_an_answer_that_ends_at_a_stop_string(server, text_tokens):
    """It is the front end that stops; the engine hears of it afterwards."""
    prompt = text_tokens[:LONG]
    full = server.complete(prompt, 24, extra_body=IGNORE_EOS).choices[0].text
    answer = server.complete(prompt, 24, stop=[full[8:16]], extra_body=IGNORE_EOS)
    assert answer.choices[0].finish_reason == "stop"
    assert told(answer)["evicted_tokens"] == evicted_tokens(server, answer) > 0


# ---- wishes ----


def test_a_lower_budget(server, text_tokens):
    answer = server.complete(
        text_tokens[:LONG], 40, extra_body=IGNORE_EOS | {"vllm_xargs": {"kv_eviction_budget": 256}}
    )
    assert LONG + 39 - told(answer)["evicted_tokens"] <= 256 + P
    assert all(len(line.resident) - len(line.pages) <= 256 // P for line in only_lines(server, answer))


def test_a_pinned_span(server, text_tokens):
    prompt = text_tokens[3000 : 3000 + LONG]
    plain = server.complete(prompt, 4, extra_body=IGNORE_EOS)
    gone = sorted({page for line in only_lines(server, plain) for page in line.pages})
    first, last = gone[0] * P, gone[3] * P + 5
    pinned = server.complete(
        prompt, 4, extra_body=IGNORE_EOS | {"vllm_xargs": {"kv_eviction_pin": f"{first}-{first + 5},{last}-{last}"}}
    )
    gone_now = {page for line in only_lines(server, pinned) for page in line.pages}
    assert gone_now and not gone_now & {gone[0], gone[3]}
    assert all(len(line.resident) - len(line.pages) <= BUDGET_PAGES for line in only_lines(server, pinned))


@pytest.mark.parametrize(
    ("wish", "words"),
    [
        ({"kv_eviction": "none"}, ["kv_eviction", "--kv-eviction-overrides lower"]),
        ({"kv_eviction_budget": BUDGET_TOKENS + 1}, ["kv_eviction_budget", f"at most {BUDGET_TOKENS}"]),
        ({"kv_eviction_budget": 8}, ["at least 64"]),
        ({"kv_eviction_budget": "many"}, ["'many'", "whole number of tokens"]),
        ({"kv_eviction_pin": "9"}, ["kv_eviction_pin", "'9'", "0-120"]),
        ({"kv_eviction_pin": "0-400"}, ["the prompt has 50 tokens"]),
        ({"kv_eviction_sink": 4}, ["kv_eviction_sink", "kv_eviction_pin"]),
    ],
)
def test_a_wish_that_cannot_be_granted_is_a_400(server, text_tokens, wish, words):
    refused = server.metric("vllm:kv_eviction_refused_requests_total")
    with pytest.raises(openai.BadRequestError) as error:
        server.complete(text_tokens[:50], 4, extra_body={"vllm_xargs": wish})
    assert error.value.status_code == 400
    for word in words:
        assert word in error.value.message
    assert server.metric("vllm:kv_eviction_refused_requests_total") == refused + 1
    assert server.complete(text_tokens[:50], 4).usage.completion_tokens == 4


@pytest.mark.parametrize("route", ["completions", "chat/completions"])
def test_a_stream_is_refused_before_it_begins(server, route):
    ask = {"prompt": "a"} if route == "completions" else {"messages": [{"role": "user", "content": "a"}]}
    body = {**ask, "max_tokens": 5, "vllm_xargs": {"kv_eviction": "none"}}
    with server.event_stream(f"/v1/{route}", body) as answer:
        assert answer.status == 400
        assert "--kv-eviction-overrides lower" in answer.read().decode()


# ---- metrics ----


def test_metrics_are_what_the_trace_says(server, text_tokens):
    names = ("evicted_pages_total", "freed_pages_total", "score_seconds_total", "evicted_mass_share_count")
    server.wait_idle(IDLE_SECONDS)
    before = {name: server.metric(f"vllm:kv_eviction_{name}") for name in names}
    answer = server.complete(text_tokens[200 : 200 + LONG], 2 * P, extra_body=IGNORE_EOS)
    server.wait_idle(IDLE_SECONDS)
    new = {name: server.metric(f"vllm:kv_eviction_{name}") - before[name] for name in names}
    lines = only_lines(server, answer)
    assert new["evicted_pages_total"] == sum(len(line.pages) for line in lines)
    assert 0 < new["freed_pages_total"] <= new["evicted_pages_total"]
    assert new["evicted_mass_share_count"] == len(lines)
    assert 0 < new["score_seconds_total"] < 60
    assert server.metric("vllm:kv_eviction_resident_tokens") == server.metric("vllm:kv_eviction_logical_tokens") == 0
