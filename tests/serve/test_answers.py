"""The OpenAI API below the budget: every answer is that of plain vLLM; and several clients at once."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.serve.server import Server

pytestmark = pytest.mark.serve

QUESTION = "What is the capital of France? Answer in one sentence."

# Logits of bf16 weights differ by some hundredths when a row is multiplied in other company. Two tokens closer than
# this may change places; with a wrong cache they differ by whole units.
NEAR_TIE = 0.25


# ---- equal to plain vLLM ----


def test_completions(server, plain, text_tokens):
    for length in (1, 2, 3, 31, 32, 33, 300):
        prompt = text_tokens[100 : 100 + length]
        answer, expected = (one.complete(prompt, 40, logprobs=5) for one in (server, plain))
        assert answer.choices[0].model_dump() == expected.choices[0].model_dump()
        assert answer.usage.prompt_tokens == length and answer.usage.completion_tokens <= 40


def test_chat(server, plain):
    answer, expected = (one.chat(QUESTION, 40, logprobs=True, top_logprobs=3) for one in (server, plain))
    assert answer.choices[0].model_dump() == expected.choices[0].model_dump()
    assert answer.choices[0].finish_reason == "stop"
    assert "Paris" in answer.choices[0].message.content
    assert answer.usage.prompt_tokens == len(server.tokenize(messages=[{"role": "user", "content": QUESTION}]))


def test_seeded_sampling(server, plain, text_tokens):
    """In one chunk: on CPU vLLM 0.32 itself dies of a seed with a prompt in chunks."""
    prompt = text_tokens[500:600]
    answers = [one.complete(prompt, 40, temperature=1, seed=seed) for one in (server, plain) for seed in (7, 8)]
    assert answers[0].choices[0].text == answers[2].choices[0].text
    assert answers[1].choices[0].text == answers[3].choices[0].text
    assert answers[0].choices[0].text != answers[1].choices[0].text
    branches = server.complete(prompt, 40, temperature=1, seed=7, n=4)
    assert len({choice.text for choice in branches.choices}) == 4


def test_echo_with_logprobs_of_the_prompt(server, plain, text_tokens):
    prompt = text_tokens[700:1000]
    answer, expected = (one.complete(prompt, 8, echo=True, logprobs=2) for one in (server, plain))
    assert answer.choices[0].model_dump() == expected.choices[0].model_dump()
    assert len(answer.choices[0].logprobs.tokens) == 300 + 8


def test_logprobs_of_a_prompt_over_the_budget(server, plain, text_tokens):
    """A chunk sees everything and is trimmed after: at a budget of 1024, in chunks of 512, the first 1536 tokens do."""
    prompt = text_tokens[2000:3800]
    first, second, expected = (
        one.complete(prompt, 1, extra_body={"prompt_logprobs": 1}).choices[0].prompt_logprobs
        for one in (server, server, plain)
    )
    assert first == second
    assert len(first) == 1800 and first[0] is None
    assert first[:1537] == expected[:1537]  # entry 1536 was predicted by token 1535
    assert first[1537:] != expected[1537:]


# ---- streams ----


def test_stream_of_completion(server, text_tokens):
    prompt = text_tokens[300:420]
    expected = server.complete(prompt, 40).choices[0].text
    parts = list(server.complete(prompt, 40, stream=True, stream_options={"include_usage": True}))
    assert "".join(part.choices[0].text for part in parts if part.choices) == expected
    assert len(parts) > 10
    assert parts[-1].usage.prompt_tokens == 120 and not parts[-1].choices


def test_stream_of_chat_as_it_is_on_the_wire(server):
    """Server-sent events: `data: {json}` lines set apart by empty ones, `[DONE]` at the end."""
    body = {"messages": [{"role": "user", "content": QUESTION}], "max_tokens": 40}
    with server.event_stream("/v1/chat/completions", body) as answer:
        assert answer.status == 200
        assert answer.getheader("Content-Type").startswith("text/event-stream")
        lines = answer.read().decode().split("\n\n")
    assert lines.pop() == ""
    assert all(line.startswith("data: ") and "\n" not in line for line in lines)
    assert lines.pop() == "data: [DONE]"
    parts = [json.loads(line.removeprefix("data: "))["choices"][0] for line in lines]
    assert parts[0]["delta"]["role"] == "assistant"
    assert parts[-1]["finish_reason"] == "stop"
    text = "".join(part["delta"].get("content") or "" for part in parts)
    assert text == server.chat(QUESTION, 40).choices[0].message.content


# ---- company ----


def test_eight_clients_at_once(server, text_tokens):
    """Each gets the answer it gets alone, up to ties that bf16 cannot tell apart."""
    prompts = [text_tokens[400 * n : 400 * n + 60 + 17 * n] for n in range(8)]
    alone = [_tokens(server, prompt) for prompt in prompts]
    with ThreadPoolExecutor(len(prompts)) as pool:
        together = list(pool.map(lambda prompt: _tokens(server, prompt), prompts))
    assert all(len(tokens) > 4 for tokens in alone)
    for mine, other in zip(alone, together, strict=True):
        _check_equal_up_to_ties(mine, other)
    # The check can tell requests apart.
    with pytest.raises(AssertionError):
        _check_equal_up_to_ties(alone[0], together[1])


def _tokens(server: Server, prompt: list[int]) -> list[tuple[str, dict[str, float]]]:
    """Greedy tokens and, for each, the log-probabilities of the five best."""
    logprobs = server.complete(prompt, 48, logprobs=5).choices[0].logprobs
    return list(zip(logprobs.tokens, logprobs.top_logprobs, strict=True))


def _check_equal_up_to_ties(alone, together) -> None:
    for (token, best), (other, other_best) in zip(alone, together, strict=False):
        assert abs(best[token] - other_best.get(token, -100)) < NEAR_TIE
        assert abs(best.get(other, -100) - best[token]) < NEAR_TIE
        if token != other:
            return  # from here on they continue different texts
    assert len(alone) == len(together)
