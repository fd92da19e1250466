"""Both model runners on Triton attention, under Triton's interpreter: judged as the CPU path is, by the eager oracle.

The page mass comes from our Triton kernels, holes and lengths reach vLLM's own Triton attention. Requests are few and
short, since the interpreter needs a tenth of a second per layer and step.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine import checks
from tests.engine.harness import Run, random_prompt
from tests.models.tiny import tiny
from tests.triton import children
from tests.triton.child import RUNNERS, Scenario

P = 16
BUDGET = {"budget": 4 * P, "sink": P, "recent": P}
POLICIES = {"streaming": {"policy": "streaming"}, "h2o": {"policy": "h2o"}, "h2o-keydiff": {"policy": "h2o-keydiff"}}
POLICIES["h2o fused"] = {"policy": "h2o", "score_kernel": "fused"}
PROMPTS = {"long": random_prompt(5 * P + 9, seed=1), "page": random_prompt(P, seed=2)}
PROMPTS["hit"] = PROMPTS["long"][: 3 * P] + random_prompt(7, seed=3)
SHORT_POOL = {name: random_prompt(P, seed=seed) for seed, name in enumerate(("page", "other", "third"))}
CASES = [
    ("V1", "streaming"),
    ("V1", "h2o"),
    ("V2", "streaming"),
    ("V2", "h2o"),
    ("V2", "h2o fused"),
    ("V2", "h2o-keydiff"),
    ("V2", "short pool"),
    ("V2", "rebase"),
    ("V2-async", "h2o"),
    ("V2-async", "short pool"),
    ("V2-async", "rebase"),
    ("V2-async", "streaming"),
    ("V2-async", "h2o-keydiff"),
    ("V1-graphs", "h2o"),
    ("V2-graphs", "streaming"),
    ("V2-graphs", "h2o"),
    ("V2-graphs", "h2o fused"),
    ("V2-async-graphs", "h2o-keydiff"),
    ("V2-async-graphs", "short pool"),
    ("V2-async-graphs", "rebase"),
]
LIMIT = 10 * P
STREAM = {"long": random_prompt(15 * P + 9, seed=4), "middle": random_prompt(9 * P, seed=5)}


def scenario(folder: Path, runner: str, case: str) -> Scenario:
    version, asynchronous, graphs = RUNNERS[runner]
    short, rebase = case == "short pool", case == "rebase"
    model = tiny(
        folder / ("short" if rebase else "model"), num_kv_heads=1, **({"max_positions": LIMIT} if rebase else {})
    )
    engine = {
        "model": model,
        "eviction": BUDGET | POLICIES.get(case, POLICIES["h2o"]) | ({"positions": "rebase"} if rebase else {}),
        "trace": folder / f"{runner}-{case}.jsonl",
        "page_tokens": P,
        "chunk_tokens": 2 * P,
        "num_pages": 11 if short else 64,
        "max_model_len": 512,
        "max_num_seqs": 4,
    }
    if case == "h2o fused":
        engine["attention_backend"] = "TRITON_ATTN"
    if short:
        run = {"prompts": SHORT_POOL, "max_tokens": 4 * P + 5, "num_logits": -1}
    elif rebase:
        run = {"prompts": STREAM, "max_tokens": {"long": 6, "middle": P + 6}, "num_logits": -1}
    else:
        tokens = {"long": 14, "page": 4 * P + 3, "hit": 14}
        run = {"prompts": PROMPTS, "max_tokens": tokens, "arrive_at": {"hit": 9}, "num_logits": -1}
    return Scenario(version, "TRITON_ATTN", asynchronous, graphs, engine, run)


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> dict[tuple[str, str], Run]:
    folder = tmp_path_factory.mktemp("engines")
    scenarios = [scenario(folder, *case) for case in CASES]
    return dict(zip(CASES, children.run("tests.triton.child", folder, scenarios), strict=True))


@pytest.fixture(params=CASES, ids="-".join)
def run(request, runs) -> Run:
    return runs[request.param]


def asynchronous(request) -> bool:
    return "V2-async" in request.node.name


@pytest.mark.parametrize("check", checks.ALWAYS, ids=lambda check: check.__name__)
def test_run(run, check, request):
    if check in checks.SYNCHRONOUS and asynchronous(request):
        pytest.skip("scores come a step late and pages in flight stay; `bounds` says by how much at most")
    check(run)


def test_masses(run, request):
    if run.eviction["policy"] == "streaming":
        pytest.skip("streaming measures nothing")
    if asynchronous(request) and "rebase" in request.node.name:
        pytest.skip("its prompt is evicted by what a chunk before had seen")
    assert checks.masses(run) < checks.MASS_TOLERANCE


def test_key_differences(run, request):
    if run.eviction["policy"] != "h2o-keydiff":
        pytest.skip("this policy does not read keys")
    assert checks.key_differences(run) < 1e-5


@pytest.mark.parametrize("policy", ["streaming", "h2o"])
def test_both_runners_say_the_same(runs, policy):
    checks.same_answers(runs["V1", policy], runs["V2", policy])


def test_one_kernel_for_attention_and_scores_says_the_same(runs):
    """It runs in every layer of a step in which all decode and somebody is scored; other steps have two kernels."""
    separate, fused = runs["V2", "h2o"], runs["V2", "h2o fused"]
    checks.same_answers(separate, fused)
    decodes = [step for step in fused.steps if all(row.num_scheduled_tokens == 1 for row in step.rows.values())]
    scored = [step for step in decodes if any((row.num_computed_tokens + 1) % 8 == 0 for row in step.rows.values())]
    num_layers = fused.oracle.config.num_hidden_layers
    assert fused.kernel_calls["decode_with_page_mass"] == num_layers * len(scored) > num_layers
    assert separate.kernel_calls.keys() == {"add_page_mass"}
    assert sum(fused.kernel_calls.values()) == separate.kernel_calls["add_page_mass"]


@pytest.mark.parametrize(("runner", "policy"), [("V1", "h2o"), ("V2", "streaming"), ("V2", "h2o"), ("V2", "h2o fused")])
def test_replayed_graphs_change_nothing(runs, runner, policy):
    """The child has seen every decoding step replayed; a graph here knows as little of the step as one on a GPU."""
    checks.same_answers(runs[runner, policy], runs[f"{runner}-graphs", policy])


def test_graphs_hold_the_kernel_that_was_asked_for(runs):
    """Called once before each capture, and once in it; a replay calls nothing."""
    assert runs["V2-graphs", "h2o"].captured_calls.keys() == {"add_page_mass"}
    assert runs["V2-graphs", "streaming"].captured_calls == {}
    assert runs["V2-graphs", "h2o fused"].captured_calls.keys() == {"decode_with_page_mass"}


@pytest.mark.parametrize("runner", [runner for runner, case in CASES if case == "short pool"])
def test_the_short_pool_preempts(runs, runner):
    """Of a resumed request the V2 model runner hears as of a new one."""
    run = runs[runner, "short pool"]
    assert any(step.preempted for step in run.steps)
    assert max(epoch for name in run.answers for epoch in run.epochs(name)) > 0


@pytest.mark.parametrize("runner", [runner for runner, case in CASES if case == "rebase"])
def test_positions_stay_below_the_limit(runs, runner):
    assert checks.rotary_positions(runs[runner, "rebase"], LIMIT) >= 2
    checks.hashed_pages_stand_where_they_were(runs[runner, "rebase"])


def test_everybody_evicts(runs):
    for case, run in runs.items():
        assert all(run.trace[name] for name in {"long", "page"} & run.answers.keys()), case


def test_the_hit_is_one(runs):
    assert all(runs["V2", policy].rows("hit")[0].num_cached_tokens == 3 * P for policy in POLICIES)
