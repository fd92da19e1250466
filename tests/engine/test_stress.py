"""Random traffic, seeded: shared prefixes, late arrivals, aborts, preemptions, canaries in a pool that is too small."""

from __future__ import annotations

import random

import pytest

from tests.engine import checks
from tests.engine.canary import null_page_is_untouched, release_canaries
from tests.engine.harness import PAGE_TOKENS as P
from tests.engine.harness import random_prompt


def traffic(rng: random.Random, num_requests: int) -> tuple[dict[str, list[int]], dict[str, int], dict[str, int]]:
    """Prompts, output lengths and arrival steps; half of the prompts begin like another one."""
    prompts: dict[str, list[int]] = {}
    for n in range(num_requests):
        prompt = random_prompt(rng.choice([1, 5, P - 1, P, P + 1, rng.randrange(1, 9 * P)]), seed=rng.randrange(2**31))
        if prompts and rng.random() < 0.5:
            other = rng.choice(list(prompts.values()))
            prompt = other[: rng.randrange(len(other) + 1)] + prompt
        prompts[f"r{n}"] = prompt[: 12 * P]
    tokens = {name: rng.choice([1, 2, rng.randrange(1, 4 * P)]) for name in prompts}
    arrivals = {name: rng.randrange(60) for name in prompts}
    return prompts, tokens, arrivals


def settings(rng: random.Random) -> dict[str, object]:
    budget = rng.randrange(2, 6)
    eviction: dict[str, object] = {"policy": rng.choice(["streaming", "h2o", "h2o", "random"]), "budget": budget * P}
    if eviction["policy"] == "h2o":
        eviction["score"] = rng.choice(["distant-mean", "sum", "mean", "ema"])
        eviction["prefill_queries"] = rng.choice(["all", 0, 3, 64])
        eviction["score_every"] = rng.choice([1, 2, 5])
    if rng.random() < 0.3:
        eviction["sink"] = 0
    return eviction


def stress(engine, seed: int, num_requests: int) -> None:
    rng = random.Random(seed)
    eviction, chunk_tokens = settings(rng), rng.choice([P, P + 5, 3 * P, 13 * P])
    least = eviction["budget"] // P + -(-chunk_tokens // P) + 2  # one request must fit, and the null page
    prompts, tokens, arrivals = traffic(rng, num_requests)
    aborts = {rng.randrange(120): name for name in rng.sample(sorted(prompts), num_requests // 5)}
    resets = {rng.randrange(150) for _ in range(2)}
    with engine(
        eviction=eviction,
        chunk_tokens=chunk_tokens,
        num_pages=min(least, 22) + rng.randrange(12),
        max_model_len=20 * P,
        max_num_seqs=rng.choice([3, 8, 16]),
        prefix_caching=rng.random() < 0.7,
    ) as served:
        release_canaries(served)
        aborted = set()

        def disturb(step: int) -> None:
            name = aborts.get(step)
            if name is not None and arrivals[name] <= step:
                aborted.add(name)
                served.abort(name)
            if step in resets:
                served.scheduler.reset_prefix_cache(reset_running_requests=True)

        run = served.run(prompts, max_tokens=tokens, arrive_at=arrivals, before_step=disturb)
        end = served.snapshot()
        assert null_page_is_untouched(served)
    assert len(end.free) == end.num_blocks - 1 and not end.tables
    run.answers = {name: answer for name, answer in run.answers.items() if answer.finish_reason == "length"}
    assert set(run.answers) >= set(prompts) - aborted
    for check in checks.ALWAYS if any(run.trace.get(name) for name in run.answers) else checks.QUIET:
        check(run)
    if eviction["policy"] == "h2o" and any(run.trace.get(name) for name in run.answers):
        checks.masses(run)


@pytest.mark.parametrize("seed", range(4))
def test_random_traffic(engine, seed):
    stress(engine, seed, num_requests=14)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 124))
def test_much_random_traffic(engine, seed):
    stress(engine, seed, num_requests=40)
