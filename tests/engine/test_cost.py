"""Invariant 14: the work of a step depends on resident pages, not on the length of the sequence."""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest

import vllm_evict
from tests.engine.harness import PAGE_TOKENS as P
from tests.engine.harness import Engine, random_prompt

OURS = str(Path(vllm_evict.__file__).parent)
BUDGET_PAGES = 4


def lines_run(engine: Engine) -> int:
    """Lines of our own code executed in one step: a loop over logical pages shows as many lines."""
    count = 0

    def in_frame(frame, event, arg):
        nonlocal count
        count += event == "line"
        return in_frame

    sys.settrace(lambda frame, event, arg: in_frame if frame.f_code.co_filename.startswith(OURS) else None)
    try:
        engine.step()
    finally:
        sys.settrace(None)
    return count


def largest_array(value: object) -> int:
    """Elements of the largest array in a dataclass, nested ones included."""
    if isinstance(value, np.ndarray):
        return value.size
    if is_dataclass(value):
        return max((largest_array(getattr(value, field.name)) for field in fields(value)), default=0)
    return 0


class CountingList(list):
    """A request's block list that counts the elements our code reads from it."""

    touched: ClassVar[Counter] = Counter()

    def _count(self, num_elements: int) -> None:
        frame = sys._getframe(2)
        if frame.f_code.co_filename.startswith(OURS):
            CountingList.touched[frame.f_code.co_name] += num_elements

    def __getitem__(self, index):
        found = super().__getitem__(index)
        self._count(len(found) if isinstance(index, slice) else 1)
        return found

    def __iter__(self):
        self._count(len(self))
        return super().__iter__()

    def __reversed__(self):
        self._count(len(self))
        return super().__reversed__()


@pytest.mark.parametrize("policy", ["streaming", "h2o"])
def test_work_does_not_grow_with_length(engine, policy):
    eviction = {"policy": policy, "budget": BUDGET_PAGES * P}
    with engine(eviction=eviction, prefix_caching=False) as served:
        served.begin()
        served.add("a", random_prompt(P, seed=1), max_tokens=29 * P, num_logits=1)
        request_id = served.request_id("a")
        work, reads = {}, {}
        for number in range(28 * P):
            page, offset = divmod(number, P)
            if page in (8, 26):
                if offset == 0:
                    blocks = served.manager.req_to_blocks
                    blocks[request_id] = CountingList(blocks[request_id])
                    CountingList.touched.clear()
                work.setdefault(page, []).append(lines_run(served))
                if offset == P - 1:
                    reads[page] = sum(CountingList.touched.values())
                    resident = served.worker.eviction.table[request_id]
                    assert largest_array(resident) <= BUDGET_PAGES + 1
                    assert len(served.manager._pages[request_id].resident) <= BUDGET_PAGES + 1
            else:
                served.step()
        run = served.end()
        row = run.rows("a")[-1]
        assert len(row.table) > 28 and len(row.attended) <= BUDGET_PAGES + 1
        served.abort("a")
    assert len(run.lines("a")) > 20
    assert max(work[26]) <= max(work[8]) + 2 and sum(work[26]) <= sum(work[8]) + 10, work
    assert reads[26] == reads[8], reads


def test_idle_requests_cost_nothing(engine):
    """Requests below the budget add no work of ours that grows with their length."""
    with engine(eviction={"policy": "streaming", "budget": 40 * P}, prefix_caching=False) as served:
        served.begin()
        served.add("a", random_prompt(P, seed=1), max_tokens=27 * P, num_logits=1)
        work = {}
        for number in range(26 * P):
            page = number // P
            if page in (4, 24):
                work.setdefault(page, []).append(lines_run(served))
            else:
                served.step()
        served.end()
        served.abort("a")
    assert max(work[24]) <= max(work[4]) + 2, work
