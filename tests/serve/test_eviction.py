"""Above the budget: bounded pages, answers that hold, limits and stops, turns, clients that leave, a full pool."""

from __future__ import annotations

import re
import time
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest

from tests.oracle.trace import TraceLine
from tests.serve.conftest import BUDGET_TOKENS, CHUNK_TOKENS, MAX_TOKENS
from tests.serve.server import PagesInUse

pytestmark = pytest.mark.serve

P = 32  # tokens in a page
BUDGET_PAGES = BUDGET_TOKENS // P
STEADY_PAGES = BUDGET_PAGES + 1
PEAK_PAGES = BUDGET_PAGES + CHUNK_TOKENS // P + 1
IDLE_SECONDS = 30

# A sentence that this small model completes with a word told once, across a thousand tokens and more.
SECRET = "The password of Captain Nemo is"
WORDS = ("trumpet", "walrus", "lantern", "pepper", "banana", "dragon", "rocket", "butter")
IGNORE_EOS = {"ignore_eos": True}


def check_bounds(lines: list[TraceLine]) -> None:
    """Every eviction brings the request back to its budget, and it never held more than was promised."""
    assert lines
    for line in lines:
        assert len(line.resident) - len(line.pages) <= BUDGET_PAGES
        assert len(line.resident) <= PEAK_PAGES
        assert line.score_of().keys() == set(line.resident)
        assert 0 not in line.pages, "the sink page"
        newest = (line.num_computed_tokens - 1) // P
        assert max(line.pages) <= newest - 16, "the recent window"


def wait_for_load(server, running: int) -> None:
    """Fail unless that many requests run soon; /metrics lags a step behind."""
    end = time.monotonic() + IDLE_SECONDS
    while server.load()[0] != running:
        assert time.monotonic() < end, server.load()
        time.sleep(0.1)


def only_lines(server, answer) -> list[TraceLine]:
    ((_, lines),) = server.trace(answer).items()
    return lines


class Secrets:
    """Prompts of real text with a sentence to remember somewhere, and its beginning again at the end."""

    def __init__(self, server, text_tokens: list[int]) -> None:
        self._server = server
        self._text = text_tokens

    def tokens(self, text: str) -> list[int]:
        return self._server.tokenize(prompt=text, add_special_tokens=False)

    def prompt(self, num_tokens: int, at_token: int, word: str, text_from: int = 0) -> list[int]:
        """`num_tokens` tokens; the sentence stands at `at_token`, at the very beginning twice, within a page."""
        told = self.tokens(f"\n\n{SECRET} {word}.\n\n" if at_token else f"{SECRET} {word}. {SECRET} {word}.\n\n")
        assert at_token or len(told) < P
        asked = self.tokens(f"\n\n{SECRET}")
        text = self._text[text_from : text_from + num_tokens - len(told) - len(asked)]
        prompt = text[:at_token] + told + text[at_token:] + asked
        assert len(prompt) == num_tokens
        return prompt


@pytest.fixture(scope="module")
def secrets(server, text_tokens) -> Secrets:
    return Secrets(server, text_tokens)


# ---- one long prompt ----


def test_prompt_six_times_the_budget(server, secrets):
    """To the last token that the length allows: all is read, pages stay bounded, the first page is remembered."""
    prompt = secrets.prompt(MAX_TOKENS - 40, at_token=0, word="banana")
    with PagesInUse(server) as pages:
        answer = server.complete(prompt, 40, logprobs=20, extra_body=IGNORE_EOS)
    assert answer.usage.prompt_tokens == len(prompt)
    assert answer.usage.completion_tokens == 40 and answer.choices[0].finish_reason == "length"
    assert len(set(answer.choices[0].logprobs.tokens)) > 4, "it stutters"
    best = answer.choices[0].logprobs.top_logprobs[0]
    assert best.get(" banana", -100) > max(best.get(f" {word}", -99) for word in WORDS if word != "banana")
    lines = only_lines(server, answer)
    check_bounds(lines)
    evicted = sum(len(line.pages) for line in lines)
    # The last page may have been opened after the last eviction.
    assert MAX_TOKENS // P - evicted in (BUDGET_PAGES, STEADY_PAGES)
    assert max(len(line.resident) for line in lines) >= PEAK_PAGES - 1  # the promise is not idle
    assert pages.peak <= PEAK_PAGES + 0.01
    server.wait_idle(IDLE_SECONDS)


