"""Capability 4: sampling as vLLM offers it, while pages go: branches, seeds, logprobs, stop strings, limits."""

from __future__ import annotations

import pytest
import torch

from tests.engine import checks
from tests.engine.harness import PAGE_TOKENS as P
from tests.engine.harness import Engine, Run, random_prompt

BUDGET = {"budget": 4 * P}
POLICIES = ["streaming", "h2o"]

# Sampled at random, an output token need not be the first choice: the logits it was drawn from are compared.
SAMPLED = tuple(check for check in checks.ALWAYS if check is not checks.greedy_tokens)
PROMPT = random_prompt(6 * P, seed=1)


def branches(served: Engine, prompt: list[int], sampling: dict, max_tokens: int = 4 * P) -> Run:
    served.begin()
    served.add("a", prompt, max_tokens=max_tokens, sampling=sampling)
    return served.drain()


@pytest.mark.parametrize("prefix_caching", [True, False])
@pytest.mark.parametrize("policy", POLICIES)
def test_four_branches_evict_each_for_itself(engine, policy, prefix_caching):
    """C42. A seed with a prompt in chunks kills vLLM 0.32 on CPU, eviction or not: the prompt is one chunk."""
    with engine(eviction=BUDGET | {"policy": policy}, chunk_tokens=26 * P, prefix_caching=prefix_caching) as served:
        run = branches(served, PROMPT, {"n": 4, "temperature": 1.0, "seed": 7})
    assert sorted(run.answers) == ["a/0", "a/1", "a/2", "a/3"]
    assert len({answer.tokens for answer in run.answers.values()}) == 4
    evictions = {name: [(line.num_computed_tokens, line.pages) for line in run.lines(name)] for name in run.answers}
    assert all(len(made) >= 5 for made in evictions.values())
    if policy == "h2o":
        assert len(set(map(repr, evictions.values()))) > 1
        checks.masses(run)
    for check in SAMPLED:
        check(run)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_seed_gives_the_tokens_of_plain_vllm_below_the_budget(engine, policy):
    """O-OFF, and again with the same seed; another seed says something else."""
    sampling = {"n": 3, "temperature": 0.9, "top_p": 0.9, "top_k": 40, "min_p": 0.01, "seed": 11}
    said = {}
    for eviction in (None, {"policy": policy, "budget": 16 * P}):
        with engine(eviction=eviction, chunk_tokens=26 * P) as served:
            for number, seed in enumerate((11, 11, 12)):
                served.begin()
                served.add(f"r{number}", PROMPT, max_tokens=P, sampling=sampling | {"seed": seed})
                run = served.drain()
                said[eviction is None, number] = [answer.tokens for _, answer in sorted(run.answers.items())]
    assert said[True, 0] == said[True, 1] == said[False, 0] == said[False, 1]
    assert said[True, 2] == said[False, 2] != said[True, 0]


@pytest.mark.parametrize("policy", POLICIES)
def test_branches_taken_back(engine, policy):
    """C42: an abort after two pages of four branches leaves nobody running and nothing held."""
    with engine(eviction=BUDGET | {"policy": policy}) as served:
        served.begin()
        served.add("a", PROMPT, max_tokens=20 * P, sampling={"n": 4, "temperature": 1.0})
        for _ in range(2 * P):
            served.step()
        assert len(served.scheduler.running) == 4
        served.abort("a")
        assert not served.busy
        served.step()
        run = served.end()
        pool = served.snapshot()
        assert len(pool.free) == pool.num_blocks - 1 and not pool.tables
        assert len(served.worker.eviction.table) == 0
    assert sum(bool(lines) for lines in run.trace.values()) == 4
    checks.pool(run)
    checks.attended(run)


