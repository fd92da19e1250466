"""Positions that are rebased: the oracle with the same rebases gives the same logits."""

from __future__ import annotations

from itertools import pairwise

import pytest

from tests.engine import checks
from tests.engine.harness import PAGE_TOKENS as P
from tests.engine.harness import Run, random_prompt
from tests.models.kinds import tiny_learned
from vllm_evict.config import EvictionConfigError

LIMIT = 8 * P
POLICIES = {
    "streaming": {"policy": "streaming"},
    "h2o": {"policy": "h2o", "score": "sum", "prefill_queries": "all", "score_every": 1},
}
CHUNKS = {"page": P, "odd": P + 5, "two-pages": 2 * P}
PROMPTS = {"long": 19 * P + 17, "page": P, "middle": 7 * P + 3, "late": 11 * P}
MAX_TOKENS = {"long": 9 * P, "page": 12 * P + 2, "middle": 6 * P, "late": 2 * P}


@pytest.fixture(scope="module")
def short(models):
    """A model of 256 positions."""
    return models("tiny", max_positions=LIMIT)


@pytest.fixture(scope="module", params=POLICIES)
def runs(request, engine, short) -> dict[str, Run]:
    """Four requests at once, one of them late, per chunk size; all but the last pass the limit several times."""
    runs = {}
    eviction = POLICIES[request.param] | {"budget": 4 * P, "positions": "rebase"}
    with engine(short, eviction=eviction, chunk_tokens=2 * P, max_model_len=64 * P) as served:
        for chunk, chunk_tokens in CHUNKS.items():
            served.chunk_tokens = chunk_tokens
            prompts = {f"{name}-{chunk}": random_prompt(n, seed=n + chunk_tokens) for name, n in PROMPTS.items()}
            tokens = {f"{name}-{chunk}": n for name, n in MAX_TOKENS.items()}
            runs[chunk] = served.run(prompts, max_tokens=tokens, arrive_at={f"late-{chunk}": 7})
    return runs


@pytest.fixture(params=CHUNKS)
def run(request, runs) -> Run:
    return runs[request.param]


@pytest.mark.parametrize("check", checks.ALWAYS, ids=lambda check: check.__name__)
def test_run(run, check):
    check(run)


def test_positions_stay_below_the_limit(run):
    assert checks.rotary_positions(run, LIMIT) >= 8
    checks.hashed_pages_stand_where_they_were(run)


@pytest.mark.parametrize("runs", ["h2o"], indirect=True)
def test_masses(run):
    checks.masses(run)


def check_all(run: Run) -> None:
    for check in checks.ALWAYS:
        check(run)
    checks.rotary_positions(run, LIMIT)
    checks.hashed_pages_stand_where_they_were(run)


def rebasing(policy: str = "streaming", pages: int = 4) -> dict[str, object]:
    return {"policy": policy, "budget": pages * P, "positions": "rebase"}


# ---- kinds of rotary positions ----

