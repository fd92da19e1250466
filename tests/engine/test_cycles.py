"""C29 and invariant 11: hundreds of evictions in one answer; nothing drifts, and the kept set never freezes."""

from __future__ import annotations

import json

import pytest

from tests.engine import checks
from tests.engine.harness import PAGE_TOKENS as P
from tests.engine.harness import Run, random_prompt

H2O = {"policy": "h2o", "budget": 3 * P, "recent": P}
STREAMING = {"policy": "streaming", "budget": 3 * P}


def long_answer(engine, model, eviction, num_pages: int) -> Run:
    prompts = {"a": random_prompt(P + 5, seed=1), "b": random_prompt(2 * P, seed=2)}
    with engine(model, eviction=eviction, max_model_len=(num_pages + 8) * P, num_pages=num_pages + 9) as served:
        return served.run(prompts, max_tokens={"a": num_pages * P, "b": num_pages * P // 2}, num_logits=8)


def no_drift(run: Run) -> None:
    """From the first eviction on every request holds 3 or 4 pages, whatever its length."""
    for name in run.answers:
        held = [len(row.attended) for row in run.rows(name)[3 * P :]]
        assert set(held) == {3, 4}
        assert held.count(4) <= len(held) // P + 1  # a fourth one only in the step that opens it


@pytest.mark.parametrize("model", ["tiny", "tiny-partial-rotary"])
@pytest.mark.parametrize("eviction", [STREAMING, H2O], ids=["streaming", "h2o"])
def test_many_cycles(engine, model, eviction):
    run = long_answer(engine, model, eviction, num_pages=16)
    assert sum(len(line.pages) for line in run.lines("a")) == 16 + 2 - 3  # 17 pages and 4 tokens were computed
    for check in checks.ALWAYS:
        check(run)
    no_drift(run)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["tiny", "tiny-partial-rotary"])
@pytest.mark.parametrize("eviction", [STREAMING, H2O], ids=["streaming", "h2o"])
def test_two_hundred_pages(engine, models, tmp_path, model, eviction):
    """The models end at 4096 positions; rotation goes on, so only the config needs to say more."""
    path = models(model)
    for file in path.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 8192}))
    run = long_answer(engine, tmp_path, eviction, num_pages=200)
    for check in checks.ALWAYS if eviction is STREAMING else checks.QUIET:  # masses of 6400 tokens fill 5 GB
        check(run)
    no_drift(run)


def test_kept_set_keeps_changing(engine):
    """Beside sink and recent pages two old pages are kept. To the end of 30 pages, others take their places."""
    eviction = {"policy": "h2o", "budget": 5 * P, "recent": 2 * P, "score_every": 1}
    with engine(eviction=eviction) as served:
        run = served.run({"a": random_prompt(P, seed=1)}, max_tokens=29 * P, num_logits=4)
    checks.choices(run)
    replaced = []  # evictions in which a page that had been kept before made room for a younger one
    for before, line in zip(run.lines("a"), run.lines("a")[1:], strict=False):
        kept_before = set(before.resident) - set(before.pages)
        old = {page for page in kept_before if page <= max(before.resident) - 2}
        replaced.append(bool(old & set(line.pages)))
    third = len(replaced) // 3
    assert [sum(replaced[:third]) > 0, sum(replaced[third : 2 * third]) > 0, sum(replaced[2 * third :]) > 0] == [
        True
    ] * 3