@pytest.mark.parametrize("policy", POLICIES)
def test_penalties_and_bias(engine, policy):
    """They are computed from what was said, holes or not: same tokens as from the oracle's logits by the formula."""
    bias = {5: 3.0, 9: -2.0}
    sampling = {"presence_penalty": 0.7, "frequency_penalty": 0.3, "repetition_penalty": 1.2, "logit_bias": bias}
    with engine(eviction=BUDGET | {"policy": policy}) as served:
        served.begin()
        served.add("a", PROMPT, max_tokens=2 * P, num_logits=-1, sampling=sampling)
        run = served.drain()
    for check in SAMPLED:
        check(run)
    answer = run.answers["a"]
    reference = run.reference("a", 0).logits
    for index, token in enumerate(answer.tokens):
        logits = reference[len(PROMPT) - 1 + index].clone()
        for biased, value in bias.items():
            logits[biased] += value
        said = torch.tensor(answer.tokens[:index], dtype=torch.long)
        counts = torch.bincount(said, minlength=len(logits))
        seen = (counts > 0) | (torch.bincount(torch.tensor(PROMPT), minlength=len(logits)) > 0)
        logits = torch.where(seen, torch.where(logits > 0, logits / 1.2, logits * 1.2), logits)
        logits -= 0.3 * counts + 0.7 * (counts > 0)
        assert logits.max() - logits[token] <= 4 * checks.LOGIT_TOLERANCE, index


@pytest.mark.parametrize("policy", POLICIES)
def test_logprobs_are_those_of_the_masked_forward(engine, policy):
    """Normalised, with the rank of the token said, as the API returns them; and of the prompt (C41)."""
    prompt = random_prompt(8 * P + 3, seed=4)
    with engine(eviction={"policy": policy, "budget": 3 * P}, chunk_tokens=P, logprobs_mode="raw_logprobs") as served:
        served.begin()
        served.add("a", prompt, max_tokens=P, num_logits=5, prompt_logits=True)
        run = served.drain()
    reference = run.reference("a", 0).logits.log_softmax(-1)
    answer = run.answers["a"]
    expected = reference[len(prompt) - 1 : -1].gather(1, answer.logit_tokens)
    torch.testing.assert_close(answer.logits, expected, atol=1e-4, rtol=0)
    torch.testing.assert_close(answer.prompt_logits, reference[: len(prompt) - 1], atol=1e-4, rtol=0)
    assert [int(tokens[0]) for tokens in answer.logit_tokens] == list(answer.tokens)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_stop_string_across_an_eviction(speaking, policy):
    """C27: it begins before a page goes and ends after; the answer ends where it begins."""
    prompt = random_prompt(3 * P + 11, seed=2)
    with speaking(eviction=BUDGET | {"policy": policy}) as served:
        served.begin()
        served.add("full", prompt, max_tokens=3 * P + 1, sampling={"detokenize": True})
        full = served.drain()
        tokens = full.answers["full"].tokens
        assert len(tokens) == 3 * P + 1 and full.answers["full"].finish_reason == "length"
        # The token of the step that evicts; `text` up to it, and the stop string around it.
        at = full.lines("full")[1].num_computed_tokens - len(prompt)
        decode = served.llm.get_tokenizer().decode
        text = full.answers["full"].text
        assert text == decode(tokens)
        stop = text[len(decode(tokens[: at - 4])) : len(decode(tokens[: at + 4]))]
        assert text.index(stop) == len(decode(tokens[: at - 4])), "it is said earlier, too: take another seed"
        served.begin()
        served.add("cut", prompt, max_tokens=3 * P + 1, sampling={"detokenize": True, "stop": [stop]})
        cut = served.drain()
        pool = served.snapshot()
    answer = cut.answers["cut"]
    assert answer.finish_reason == "stop" and answer.text == text[: text.index(stop)]
    assert answer.tokens == tokens[: len(answer.tokens)] and at < len(answer.tokens) <= at + 4
    assert len(pool.free) == pool.num_blocks - 1
    for run in (full, cut):
        for check in checks.ALWAYS:
            check(run)
