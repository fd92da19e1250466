"""`ResidentTable`, the worker's books, driven by real `SchedulerOutput`s. That its pages and blocks are the manager's
after every step is checked by the harness in all bookkeeping tests; here: what else it knows, and hand-made steps."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput

from vllm_evict.engine.messages import EvictionUpdate
from vllm_evict.engine.resident import ResidentTable

each_policy = pytest.mark.parametrize("policy", ["streaming", "h2o", "random"])


def step(new=(), cached=(), finished=(), preempted=None):
    """A step by hand. `new`: (id, blocks, computed, scheduled); `cached`: the same and whether it resumes."""
    output = SchedulerOutput.make_empty()
    output.scheduled_new_reqs = [
        NewRequestData(request_id, [0], [], SamplingParams(), None, (blocks,), num_computed, None)
        for request_id, blocks, num_computed, _ in new
    ]
    output.scheduled_cached_reqs = CachedRequestData(
        req_ids=[request_id for request_id, *_ in cached],
        resumed_req_ids={request_id for request_id, *_, resumes in cached if resumes},
        new_token_ids=[],
        all_token_ids={},
        new_block_ids=[None if blocks is None else (blocks,) for _, blocks, *_ in cached],
        num_computed_tokens=[num_computed for _, _, num_computed, *_ in cached],
        num_output_tokens=[0 for _ in cached],
    )
    output.num_scheduled_tokens = {request_id: num for request_id, _, _, num, *_ in (*new, *cached)}
    output.total_num_scheduled_tokens = sum(output.num_scheduled_tokens.values())
    output.finished_req_ids = set(finished)
    output.preempted_req_ids = preempted
    return output


def apply(table, output, holes=None):
    table.apply(output, EvictionUpdate(holes or {}))


def books(table, request_id):
    request = table[request_id]
    return dict(zip(request.pages.tolist(), request.block_ids.tolist(), strict=True))


@pytest.fixture
def table():
    return ResidentTable(0)


# ---- by hand ----


def test_a_life_by_hand(table):
    apply(table, step(new=[("a", [5, 3, 9], 0, 12)]))
    assert books(table, "a") == {0: 5, 1: 3, 2: 9}
    assert (table["a"].num_computed_tokens, table["a"].num_scheduled_tokens) == (0, 12)
    apply(table, step(cached=[("a", [2], 12, 1, False)]))
    assert books(table, "a") == {0: 5, 1: 3, 2: 9, 3: 2}
    apply(table, step(cached=[("a", None, 13, 1, False)]), {"a": (1, 2)})
    assert books(table, "a") == {0: 5, 3: 2} and table["a"].num_holes == 2 and table["a"].num_pages == 4
    apply(table, step(cached=[("a", [3], 16, 1, False)]))  # block 3 again, as another page
    assert books(table, "a") == {0: 5, 3: 2, 4: 3}
    apply(table, step(finished=["a"]))
    assert len(table) == 0


def test_a_new_page_and_a_hole_in_one_step(table):
    apply(table, step(new=[("a", [1, 2, 3], 0, 12)]))
    apply(table, step(cached=[("a", [4], 12, 1, False)]), {"a": (1,)})
    assert books(table, "a") == {0: 1, 2: 3, 3: 4}


def test_a_long_hit_comes_with_its_holes(table):
    """vLLM names the null block where pages are missing; its number must not enter the table."""
    apply(table, step(new=[("a", [7, 0, 0, 4, 6], 16, 3)]), {"a": (1, 2)})
    assert books(table, "a") == {0: 7, 3: 4, 4: 6}
    assert table["a"].num_computed_tokens == 16


def test_a_resumed_request_forgets_what_it_had(table):
    apply(table, step(new=[("a", [1, 2, 3], 0, 12)]))
    apply(table, step(cached=[("a", None, 12, 1, False)]), {"a": (1,)})
    apply(table, step(preempted={"a"}))
    assert len(table) == 0
    apply(table, step(cached=[("a", [0, 8, 9], 8, 4, True)]), {"a": (0,)})
    assert books(table, "a") == {1: 8, 2: 9}


def test_preempted_and_resumed_in_one_step(table):
    """As after `reset_prefix_cache(reset_running_requests=True)`."""
    apply(table, step(new=[("a", [1, 2, 3], 0, 12)]))
    apply(table, step(cached=[("a", [8, 9], 0, 8, True)], preempted={"a"}))
    assert books(table, "a") == {0: 8, 1: 9}


def test_a_finished_id_used_again_in_the_same_step(table):
    apply(table, step(new=[("a", [1, 2, 3], 0, 12)]))
    apply(table, step(new=[("a", [6], 0, 2)], finished=["a"]))
    assert books(table, "a") == {0: 6}


def test_the_v2_runner_s_way_of_resuming(table):
    """There a resumed request comes as a new one."""
    apply(table, step(new=[("a", [1, 2, 3], 0, 12)]))
    apply(table, step(new=[("a", [4, 0, 5], 8, 4)], preempted={"a"}), {"a": (1,)})
    assert books(table, "a") == {0: 4, 2: 5}


def test_who_sits_out_keeps_its_pages_and_has_no_tokens(table):
    apply(table, step(new=[("a", [1, 2], 0, 8), ("b", [3], 0, 4)]))
    apply(table, step(cached=[("b", [4], 4, 1, False)]), {"a": (0,)})
    assert books(table, "a") == {1: 2} and table["a"].num_scheduled_tokens == 0
    assert books(table, "b") == {0: 3, 1: 4} and table["b"].num_scheduled_tokens == 1


def test_who_sits_out_has_the_tokens_of_its_last_step_behind_it(table):
    """`num_computed_tokens` + `num_scheduled_tokens` is the length that scores are reported for."""
    apply(table, step(new=[("a", [1, 2], 0, 8)]))
    for _ in range(3):
        apply(table, step())
        assert (table["a"].num_computed_tokens, table["a"].num_scheduled_tokens) == (8, 0)
    apply(table, step(cached=[("a", [3], 8, 1, False)]))
    assert (table["a"].num_computed_tokens, table["a"].num_scheduled_tokens) == (8, 1)


def test_the_order_of_rows_means_nothing(table):
    other = ResidentTable(0)
    for one, cached in ((table, ["a", "b", "c"]), (other, ["c", "a", "b"])):
        apply(one, step(new=[(r, [i, i + 10], 0, 8) for i, r in enumerate("abc", start=1)]))
        apply(one, step(cached=[(r, [ord(r)], 8, 1, False) for r in cached]), {"b": (0,)})
    for request_id in "abc":
        assert books(table, request_id) == books(other, request_id)


def test_a_hole_that_is_no_page_is_our_own_mistake(table):
    apply(table, step(new=[("a", [1, 2], 0, 8)]))
    for holes in ((2,), (0, 5)):
        with pytest.raises(AssertionError, match="not resident"):
            apply(table, step(), {"a": holes})


@pytest.mark.parametrize("group_id", [0, 1])
def test_it_reads_its_own_group(group_id):
    table = ResidentTable(group_id)
    output = step(new=[("a", [1, 2], 0, 8)])
    output.scheduled_new_reqs[0].block_ids = ([1, 2], [3, 4])
    apply(table, output)
    output = step(cached=[("a", [5], 8, 1, False)])
    output.scheduled_cached_reqs.new_block_ids = [([5], []) if group_id == 0 else ([], [6])]
    apply(table, output)
    assert books(table, "a") == ({0: 1, 1: 2, 2: 5} if group_id == 0 else {0: 3, 1: 4, 2: 6})


def test_dtypes_stay_what_the_kernels_take(table):
    apply(table, step(new=[("a", [1, 2, 3], 0, 12)]))
    apply(table, step(cached=[("a", [4], 12, 1, False)]), {"a": (1,)})
    assert table["a"].pages.dtype == table["a"].block_ids.dtype == np.int32


# ---- lives ----


def test_a_life_ends_with_preemption_and_a_new_one_begins(table):
    apply(table, step(new=[("a", [1, 2], 0, 8), ("b", [3], 0, 4)]))
    first, other = table["a"].life, table["b"].life
    assert first != other and table.take_ended() == []
    apply(table, step(preempted={"a"}))
    assert table.take_ended() == [first] and table.take_ended() == []
    apply(table, step(cached=[("a", [5, 6], 4, 4, True)], finished=["b"]))
    assert table.take_ended() == [other]
    assert table["a"].life not in (first, other) and table["a"].first_query == 4


def test_a_request_that_comes_back_as_a_new_one_begins_a_new_life(table):
    """As the V2 model runner hears of a resumed request."""
    apply(table, step(new=[("a", [1, 2], 0, 8)]))
    first = table["a"].life
    apply(table, step(new=[("a", [4, 5], 0, 8)]))
    assert table.take_ended() == [first] and table["a"].block_ids.tolist() == [4, 5]


# ---- any order of events ----

events = st.lists(
    st.tuples(st.sampled_from(["new", "grow", "hole", "preempt", "finish", "resume"]), st.integers(0, 2)), max_size=40
)


@examples(max_examples=60, deadline=None, derandomize=True)
@given(events=events)
def test_any_sequence_of_steps_equals_a_dictionary(events):
    table, model, computed, next_block, preempted = ResidentTable(0), {}, {}, 1, set()
    for event, which in events:
        request_id = f"r{which}"
        live = request_id in model
        if event == "new" and not live and request_id not in preempted:
            apply(table, step(new=[(request_id, [next_block, next_block + 1], 0, 7)]))
            model[request_id] = [next_block, next_block + 1]
            computed[request_id] = 7
        elif event == "grow" and live:
            apply(table, step(cached=[(request_id, [next_block], computed[request_id], 4, False)]))
            model[request_id].append(next_block)
            computed[request_id] += 4
        elif event == "hole" and live and sum(b is not None for b in model[request_id]) > 1:
            page = next(p for p, block in enumerate(model[request_id]) if block is not None)
            apply(table, step(), {request_id: (page,)})
            model[request_id][page] = None
        elif event in ("preempt", "finish") and live:
            apply(table, step(preempted={request_id}) if event == "preempt" else step(finished=[request_id]))
            del model[request_id]
            preempted |= {request_id} if event == "preempt" else set()
        elif event == "resume" and request_id in preempted:
            apply(table, step(cached=[(request_id, [0, next_block], 4, 3, True)]), {request_id: (0,)})
            preempted.discard(request_id)
            model[request_id] = [None, next_block]
            computed[request_id] = 7
        next_block += 2
        assert len(table) == len(model)
        for r, blocks in model.items():
            assert books(table, r) == {page: block for page, block in enumerate(blocks) if block is not None}
            assert table[r].num_pages == len(blocks)
            assert table[r].num_computed_tokens + table[r].num_scheduled_tokens == computed[r]
