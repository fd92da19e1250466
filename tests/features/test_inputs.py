"""Other ways in: a conversation that is fed in pieces."""

from __future__ import annotations

import copy

import pytest

from tests.engine import checks
from tests.engine.harness import PAGE_TOKENS as P
from tests.engine.harness import Answer, Engine, random_prompt

POLICIES = ["streaming", "h2o"]


def feed(served: Engine, name: str, part: list[int], max_tokens: int) -> None:
    """What `AsyncLLM.generate` does with a stream of inputs."""
    from vllm import SamplingParams

    llm_engine = served.llm.llm_engine
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
    tasks = llm_engine.get_supported_tasks()
    prompt = {"prompt_token_ids": list(part)}
    request = llm_engine.input_processor.process_inputs(name, prompt, params, supported_tasks=tasks, resumable=True)
    request.external_req_id = name
    served._names[name] = name
    llm_engine.output_processor.add_request(request, None, None, 0)
    # As to another process: here vLLM's front end and scheduler would both extend the same list of tokens.
    llm_engine.engine_core.add_request(copy.deepcopy(request))


@pytest.mark.parametrize("policy", POLICIES)
def test_a_session_fed_in_pieces(engine, policy):
    """The request keeps its pages and holes between the pieces; its last token is thrown away at each of them.

    Each piece is one chunk: a later one in two hangs in vLLM 0.32, without us.
    """
    parts = [random_prompt(length, seed=length) for length in (4 * P + 5, 2 * P + 7, P)]
    said = 2 * P
    with engine(eviction={"policy": policy, "budget": 3 * P}, chunk_tokens=6 * P) as served:
        served.begin()
        generated = []
        for part in parts:
            feed(served, "a", part, max_tokens=said)
            request = served.scheduler.requests["a"]
            first = request.num_tokens if not generated else request.num_computed_tokens + len(part)
            served.step()
            for _ in range(200):
                if request.status.name == "WAITING_FOR_STREAMING_REQ":
                    break
                served.step()
            else:
                raise AssertionError(
                    f"the session does not come to rest: {request.status}, {request.num_output_tokens}"
                )
            generated += range(first, first + said - 1)  # the last one of each piece is not kept
            checks.pool_state(served.snapshot())
        tokens = tuple(request._all_token_ids[: request.num_computed_tokens])
        served.abort("a")
        served.step()
        run = served.end()
    assert len(tokens) == sum(map(len, parts)) + 3 * (said - 1)
    assert len(run.lines("a")) > 6
    run.answers = {"a": Answer(tokens, (), None, None, "abort")}
    reference = run.reference("a", 0).logits
    for position in generated:
        loss = reference[position - 1].max() - reference[position - 1][tokens[position]]
        assert loss <= 2 * checks.LOGIT_TOLERANCE, position
    assert [p for row in run.rows("a") for p in row.positions] == list(range(len(tokens)))
    for check in (checks.pool, checks.slots, checks.attended, checks.held_pages, checks.written_once):
        check(run)
    for check in (checks.trace_is_the_tables, checks.choices, checks.hashed_pages_are_exact):
        check(run)


def test_a_session_past_the_length_of_the_model(engine, models):
    """To the worker each piece is a new request; its keys go on standing where they were moved to."""
    limit, said = 8 * P, 2 * P
    eviction = {"policy": "streaming", "budget": 3 * P, "positions": "rebase"}
    with engine(
        models("tiny", max_positions=limit), eviction=eviction, chunk_tokens=5 * P, max_model_len=64 * P
    ) as served:
        served.begin()
        generated = []
        for length in (4 * P + 5, 4 * P + 7, P):
            feed(served, "a", random_prompt(length, seed=length), max_tokens=said)
            request = served.scheduler.requests["a"]
            first = request.num_tokens if not generated else request.num_computed_tokens + length
            served.step()
            for _ in range(200):
                if request.status.name == "WAITING_FOR_STREAMING_REQ":
                    break
                served.step()
            generated += range(first, first + said - 1)  # the last one of each piece is not kept
        tokens = tuple(request._all_token_ids[: request.num_computed_tokens])
        served.abort("a")
        served.step()
        run = served.end()
    assert len(tokens) == 9 * P + 12 + 3 * (said - 1)
    run.answers = {"a": Answer(tokens, (), None, None, "abort")}
    assert len(run.rebases["a", 0]) >= 2
    checks.rotary_positions(run, limit)
    reference = run.reference("a", 0).logits
    for position in generated:
        loss = reference[position - 1].max() - reference[position - 1][tokens[position]]
        assert loss <= 2 * checks.LOGIT_TOLERANCE, position