def test_what_is_kept_is_found_and_what_is_evicted_is_lost(server, secrets):
    length = 2400
    found, lost = set(), set()
    for at_token in (300, 700, 1100, length - 300):
        answer = server.complete(secrets.prompt(length, at_token, "walrus"), 4)
        lines = only_lines(server, answer)
        check_bounds(lines)
        evicted = {page for line in lines for page in line.pages}
        told_in = {at_token // P, (at_token + 10) // P}
        says_it = answer.choices[0].text.startswith(" walrus")
        if told_in.isdisjoint(evicted):
            assert says_it
            found.add(at_token)
        elif told_in <= evicted:
            assert not says_it
            lost.add(at_token)
    assert length - 300 in found, "it lies in the recent window"
    assert lost


def test_prompt_over_the_longest_length(server, plain, text_tokens):
    """vLLM's own 400, word for word, and nothing else happens."""
    prompt = text_tokens[: MAX_TOKENS + 1]
    messages = []
    for one in (server, plain):
        with pytest.raises(openai.BadRequestError) as error:
            one.complete(prompt, 1)
        assert error.value.status_code == 400
        messages.append(error.value.message)
    assert messages[0] == messages[1]
    assert str(MAX_TOKENS) in messages[0]
    assert server.complete(text_tokens[:40], 4).usage.completion_tokens == 4


# ---- max_tokens, stop strings, logprobs, n ----


def test_limits_hold_across_evictions(server, text_tokens):
    prompt = text_tokens[5000 : 5000 + BUDGET_TOKENS - 10]
    full = server.complete(prompt, 3 * P + 1, logprobs=2, extra_body=IGNORE_EOS)
    assert full.usage.completion_tokens == 3 * P + 1 and full.choices[0].finish_reason == "length"
    lines = only_lines(server, full)
    check_bounds(lines)
    steps = [line.num_computed_tokens - len(prompt) for line in lines]
    assert len(steps) == 3 and all(0 < step <= 3 * P for step in steps)

    logprobs = full.choices[0].logprobs
    assert len(logprobs.tokens) == 3 * P + 1
    for token, best in zip(logprobs.tokens, logprobs.top_logprobs, strict=True):
        assert -100 < best[token] <= 0 and best[token] == max(best.values())

    # A stop string that begins before the second eviction and ends after it.
    text, tokens = full.choices[0].text, logprobs.tokens
    start, stop = (len("".join(tokens[: steps[1] + offset])) for offset in (-6, 6))
    string = text[start:stop]
    cut = server.complete(prompt, 3 * P + 1, stop=[string], extra_body=IGNORE_EOS)
    assert cut.choices[0].finish_reason == "stop" and cut.choices[0].stop_reason == string
    assert cut.choices[0].text == text[: text.index(string)]
    if text.index(string) == start:
        assert len(only_lines(server, cut)) == 2


def test_four_branches_of_one_prompt(server, text_tokens):
    """Each branch evicts for itself. (Without a seed: on CPU vLLM 0.32 dies of a seed with a prompt in chunks.)"""
    prompt = text_tokens[6000 : 6000 + BUDGET_TOKENS - 20]
    options = dict(n=4, temperature=1, extra_body=IGNORE_EOS)
    answer = server.complete(prompt, 2 * P, **options)
    assert len({choice.text for choice in answer.choices}) == 4
    assert [choice.finish_reason for choice in answer.choices] == ["length"] * 4
    assert answer.usage.completion_tokens == 4 * 2 * P
    branches = server.trace(answer)
    assert len(branches) == 4
    for lines in branches.values():
        check_bounds(lines)
        assert len(lines) == 2
    server.wait_idle(IDLE_SECONDS)

    stream = server.complete(prompt, 2000, stream=True, **options)
    for _, _ in zip(range(40), stream, strict=False):
        pass
    wait_for_load(server, running=4)
    stream.close()
    server.wait_idle(IDLE_SECONDS)


# ---- turns ----


def test_six_turns_of_a_chat(server, text_tokens):
    """History grows to twice the budget; later turns find what earlier ones computed."""
    turns = 6
    text = server.client.post(
        f"{server.url}/detokenize", body={"model": server.model, "tokens": text_tokens[8000:10_400]}, cast_to=object
    )["prompt"]
    step = len(text) // turns
    messages, cached, lengths = [], [], []
    salt = {"cache_salt": f"chat-{time.monotonic_ns()}"}
    for turn in range(turns):
        passage = text[turn * step : (turn + 1) * step]
        messages.append({"role": "user", "content": f"{passage}\n\nContinue this text."})
        answer = server.chat(messages, 24, cached=True, extra_body=salt)
        assert answer.choices[0].message.content.strip()
        assert answer.usage.prompt_tokens == len(server.tokenize(messages=messages))
        lengths.append(answer.usage.prompt_tokens)
        cached.append(answer.usage.prompt_tokens_details.cached_tokens or 0)
        messages.append({"role": "assistant", "content": answer.choices[0].message.content})
        evicts = lengths[-1] > BUDGET_TOKENS + P
        assert bool(server.trace(answer)) == evicts
    assert lengths[0] < BUDGET_TOKENS // 2 and lengths[-1] > 2 * BUDGET_TOKENS
    assert cached[0] == 0
    for before, length, hit in zip(lengths, lengths[1:], cached[1:], strict=False):
        # Pages computed before a request's first hole are shared, however long the history has become.
        assert min(before // P * P, BUDGET_TOKENS) <= hit < length


# ---- clients that leave ----


def test_client_gone_in_mid_answer(server, plain, text_tokens):
    prompt = text_tokens[7000 : 7000 + BUDGET_TOKENS + 100]
    body = {"prompt": prompt, "max_tokens": 4000, **IGNORE_EOS}
    with server.event_stream("/v1/completions", body) as answer:
        for _ in range(20):
            assert answer.readline()
        wait_for_load(server, running=1)
    server.wait_idle(IDLE_SECONDS)

    question = text_tokens[300:500]
    expected = plain.complete(question, 24, logprobs=1).choices[0]
    assert server.complete(question, 24, logprobs=1).choices[0].model_dump() == expected.model_dump()


# ---- more requests than the pool holds ----


def test_eight_long_requests_in_a_small_pool(server, secrets):
    """They preempt each other and evict; all are answered, each from its own prompt; the pool is never overdrawn."""
    prompts = [secrets.prompt(900, 0, word, text_from=1100 * n) for n, word in enumerate(WORDS)]
    preemptions = server.metric("vllm:num_preemptions_total")

    # Each is to name its own word; a choice among the eight, because free answers of this small model wander off.
    first_tokens = [secrets.tokens(f" {word}")[0] for word in WORDS]
    assert len(set(first_tokens)) == 8
    choice = {"allowed_token_ids": first_tokens, "return_token_ids": True}

    def ask(prompt):
        return server.complete(prompt, 150, extra_body=IGNORE_EOS | choice)

    with PagesInUse(server) as pages, ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(ask, prompts))
    for token, answer in zip(first_tokens, answers, strict=True):
        assert answer.choices[0].token_ids[0] == token
        assert answer.usage.completion_tokens == 150 and answer.choices[0].finish_reason == "length"
        check_bounds(only_lines(server, answer))
    assert server.metric("vllm:num_preemptions_total") > preemptions
    assert 4 * 29 < pages.peak <= server.usable_pages + 0.01
    server.wait_idle(IDLE_SECONDS)
    assert not re.search(r"Traceback|ERROR", server.log)