ROPE = {
    "linear": {"rope_type": "linear", "factor": 2.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": LIMIT // 4},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
}


@pytest.mark.parametrize("kind", [*ROPE, "partial", "interleaved"])
def test_kinds(engine, models, kind):
    limit = LIMIT // 2 if kind == "linear" else LIMIT  # vLLM takes factor times as many tokens
    if kind in ROPE:
        path = models("tiny", max_positions=limit, rope=tuple(ROPE[kind].items()))
    else:
        path = models({"partial": "tiny-partial-rotary"}.get(kind, "tiny-interleaved"), max_positions=limit)
    with engine(path, eviction=rebasing(), max_model_len=64 * P) as served:
        run = served.run({"a": random_prompt(13 * P + 3, seed=1), "b": random_prompt(P, seed=2)}, max_tokens=9 * P)
    check_all(run)
    assert len(run.rebases["a", 0]) >= 4


# ---- who else can reach a page ----


def test_a_hit_is_copied_while_others_hold_it(engine, short):
    """Three requests on one prefix of six pages: each moves its own copy of what it keeps, the first page stays."""
    prefix = random_prompt(6 * P, seed=1)
    with engine(short, eviction=rebasing(pages=5), chunk_tokens=3 * P, max_model_len=64 * P, num_pages=60) as served:
        prompts = {f"r{n}": prefix + random_prompt(P + 9 * n, seed=n) for n in range(3)}
        run = served.run(prompts, max_tokens=9 * P, arrive_at={"r1": 5, "r2": 5})
    check_all(run)
    assert run.rows("r2")[0].num_cached_tokens == 6 * P
    assert copied(run) >= 2
    first = {row.table[0] for name in prompts for row in run.rows(name)[-1:]}
    assert len(first) == 1  # nothing before it ever goes: it is still shared


def copied(run: Run) -> int:
    """Pages whose block changed while their request went on."""
    count = 0
    for name in run.answers:
        rows = run.rows(name)
        for before, after in pairwise(rows):
            if before.epoch == after.epoch:
                pairs = zip(before.table, after.table, strict=False)
                count += sum(b is not None and a is not None and a != b for b, a in pairs)
    return count


def test_a_hit_as_long_as_the_model_moves_before_its_first_chunk(engine, short):
    """What was computed within the limit is found, and the rest of the prompt stands past it."""
    prefix = random_prompt(7 * P, seed=1)
    with engine(short, eviction=rebasing(pages=3), chunk_tokens=4 * P, max_model_len=64 * P) as served:
        served.scheduler.scheduler_config.long_prefill_token_threshold = 0
        first = served.run({"first": [*prefix[: 4 * P], 7]}, max_tokens=1)
        prompts = {f"r{n}": prefix + random_prompt(3 * P, seed=n) for n in range(3)}
        second = served.run(prompts, max_tokens=4 * P)
    check_all(second)
    assert second.rows("r0")[0].num_cached_tokens >= 3 * P
    assert first.answers and all(second.rebases[name, 0] for name in prompts)


def test_nobody_finds_what_has_moved(engine, short):
    """The whole conversation again: a hit ends where pages began to move, and the answer is the oracle's."""
    with engine(short, eviction=rebasing(), max_model_len=64 * P) as served:
        first = served.run({"first": random_prompt(5 * P, seed=1)}, max_tokens=9 * P)
        conversation = list(first.answers["first"].prompt + first.answers["first"].tokens)
        second = served.run({"second": conversation + random_prompt(5, seed=2)}, max_tokens=2 * P)
    check_all(first)
    check_all(second)
    first_hole_at = first.lines("first")[0].num_computed_tokens
    assert first.rebases and second.rows("second")[0].num_cached_tokens <= first_hole_at


def test_branches_move_each_for_itself(engine, short):
    with engine(short, eviction=rebasing(pages=5), chunk_tokens=3 * P, max_model_len=64 * P) as served:
        served.begin()
        sampling = {"n": 2, "temperature": 1.0}
        served.add("a", random_prompt(6 * P + 5, seed=1), max_tokens=12 * P, sampling=sampling)
        run = served.drain()
    for check in (*checks.ALWAYS, checks.hashed_pages_stand_where_they_were):
        if check is not checks.greedy_tokens:
            check(run)
    checks.rotary_positions(run, LIMIT)
    assert run.answers["a/0"].tokens != run.answers["a/1"].tokens
    assert all(run.rebases[name, 0] for name in ("a/0", "a/1")) and copied(run)


# ---- lives and company ----


def test_preemption_starts_over(engine, short):
    """Thrown out past the limit, everybody comes back at offset 0 and is past it again."""
    with engine(short, eviction=rebasing(), num_pages=19, max_model_len=64 * P) as served:
        prompts = {f"r{n}": random_prompt(5 * P + 7 * n, seed=n) for n in range(4)}

        def throw_out(step):
            if step == 200:
                served.scheduler.reset_prefix_cache(reset_running_requests=True)

        run = served.run(prompts, max_tokens=8 * P, before_step=throw_out)
    check_all(run)
    assert sum(bool(run.rebases.get((name, 0))) and bool(run.rebases.get((name, 1))) for name in prompts) >= 2
    for name in prompts:
        row = run.rows_of_epoch(name, max(run.epochs(name)))[0]
        assert row.positions[0] == row.num_computed_tokens


@pytest.mark.parametrize("policy", POLICIES)
def test_alone_and_in_company(engine, short, policy):
    prompts = {f"r{n}": random_prompt(P * (3 + 4 * n) + n, seed=n) for n in range(3)}

    def history(run: Run, name: str):
        return run.answers[name].tokens, run.rebases.get((name, 0)), [line.pages for line in run.lines(name)]

    with engine(short, eviction=rebasing(policy), chunk_tokens=4 * P - 7, max_model_len=64 * P) as served:
        served.scheduler.scheduler_config.long_prefill_token_threshold = P
        together = served.run(prompts, max_tokens=8 * P)
        check_all(together)
        served.llm.llm_engine.reset_prefix_cache()
        served.chunk_tokens = P  # vLLM's threshold does not hold for who is alone
        for name, prompt in prompts.items():
            solo = served.run({f"{name}-alone": prompt}, max_tokens=8 * P)
            assert history(solo, f"{name}-alone") == history(together, name)
            served.llm.llm_engine.reset_prefix_cache()


def test_prompt_logprobs_past_the_limit(engine, short):
    prompt = random_prompt(20 * P + 3, seed=4)
    with engine(short, eviction=rebasing(), max_model_len=64 * P) as served:
        run = served.run({"a": prompt}, max_tokens=P, prompt_logits=True)
    check_all(run)
    error = (run.answers["a"].prompt_logits - run.reference("a", 0).logits[: len(prompt) - 1]).abs().max()
    assert error <= checks.LOGIT_TOLERANCE


def test_below_the_limit_nothing_changes(engine, short):
    tokens = {}
    for positions in ("absolute", "rebase"):
        with engine(short, eviction=rebasing() | {"positions": positions}, max_model_len=LIMIT) as served:
            run = served.run({"a": random_prompt(5 * P, seed=1)}, max_tokens=3 * P - 1)
        tokens[positions] = run.answers["a"].tokens
        assert not run.rebases
    assert tokens["absolute"] == tokens["rebase"]


# ---- refused ----


@pytest.mark.parametrize(
    ("eviction", "message"),
    [
        (rebasing(pages=7), r"224 in pages of 32, and 64 in flight, are 288 tokens, and the model has 256 positions"),
        (
            rebasing() | {"budget": "unlimited", "floor": 4 * P},
            "rebase does not work with --kv-eviction-budget unlimited",
        ),
        (rebasing("keep-all"), "rebase does not work with --kv-eviction keep-all"),
        (rebasing() | {"positions": "Rebase"}, "--kv-eviction-positions got 'Rebase': choose one of absolute, rebase"),
    ],
)
def test_refused_with_the_numbers(engine, short, eviction, message):
    with pytest.raises(EvictionConfigError, match=message):
        engine(short, eviction=eviction, max_model_len=64 * P)


def test_at_the_least_it_works(engine, short):
    """Six pages and two in flight fill the model's positions exactly."""
    with engine(short, eviction=rebasing(pages=6), max_model_len=64 * P) as served:
        run = served.run({"a": random_prompt(15 * P, seed=1)}, max_tokens=5 * P)
    check_all(run)


def test_models_whose_positions_are_not_rotary_or_have_windows_are_refused(engine, models, tmp_path):
    learned = tiny_learned(tmp_path)
    with pytest.raises(EvictionConfigError, match=r"positions of layer .*: no rotary embedding was found beside it"):
        engine(learned, eviction=rebasing())
    with pytest.raises(EvictionConfigError, match="does not work with windows under"):
        engine("tiny-swa", eviction=rebasing())


def test_without_rebase_the_models_length_is_the_limit(engine, short):
    with pytest.raises(ValueError, match="greater than the derived max_model_len"):
        engine(short, eviction={"policy": "streaming", "budget": 4 * P}, max_model_len=64 * P)
