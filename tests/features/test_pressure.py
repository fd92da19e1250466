"""Capability 4 in a pool that is too small: priorities, and streams across a preemption."""

from __future__ import annotations

from collections import defaultdict

import pytest

from tests.engine import checks
from tests.engine.harness import PAGE_TOKENS as P
from tests.engine.harness import Answer, random_prompt

POLICIES = ["streaming", "h2o"]


@pytest.mark.parametrize("policy", POLICIES)
def test_the_least_important_is_preempted_first(engine, policy):
    """Priority scheduling: four requests of five pages in a pool of 17; a smaller number is more important."""
    eviction = {"policy": policy, "budget": 4 * P}
    with engine(eviction=eviction, num_pages=18, max_model_len=32 * P, scheduling_policy="priority") as served:
        served.begin()
        for number, priority in enumerate((3, 1, 2, 0)):
            served.add(f"p{priority}", random_prompt(2 * P + number, seed=number), max_tokens=6 * P, priority=priority)
        run = served.drain()
    preempted = [name for step in run.steps for name in step.preempted]
    assert preempted and set(preempted) == {"p3"}
    for step in run.steps:
        if "p3" in step.preempted:
            assert set(step.rows) == {"p0", "p1", "p2"}
    ends = {name: max(n for n, step in enumerate(run.steps) if name in step.rows) for name in run.answers}
    assert max(ends, key=ends.get) == "p3"
    for check in checks.ALWAYS:
        check(run)


@pytest.mark.parametrize("policy", POLICIES)
def test_an_important_latecomer(engine, policy):
    """It does not push out those who run, but is the next one in; nobody is starved for good."""
    eviction = {"policy": policy, "budget": 4 * P}
    with engine(
        eviction=eviction, num_pages=20, max_model_len=32 * P, scheduling_policy="priority", max_num_seqs=2
    ) as served:
        served.begin()
        for number in range(4):
            served.add(f"r{number}", random_prompt(3 * P + number, seed=number), max_tokens=2 * P, priority=5)
        for _ in range(8):
            served.step()
        served.add("urgent", random_prompt(7 * P, seed=9), max_tokens=2 * P, priority=0)
        run = served.drain()
    starts = {name: min(n for n, step in enumerate(run.steps) if name in step.rows) for name in run.answers}
    assert sorted(starts, key=starts.get) == ["r0", "r1", "urgent", "r2", "r3"]
    for check in checks.ALWAYS:
        check(run)


OPTIONS = {
    "pages kept free": {"watermark": 0.2},
    "the first chunk decides": {"scheduler_reserve_full_isl": False},
    "fair shares of long prompts": {
        "long_prefill_token_threshold": P,
        "long_prefill_token_threshold_adaptive": True,
        "max_num_active_seqs": 3,
    },
}


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("policy", POLICIES)
def test_other_ways_to_admit(engine, policy, options):
    """Long and short prompts in a pool for two of the long; a pool kept partly free still serves the longest."""
    prompts = {f"r{n}": random_prompt(length, seed=n) for n, length in enumerate((14 * P, 9, 9 * P + 3, P, 6 * P))}
    eviction = {"policy": policy, "budget": 4 * P}
    with engine(eviction=eviction, num_pages=16, max_model_len=32 * P, **OPTIONS[options]) as served:
        run = served.run(prompts, max_tokens=2 * P, arrive_at={"r3": 5}, max_steps=2_000)
    for check in checks.ALWAYS:
        check(run)


@pytest.mark.parametrize("policy", POLICIES)
def test_what_was_streamed_stands(engine, policy):
    """Across preemptions every token is sent once, in order, and each is what its epoch's trace says."""
    from vllm.sampling_params import RequestOutputKind

    eviction = {"policy": policy, "budget": 4 * P}
    streamed = defaultdict(list)
    with engine(eviction=eviction, num_pages=17, max_model_len=32 * P) as served:
        served.begin()
        for number in range(5):
            prompt = random_prompt(2 * P + 7 * number, seed=number)
            served.add(f"r{number}", prompt, max_tokens=5 * P, sampling={"output_kind": RequestOutputKind.DELTA})
        step = served.llm.llm_engine.step

        def listen():
            outputs = step()
            for output in outputs:
                streamed[output.request_id].append(output.outputs[0].token_ids)
            return []  # parts of answers, of which the harness can make nothing

        served.llm.llm_engine.step = listen
        for number in range(171):
            if number in (90, 170):
                served.scheduler.reset_prefix_cache(reset_running_requests=True)
            served.step()
        run = served.drain()
    assert any(step.preempted for step in run.steps) and all(max(run.epochs(name)) >= 1 for name in streamed)
    for name, parts in streamed.items():
        assert all(len(part) <= 1 for part in parts)  # a token a step: nothing is said again after a preemption
        assert len([token for part in parts for token in part]) == 5 * P
        sampled = [row.num_tokens for row in run.rows(name) if row.samples]
        assert sampled == sorted(set(sampled))
    checks.pool(run)
    # Put together they are judged like any other answer.
    for name, parts in streamed.items():
        tokens = tuple(token for part in parts for token in part)
        prompt = tuple(random_prompt(2 * P + 7 * int(name[1:]), seed=int(name[1:])))
        run.answers[name] = Answer(prompt, tokens, None, None, "length")
    checks.greedy_tokens(run)
    checks.positions(run)
