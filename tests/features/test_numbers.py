"""What vLLM itself counts and says beside eviction: usage, capacity, hits, residency; positions; sizes and times."""

from __future__ import annotations

import itertools
import json
import math
from time import process_time

import numpy as np
import pytest
import torch

from tests.engine import checks
from tests.engine.harness import PAGE_TOKENS as P
from tests.engine.harness import random_prompt
from vllm_evict.config import EvictionConfigError

POLICIES = ["streaming", "h2o"]


def held(pool) -> int:
    """Blocks that a table names."""
    return len({block for table in pool.tables.values() for block in table if block is not None})


@pytest.mark.parametrize("policy", POLICIES)
def test_usage_is_held_by_usable_in_every_step(engine, policy):
    """C35: the gauge falls when pages go and is zero at the end of 20 requests; counter and trace agree."""
    prompts = {f"r{n}": random_prompt(1 + (37 * n) % (7 * P), seed=n) for n in range(20)}
    with engine(eviction={"policy": policy, "budget": 3 * P}, num_pages=60, disable_log_stats=False) as served:
        served.begin()
        for name, prompt in prompts.items():
            served.add(name, prompt, max_tokens=P)
        usages = []
        while served.busy:
            step = served.step()
            usages.append(served.scheduler.make_stats().kv_cache_usage)
            assert usages[-1] == pytest.approx(held(step.settled) / (60 - 1))
            assert len(usages) < 2_000
        run = served.end()
        assert served.scheduler.make_stats().kv_cache_usage == 0
        evicted = sum(len(line.pages) for lines in run.trace.values() for line in lines)
        assert served.manager.stats.num_evicted_pages == evicted > 20
    fell = [n for n, (before, after) in enumerate(itertools.pairwise(usages)) if after < before]
    finishing = {max(n for n, step in enumerate(run.steps) if name in step.rows) for name in prompts}
    assert [n for n in fell if n + 1 not in finishing and n not in finishing]  # it fell though nobody had finished
    checks.pool(run)


def test_capacity_that_vllm_reports_is_the_prefill_bound(engine):
    """C36: vLLM's own line divides the pool by what one request may need: budget 6 + chunk 2 + 1."""
    from vllm.v1.core.kv_cache_utils import get_max_concurrency_for_kv_cache_config

    eviction = {"policy": "streaming", "budget": 6 * P}
    with engine(eviction=eviction, num_pages=60, max_model_len=64 * P) as served:
        config, kv_cache_config = served.core.vllm_config, served.runner.kv_cache_config
        concurrency = get_max_concurrency_for_kv_cache_config(config, kv_cache_config)
        assert concurrency == pytest.approx(60 / 9)
        # The line of ours says 59 / 7 = 8.43 while decoding. Eight do run.
        prompts = {f"r{n}": random_prompt(P - n, seed=n) for n in range(8)}
        run = served.run(prompts, max_tokens=9 * P)
    assert not any(step.preempted for step in run.steps)
    assert any(len(step.rows) == 8 and min(len(row.table) for row in step.rows.values()) > 8 for step in run.steps)
    for check in checks.ALWAYS:
        check(run)


@pytest.mark.parametrize("policy", POLICIES)
def test_recomputed_tokens_are_no_hits(engine, policy):
    """C62: random prompts, preemptions: no hits; what is computed again is counted by itself."""
    with engine(eviction={"policy": policy, "budget": 3 * P}, num_pages=40, disable_log_stats=False) as served:
        seen = []
        make_stats = served.scheduler.make_stats

        def make_and_see_stats(*args, **kwargs):
            seen.append(make_stats(*args, **kwargs).prefix_cache_stats)
            return make_stats(*args, **kwargs)

        served.scheduler.make_stats = make_and_see_stats
        served.begin()
        for n in range(4):
            served.add(f"r{n}", random_prompt(5 * P + n, seed=n), max_tokens=2 * P)
        for number in range(2_000):
            if not served.busy:
                break
            if number in (12, 40):
                served.scheduler.reset_prefix_cache(reset_running_requests=True)
            elif number == 55:
                for request in list(served.scheduler.running):
                    served.scheduler.running.remove(request)
                    served.scheduler._preempt_request(request, 0.0)
            served.step()
        run = served.end()
    queries, again, found_again = (
        sum(getattr(stats, name) for stats in seen) for name in ("queries", "preempted_queries", "preempted_hits")
    )
    assert queries == sum(5 * P + n for n in range(4)) and not any(stats.hits for stats in seen)
    assert again > 2 * queries
    cached = sum(
        run.rows_of_epoch(name, epoch)[0].num_cached_tokens for name in run.answers for epoch in run.epochs(name)[1:]
    )
    assert found_again == cached > 0
    for check in checks.ALWAYS:
        check(run)


@pytest.mark.parametrize("policy", POLICIES)
def test_whoever_looks_at_specs_and_blocks_copes_with_ours(engine, policy):
    """C46: vLLM's residency metrics, statistics and logging watch the pool, and nothing asserts."""
    options = {
        "disable_log_stats": False,
        "kv_cache_metrics": True,
        "kv_cache_metrics_sample": 1.0,
        "enable_mfu_metrics": True,
        "enable_logging_iteration_details": True,
    }
    with engine(eviction={"policy": policy, "budget": 3 * P}, num_pages=30, max_model_len=32 * P, **options) as served:
        prompts = {f"r{n}": random_prompt(6 * P + n, seed=n) for n in range(4)}
        run = served.run(prompts, max_tokens=2 * P)
        metrics = {metric.name for metric in served.llm.get_metrics()}
        assert "vllm:kv_cache_usage_perc" in metrics
    for check in checks.ALWAYS:
        check(run)


