"""Capability 5: hybrid models, the layout of Gemma 3 (five sliding layers to a full one, one KV head of size 256)."""

from __future__ import annotations

import pytest

from tests.engine import checks
from tests.engine.harness import PAGE_TOKENS as P
from tests.engine.harness import Run, random_prompt
from tests.models.kinds import tiny_gemma

# The other groups share the pool, whose pages no table of ours names.
HYBRID = tuple(check for check in checks.ALWAYS if check not in (checks.pool, checks.written_once))


def windows_keep_their_rule(served, name: str, window_tokens: int) -> None:
    """Groups of sliding layers hold what vLLM's window leaves them; only the evicting group has holes elsewhere."""
    managers = served.scheduler.kv_cache_manager.coordinator.single_type_managers
    request_id = served.request_id(name)
    for manager in managers:
        blocks = manager.req_to_blocks[request_id]
        held = [page for page, block in enumerate(blocks) if not block.is_null]
        if manager is served.manager:
            assert held[0] == 0 and held != list(range(held[0], len(blocks)))
        else:
            assert held == list(range(held[0], len(blocks)))
            assert len(held) <= window_tokens // P + 2


@pytest.mark.parametrize("policy", ["streaming", "h2o"])
def test_a_random_one(engine, tmp_path, policy):
    prompts = {"a": random_prompt(9 * P + 3, seed=1), "b": random_prompt(P, seed=2)}
    with engine(tiny_gemma(tmp_path), eviction={"policy": policy, "budget": 4 * P}, num_pages=300) as served:
        served.begin()
        for name, prompt in prompts.items():
            served.add(name, prompt, max_tokens=5 * P)
        for _ in range(4 * P):
            served.step()
        windows_keep_their_rule(served, "a", window_tokens=2 * P)
        run = served.drain()
        kinds = [type(group.kv_cache_spec).__name__ for group in served.runner.kv_cache_config.kv_cache_groups]
        assert sorted(kinds) == ["EvictingAttentionSpec", *["SlidingWindowSpec"] * 5]
    for check in HYBRID:
        check(run)
    if policy == "h2o":
        checks.masses(run)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["streaming", "h2o"])
def test_the_real_one(engine, policy):
    """Real weights, a page of a novel as prompt, in fp32 so that the oracle's tolerance holds."""
    from transformers import AutoTokenizer

    from tests.models.gemma import gemma_path
    from vllm_evict.bench.text import real_text

    path = gemma_path()
    prompt = AutoTokenizer.from_pretrained(path)(real_text()[:12_000])["input_ids"][:1500]
    with engine(path, eviction={"policy": policy, "budget": 16 * P}, num_pages=600, chunk_tokens=8 * P) as served:
        served.begin()
        served.add("a", prompt, max_tokens=2 * P, num_logits=50)
        for _ in range(P):
            served.step()
        windows_keep_their_rule(served, "a", window_tokens=512 + 8 * P)
        run: Run = served.drain()
    assert sum(len(line.pages) for line in run.lines("a")) > 25
    for check in HYBRID:
        if check not in (checks.logits, checks.choices):
            check(run)
    checks.logits(run, tolerance=5e-3)  # of logits up to 30, after 18 layers
    answer, reference = run.answers["a"], run.reference("a", 0).logits
    full = run.reference("a", -1).logits  # as if nothing had been evicted
    at = len(prompt) + P
    held_error = (answer.logits[P + 1] - reference[at][answer.logit_tokens[P + 1]]).abs().max()
    full_error = (answer.logits[P + 1] - full[at][answer.logit_tokens[P + 1]]).abs().max()
    assert held_error < 0.1 * full_error  # eviction did change what the model sees, and in the traced way
    checks.choices(run)
