"""How many pages: the minimum, the bound said three times, chunks larger than the budget, a tight pool."""

from __future__ import annotations

import logging
import re

import pytest
import torch

from tests.engine import checks
from tests.engine.harness import PAGE_TOKENS as P
from tests.engine.harness import random_prompt


@pytest.fixture
def startup_line():
    """`startup_line()`: the line that the last engine logged about eviction."""
    lines = []
    handler = logging.Handler(logging.INFO)
    handler.emit = lambda record: lines.append(record.getMessage())
    logger = logging.getLogger("vllm")
    logger.addHandler(handler)
    yield lambda: [line for line in lines if line.startswith("KV eviction")][-1]
    logger.removeHandler(handler)


def said_bounds(line: str) -> tuple[int, int]:
    """Pages per request that the start-up line promises: decoding, in prefill."""
    decoding, prefill = re.search(r"at most (\d+) pages decoding, (\d+) in prefill", line).groups()
    return int(decoding), int(prefill)


# ---- C12: a chunk larger than the budget ----


@pytest.mark.parametrize("policy", ["streaming", "h2o"])
def test_chunk_larger_than_the_budget(engine, policy):
    """Evict after attention: the first token of a prompt taken in one chunk is that of an engine that never evicts."""
    length = 12 * P + 5
    with engine(eviction={"policy": policy, "budget": 3 * P}, chunk_tokens=length + 8) as served:
        for chunk in (P, 2 * P, 5 * P, length):
            served.chunk_tokens = chunk
            prompt = random_prompt(length, seed=chunk)
            run = served.run({f"chunk-{chunk}": prompt}, max_tokens=P)
            for check in checks.ALWAYS:
                check(run)
            answer = run.answers[f"chunk-{chunk}"]
            full = run.reference(f"chunk-{chunk}", epoch=-1).logits[length - 1]  # no such epoch: nothing evicted
            error = (answer.logits[0] - full[answer.logit_tokens[0]]).abs().max()
            first_eviction = run.trace[f"chunk-{chunk}"][0].num_computed_tokens
            if chunk == length:
                assert first_eviction == length and error <= checks.LOGIT_TOLERANCE
            else:
                assert first_eviction < length and error > 100 * checks.LOGIT_TOLERANCE
            assert max(len(row.attended) for row in run.rows(f"chunk-{chunk}")) == min(3 + -(-chunk // P), 13)

        # The same prefill beside four decodes, which evict while it is swallowed whole.
        served.chunk_tokens = length + 4
        prompts = {f"decode-{n}": random_prompt(3 * P + n, seed=n) for n in range(4)} | {
            "prefill": random_prompt(length, seed=9)
        }
        run = served.run(prompts, max_tokens=3 * P, arrive_at={"prefill": P})
        assert any(len(step.rows) == 5 and step.rows["prefill"].num_scheduled_tokens == length for step in run.steps)
        for check in checks.ALWAYS:
            check(run)


# ---- the minimum ----


@pytest.mark.parametrize(
    ("policy", "sink"), [("streaming", 0), ("streaming", 4), ("h2o", 0), ("h2o", 4), ("random", 4)]
)
def test_minimum_budget_works(engine, policy, sink):
    """Sinks and one recent page: without sinks a budget of one page, the one being written."""
    budget = P if sink == 0 else 2 * P
    eviction = {"policy": policy, "budget": budget, "sink": sink}
    with engine(eviction=eviction, chunk_tokens=P) as served:
        run = served.run({"a": random_prompt(3 * P + 5, seed=3), "b": random_prompt(P, seed=4)}, max_tokens=3 * P)
    for check in checks.ALWAYS:
        check(run)
    kept = {page for line in run.lines("a")[-1:] for page in set(line.resident) - set(line.pages)}
    newest = (run.lines("a")[-1].num_computed_tokens - 1) // P
    assert kept == ({newest} if sink == 0 else {0, newest})


def test_below_the_minimum_says_the_number(engine):
    """One line, naming what was asked and what is needed; before weights load, so it is quick."""
    with pytest.raises(ValueError, match=rf"--kv-eviction-budget {P} is too small.*at least {2 * P}"):
        engine(eviction={"policy": "h2o", "budget": P})
    with pytest.raises(ValueError, match=rf"--kv-eviction-budget {4 * P}.*at least {5 * P}"):
        engine(eviction={"policy": "streaming", "budget": 4 * P, "sink": 2 * P, "recent": 3 * P})


def test_pool_smaller_than_one_request_says_the_number(engine):
    """Budget 4 + chunk 2 + 1 = 7 pages and the null block: 8 do, 7 do not."""
    eviction = {"policy": "streaming", "budget": 4 * P}
    with engine(eviction=eviction, num_pages=8, max_model_len=16 * P, chunk_tokens=2 * P) as served:
        run = served.run({"a": random_prompt(12 * P, seed=1)}, max_tokens=2 * P)
    checks.logits(run)
    with pytest.raises(ValueError, match="KV cache"):
        engine(eviction=eviction, num_pages=7, max_model_len=16 * P, chunk_tokens=2 * P)


# ---- C10: sizing, admission and observation agree ----


@pytest.mark.parametrize("policy", ["streaming", "h2o"])
def test_long_prompt_in_a_small_pool(engine, startup_line, policy):
    """12 usable pages, a prompt of 40 pages and one of 1 page behind it: both are served, as the log promised."""
    eviction = {"policy": policy, "budget": 3 * P, "sink": P, "recent": 2 * P}
    with engine(eviction=eviction, num_pages=13, max_model_len=64 * P, chunk_tokens=2 * P, quiet=False) as served:
        prompts = {"long": random_prompt(40 * P, seed=1), "short": random_prompt(P, seed=2)}
        run = served.run(prompts, max_tokens={"long": 2 * P, "short": 2 * P})
        assert served.manager.max_admission_blocks_per_request == 6
    for check in checks.ALWAYS:
        check(run)
    assert not any(step.preempted for step in run.steps)
    assert any(len(step.rows) == 2 for step in run.steps)  # the short one did not wait for the end of the long one
    decoding, prefill = said_bounds(startup_line())
    assert (decoding, prefill) == (4, 6)
    peak = checks.bounds(run)
    assert prefill - 1 <= peak <= prefill
    assert max(sum(b is not None for b in r.table) for r in run.rows("long") if r.num_scheduled_tokens == 1) == decoding


# ---- C32: memory really falls ----


def test_eight_long_answers_where_two_would_fit(engine, startup_line):
    """8 answers of 9 pages, 5 pages each instead of 10, in a pool of 8 * 5."""
    tokens, pool = 9 * P, 8 * 5 + 1
    prompts = {f"r{n}": random_prompt(P // 2 + n, seed=n) for n in range(8)}
    with engine(eviction={"policy": "streaming", "budget": 4 * P}, num_pages=pool, quiet=False) as served:
        run = served.run(prompts, max_tokens=tokens)
    for check in checks.ALWAYS:
        check(run)
    assert not any(step.preempted for step in run.steps)
    held = [[sum(b is not None for b in row.table) for row in step.rows.values()] for step in run.steps]
    assert any(len(step) == 8 and min(step) >= 4 for step in held)
    assert checks.bounds(run) == 5 == said_bounds(startup_line())[0]

    with engine(num_pages=pool, max_model_len=32 * P) as served:
        plain = served.run(prompts, max_tokens=tokens)
    assert any(step.preempted for step in plain.steps)
    assert max(len(row.table) for name in prompts for row in plain.rows(name)) == 10


# ---- whoever sits out is trimmed too ----


@pytest.mark.parametrize("policy", ["streaming", "h2o"])
def test_unscheduled_request_is_trimmed(engine, policy):
    with engine(eviction={"policy": policy, "budget": 3 * P}, chunk_tokens=6 * P) as served:
        prompts = {"first": random_prompt(P, seed=1), "second": random_prompt(11 * P, seed=2)}

        def starve(step):
            # The second one has just taken a chunk of nearly six pages; now there is room for the first one only.
            served.chunk_tokens = 1 if step in (2, 3) else 6 * P

        run = served.run(prompts, max_tokens=P, before_step=starve)
    assert {name for step in run.steps[2:4] for name in step.rows} == {"first"}
    assert sum(block is not None for block in run.steps[1].scheduled.tables["second"]) > 4
    assert checks.unscheduled_are_trimmed(run) == 2
    for check in (checks.logits, checks.greedy_tokens, checks.pool, checks.attended, checks.choices):
        check(run)


def test_same_bound_in_the_spec(engine):
    """Start-up sizing asks for the bytes of the bound: layers * bound * bytes of a page."""
    with engine(eviction={"policy": "streaming", "budget": 4 * P}, chunk_tokens=3 * P, max_model_len=64 * P) as served:
        config = served.core.vllm_config
        (group,) = served.runner.kv_cache_config.kv_cache_groups
        bytes_per_page = 2 * 2 * 64 * P * torch.float32.itemsize  # K and V, KV heads, head size
        assert group.kv_cache_spec.max_memory_usage_bytes(config) == (4 + 3 + 1) * bytes_per_page
        assert served.manager.max_admission_blocks_per_request == 4 + 3 + 1
