"""C40: the prefix cache is emptied, or the engine sleeps, while requests hold holes."""

from __future__ import annotations

import pytest

from tests.engine import checks
from tests.engine.harness import PAGE_TOKENS as P
from tests.engine.harness import Engine, Run, random_prompt

PROMPT = random_prompt(6 * P + 3, seed=1)
TOKENS = 4 * P


@pytest.fixture(params=["streaming", "h2o"])
def served(request, engine):
    with engine(eviction={"policy": request.param, "budget": 4 * P}) as served:
        yield served


def with_interruption(served: Engine, name: str, interrupt) -> Run:
    """Answer `PROMPT`; two pages into the answer `interrupt()`."""
    served.begin()
    served.add(name, PROMPT, max_tokens=TOKENS)
    for _ in range(4 + 2 * P):
        served.step()
    assert served.manager.req_to_blocks[served.request_id(name)][1].is_null
    interrupt()
    run = served.drain()
    for check in checks.ALWAYS:
        check(run)
    return run


def test_refused_while_somebody_runs_and_the_run_is_none_the_worse(served):
    """vLLM empties the cache only when nobody holds a page: holes of the running one do not count as pages."""
    quiet = with_interruption(served, "quiet", lambda: None)
    assert served.llm.llm_engine.reset_prefix_cache()
    said = []
    run = with_interruption(served, "busy", lambda: said.append(served.llm.llm_engine.reset_prefix_cache()))
    assert said == [False]
    assert run.answers["busy"].tokens == quiet.answers["quiet"].tokens
    assert run.epochs("busy") == [0]


def test_forced_while_somebody_runs(served):
    """The running one is preempted, computed anew without a hit, and satisfies the oracle in both lives."""
    engine_core = served.llm.llm_engine.engine_core
    said = []
    run = with_interruption(
        served, "a", lambda: said.append(engine_core.reset_prefix_cache(reset_running_requests=True))
    )
    assert said == [True] and run.epochs("a") == [0, 1]
    second = next(row for row in run.rows("a") if row.epoch == 1)
    assert second.num_cached_tokens == 0 and second.table.count(None) == 0
    assert not served.manager._pages


def test_after_a_reset_the_answer_is_that_of_a_cold_engine(served):
    """Hashes, holes and scores of the warm cache are gone: same tokens, same evictions, same scores."""
    cold = served.run({"cold": PROMPT}, max_tokens=TOKENS)
    warm = served.run({"warm": PROMPT}, max_tokens=TOKENS)
    assert warm.rows("warm")[0].num_cached_tokens > 0
    assert served.llm.llm_engine.reset_prefix_cache()
    assert not served.snapshot().hashed
    after = served.run({"after": PROMPT}, max_tokens=TOKENS)
    assert after.rows("after")[0].num_cached_tokens == 0
    assert after.answers["after"].tokens == cold.answers["cold"].tokens
    for mine, other in zip(after.lines("after"), cold.lines("cold"), strict=True):
        assert (mine.num_computed_tokens, mine.pages, repr(mine.scores)) == (
            other.num_computed_tokens,
            other.pages,
            repr(other.scores),
        )


@pytest.mark.parametrize("level", [0, 1])
def test_sleep_with_a_request_kept(served, level):
    """Level 0 stands still. Level 1 gives up the cache: the request is computed anew when the engine wakes.

    (On CPU vLLM keeps the memory at every level, so the books are tested here and not the loss of data.)
    """
    core = served.llm.llm_engine.engine_core

    def nap():
        core.sleep(level, mode="keep")
        for _ in range(3):
            assert served.step() is None or not served.step().rows
        core.wake_up()

    run = with_interruption(served, "a", nap)
    assert run.epochs("a") == ([0] if level == 0 else [0, 1])


def test_sleep_that_drops_everybody(served):
    """vLLM's default: who runs is aborted, the cache is emptied; the next answer is that of a cold engine."""
    cold = served.run({"cold": PROMPT}, max_tokens=TOKENS)
    served.begin()
    for number in range(3):
        served.add(f"dropped-{number}", [*PROMPT, number], max_tokens=TOKENS)
    for _ in range(9 + P):
        served.step()
    served.llm.sleep(level=1)
    assert not served.scheduler.requests
    for number in range(3):
        served.abort(f"dropped-{number}")  # in one process, vLLM 0.32 does not tell the front end
    served.llm.wake_up()
    nothing_is_remembered(served)
    served.end()
    again = served.run({"again": PROMPT}, max_tokens=TOKENS)
    assert again.rows("again")[0].num_cached_tokens == 0
    assert again.answers["again"].tokens == cold.answers["cold"].tokens


def nothing_is_remembered(served: Engine) -> None:
    """All pages free and unhashed, no state of any request."""
    pool = served.snapshot()
    checks.pool_state(pool)
    assert len(pool.free) == pool.num_blocks - 1 and not pool.hashed
    assert not served.manager._pages
