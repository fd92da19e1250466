"""Invariant 1, off is off: no flag, `none`, nothing to evict, and a budget never reached are all vLLM as it is."""

from __future__ import annotations

import pytest

from tests.engine import checks
from tests.engine.harness import PAGE_TOKENS as P
from tests.engine.harness import Run, random_prompt

SETTINGS = {
    "absent": None,
    "none": {"policy": "none"},
    "keep-all": {"policy": "keep-all"},
    "streaming": {"policy": "streaming", "budget": 16 * P},
    "h2o": {"policy": "h2o", "budget": 16 * P},
}
PROMPTS = {n: random_prompt(n, seed=n) for n in (1, P - 1, P, P + 1, 5 * P + 3, 9 * P)}


@pytest.fixture(scope="module")
def runs(engine) -> dict[str, tuple[Run, dict[str, object]]]:
    runs = {}
    for name, eviction in SETTINGS.items():
        with engine(eviction=eviction, num_pages=None) as served:
            prompts = {f"length-{n}": prompt for n, prompt in PROMPTS.items()}
            prompts["again"] = PROMPTS[9 * P] + random_prompt(3, seed=3)  # hits the prefix cache
            run = served.run(prompts, max_tokens=3 * P, arrive_at={"again": 40})
            facts = {
                "pool": served.pool.num_gpu_blocks,
                "scheduler": type(served.scheduler).__module__,
                "worker": type(served.worker).__module__,
                "manager": type(served.manager).__module__,
                "backends": {type(layer.impl).__module__ for layer in _attention_layers(served)},
            }
        runs[name] = run, facts
    return runs


def _attention_layers(served):
    context = served.core.vllm_config.compilation_config.static_forward_context
    return [layer for layer in context.values() if hasattr(layer, "impl")]


@pytest.mark.parametrize("name", SETTINGS)
def test_answers_are_those_of_the_plain_model(runs, name):
    run, _ = runs[name]
    assert not any(run.trace.values())
    checks.logits(run)
    checks.greedy_tokens(run)


@pytest.mark.parametrize("name", SETTINGS)
def test_same_blocks_in_every_step(runs, name):
    """The pool is as large, and every request gets the very blocks that vLLM alone gives it."""
    (run, facts), (plain, plain_facts) = runs[name], runs["absent"]
    assert facts["pool"] == plain_facts["pool"] > 64
    assert len(run.steps) == len(plain.steps)
    for step, plain_step in zip(run.steps, plain.steps, strict=True):
        assert {n: row.table for n, row in step.rows.items()} == {n: row.table for n, row in plain_step.rows.items()}
        assert len(step.settled.free) == len(plain_step.settled.free)
    checks.pool(run)
    assert {name: answer.tokens for name, answer in run.answers.items()} == {
        name: answer.tokens for name, answer in plain.answers.items()
    }
    assert run.rows("again")[0].num_cached_tokens == 9 * P


@pytest.mark.parametrize("name", SETTINGS)
def test_our_classes_run_only_when_asked(runs, name):
    _, facts = runs[name]
    off = name in ("absent", "none")
    for role in ("scheduler", "worker", "manager"):
        assert facts[role].startswith("vllm." if off else "vllm_evict."), facts
    assert all(module.startswith("vllm." if off else "vllm_evict.") for module in facts["backends"])


def test_page_size_is_vllms_own_without_the_flag(engine):
    """On CPU 128, and 32 as soon as eviction is on and the user named none."""
    for eviction, expected in ((None, 128), ({"policy": "streaming", "budget": 256}, 32)):
        with engine(eviction=eviction, block_size=None) as served:
            assert served.manager.block_size == expected
