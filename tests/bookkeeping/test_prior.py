"""A page that comes by a prefix hit brings the score that its last owner reported."""

import numpy as np
import pytest

from tests.bookkeeping.harness import PAGE_TOKENS as P
from tests.bookkeeping.harness import score_of

TEXT = list(range(12 * P))
ROOMY = {"budget": 14 * P, "sink": P, "recent": 2 * P}


def test_a_long_hit_keeps_what_its_owner_loved(bench):
    """The owner may keep all 12 pages and is scored; who hits them with a budget of 5 takes the best."""
    run = bench(policy="h2o", num_blocks=60, max_model_len=128, chunk_tokens=64, settings=ROOMY)
    run.add("owner", TEXT, 6 * P)
    run.run_until(lambda: "owner" in run.steps[-1].update.wanted)
    run.run()
    run.add("reader", [*TEXT, 1, 2, 3], 2, {"kv_eviction_budget": 5 * P})
    run.step()
    # The last page is never a hit; of the rest sink and window stay, and the best of the others.
    kept = [page for page in run.resident("reader") if page < 12]
    assert 0 in kept
    middle = [page for page in kept if 0 < page < 10]
    best = sorted(range(1, 10), key=lambda page: score_of("owner", page))[-len(middle) :]
    assert middle and sorted(middle) == sorted(best)
    run.run()


def test_without_a_report_a_hit_page_is_on_trial(bench):
    """Nobody was over budget, so nobody was scored: what is known is nothing, not zero."""
    run = bench(policy="h2o", num_blocks=60, max_model_len=128, chunk_tokens=64, settings=ROOMY)
    run.add("owner", TEXT[: 6 * P], 2)
    run.run()
    run.add("reader", [*TEXT[: 6 * P], 1], 2)
    run.step()
    assert run.manager._pages["reader"].scores is None
    run.run()


def test_what_is_not_known_does_not_replace_what_is(bench, monkeypatch):
    """A reader whose queries are not distant yet reports NaN: neither its own hit nor the next reader's forgets."""
    run = bench(policy="h2o", num_blocks=60, max_model_len=128, chunk_tokens=64, settings=ROOMY)
    run.add("owner", TEXT, 6 * P)
    run.run()

    def blind(request_id, epoch, scores=run.scores):
        report = scores(request_id, epoch)
        if request_id == "reader":
            report.signals["attention"] = np.full(len(report.pages), np.nan)
        return report

    def known():
        return (~np.isnan(run.manager._prior.recall(run.pool.blocks, ["attention"]).signals["attention"])).sum()

    before = known()
    monkeypatch.setattr(run, "scores", blind)
    run.add("reader", [*TEXT, 301, 302, 303], 20)
    run.run_until(lambda: run.manager._pages["reader"].scores.epoch == 0 and run.steps[-1].update.wanted)
    assert (~np.isnan(run.manager._pages["reader"].scores.signals["attention"])).sum() >= 8
    run.run()
    assert known() >= before


@pytest.mark.parametrize("how", ["reset", "overwritten"])
def test_a_score_goes_with_its_hash(bench, how):
    def known():
        recalled = run.manager._prior.recall(run.pool.blocks, ["attention"])
        return recalled is not None

    run = bench(policy="h2o", num_blocks=35, max_model_len=128, chunk_tokens=64, settings=ROOMY)
    run.add("owner", TEXT, 6 * P)
    run.run()
    assert known()
    if how == "reset":
        assert run.scheduler.reset_prefix_cache()
    else:
        for name in "abcd":  # of a length that nobody scores; together they take every page
            run.add(name, 10 * P, 1)
            run.run()
    assert not known()


def test_a_hit_of_another_policy_takes_what_is_known(bench):
    run = bench(
        policy="h2o-keydiff", num_blocks=60, max_model_len=128, chunk_tokens=64, settings=ROOMY | {"overrides": "any"}
    )
    run.add("owner", TEXT, 6 * P)
    run.run()
    run.add("reader", [*TEXT, 1], 2, {"kv_eviction": "h2o"})
    run.step()
    scores = run.manager._pages["reader"].scores
    assert set(scores.signals) == {"attention"} and (~np.isnan(scores.signals["attention"])).any()
    run.run()