@pytest.mark.parametrize("backend", ["TRITON_ATTN", "FLEX_ATTENTION", "CPU_ATTN"])
def test_scores_come_whatever_backend_is_asked_for(engine, backend):
    """C17: on CPU vLLM falls back to its CPU kernel; scores are then its scores, and not none."""
    eviction = {"policy": "h2o", "budget": 3 * P, "score_every": 1}
    with engine(eviction=eviction, attention_backend=backend) as served:
        run = served.run({"a": random_prompt(6 * P, seed=1)}, max_tokens=P)
    checks.masses(run)
    assert any(not math.isnan(score) for line in run.lines("a") for score in line.score_of().values())


# ---- positions ----


@pytest.fixture
def short_model(models, tmp_path):
    """`tiny`, whose positions end at 256."""
    path = models("tiny")
    for file in path.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 8 * P}))
    return tmp_path


def test_the_answer_ends_where_positions_end(engine, short_model):
    """C37: eviction keeps original positions, so it does not stretch the model."""
    with engine(short_model, eviction={"policy": "streaming", "budget": 3 * P}, max_model_len=8 * P) as served:
        run = served.run({"a": random_prompt(5 * P, seed=1)}, max_tokens=1_000)
    assert len(run.answers["a"].tokens) == 3 * P and run.answers["a"].finish_reason == "length"
    assert run.rows("a")[-1].positions[-1] == 8 * P - 2
    for check in checks.ALWAYS:
        check(run)


def test_a_length_beyond_the_positions_is_refused(engine, short_model, monkeypatch):
    """C37: vLLM itself refuses it; with the variable that allows it, we do."""
    eviction = {"policy": "streaming", "budget": 3 * P}
    with pytest.raises(ValueError, match="greater than the derived max_model_len"):
        engine(short_model, eviction=eviction, max_model_len=16 * P)
    monkeypatch.setenv("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "1")
    with pytest.raises(EvictionConfigError, match="longer than the model was made for"):
        engine(short_model, eviction=eviction, max_model_len=16 * P)


# ---- sizes ----


@pytest.mark.parametrize("policy", POLICIES)
def test_a_page_larger_than_the_window(engine, policy):
    """C25: pages of 128 tokens, sink 4, recent 32, the smallest budget: two pages; 300 tokens in, 300 out."""
    eviction = {"policy": policy, "budget": 256, "sink": 4, "recent": 32}
    with engine(eviction=eviction, page_tokens=128, num_pages=20, chunk_tokens=128, max_model_len=1024) as served:
        run = served.run({"a": random_prompt(300, seed=1)}, max_tokens=300)
    for check in checks.ALWAYS:
        check(run)
    decoding = [len(row.attended) for row in run.rows("a") if row.num_scheduled_tokens == 1]
    assert set(decoding) == {2, 3} and decoding.count(3) <= 3
    newest = [row.table[-1] for row in run.rows("a")]
    assert None not in newest


@pytest.mark.parametrize("policy", POLICIES)
def test_64_equal_requests_cross_the_budget_in_one_step(engine, policy):
    """C56: 64 trims in a step cost less than the step; CPU time, since others share the machine."""
    prompts = {f"r{n}": random_prompt(P, seed=n) for n in range(64)}
    eviction = {"policy": policy, "budget": 3 * P}
    best = np.inf
    with engine(eviction=eviction, num_pages=400, chunk_tokens=64 * P, max_num_seqs=64) as served:
        do_not_look(served)
        for attempt in range(2):
            served.begin()
            for name, prompt in prompts.items():
                served.add(f"{name}-{attempt}", prompt, max_tokens=3 * P + 8, num_logits=1)
            times = []
            while served.busy:
                started = process_time()
                served.llm.llm_engine.step()
                times.append(process_time() - started)
                assert len(times) < 1_000
            run = served.end()
            decoding = times[1:]
            best = min(best, np.quantile(decoding, 0.99) / np.median(decoding))
    crossing = [lines[0].num_computed_tokens for name, lines in run.trace.items() if name.endswith("-1")]
    assert crossing == [3 * P + 1] * 64
    assert best <= 2.0, best


def do_not_look(served) -> None:
    """Take the harness's own watching, which costs more than the step, out of the engine."""
    del served.scheduler.schedule, served.pool.get_new_blocks
    served._hook.remove()


def test_scores_of_a_long_answer_do_not_grow(engine):
    """C32: what the worker keeps per request is as large after 20 pages as after 6."""
    with engine(eviction={"policy": "h2o", "budget": 4 * P}) as served:
        served.begin()
        served.add("a", random_prompt(P, seed=1), max_tokens=21 * P, num_logits=1)
        request_id = served.request_id("a")
        sizes = {}
        for number in range(20 * P):
            served.step()
            if number // P in (6, 19):
                sizes.setdefault(number // P, set()).add(tensors_in(served.worker.eviction.table[request_id]))
        served.abort("a")
        served.end()
    assert sizes[6] == sizes[19]


def tensors_in(value: object, depth: int = 0) -> int:
    """Bytes of every array reachable in a few steps."""
    if isinstance(value, np.ndarray):
        return value.nbytes
    if isinstance(value, torch.Tensor):
        return value.nbytes
    if depth < 4 and hasattr(value, "__dict__"):
        return sum(tensors_in(part, depth + 1) for part in vars(value).values())
    return 0
