"""Faults to inject on purpose, each with the tests that are to see it.

Every fault replaces one method of the product or of vLLM for as long as the tests run; nothing is written to disk. None
of them crashes the engine: each computes something wrong and goes on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

Patch = Callable[[object, str, object], None]
"""`patch(owner, name, value)`, undone after the tests."""

_FAITHFUL = "tests/engine/test_faithful.py"
STREAMING = (_FAITHFUL, "streaming and two-pages and not no-prefix")
H2O = (_FAITHFUL, "h2o and not exact and not keydiff and two-pages and not no-prefix")
KEYDIFF = (_FAITHFUL, "keydiff and not h2o and two-pages and not no-prefix")
H2O_EXACT = (_FAITHFUL, "h2o-exact and two-pages and not no-prefix")
PLANTED = ("tests/engine/test_plant.py", "keeps_the_page_with_heavy and all")
PAPER = ("tests/engine/test_plant.py", "papers_score and MQA")
PREFIX = ("tests/engine/test_prefix.py", "streaming")
HASHED = ("tests/engine/test_prefix.py", "streaming and nothing_computed_after_a_hole")
LIMITS = ("tests/engine/test_limits.py", "streaming and (unscheduled or minimum or small_pool)")
CANARY = ("tests/engine/test_canary.py", "streaming")
REBASE = ("tests/engine/test_rebase.py", "streaming and odd and not alone")
REBASE_SHARED = ("tests/engine/test_rebase.py", "hit_is_copied or nobody_finds or branches")
REPLAYED = ("tests/bookkeeping/test_runtime.py", "replayed_graph or batch_of_nobody")


@dataclass(frozen=True)
class Fault:
    """One fault.

    Args:
        name: in the table.
        what: what the faulty product does.
        inject: makes it so.
        tests: (file, pytest's -k expression), where it is to be seen.
        asked_for: named in the task, so part of the fast run.
    """

    name: str
    what: str
    inject: Callable[[Patch], None]
    tests: tuple[tuple[str, str], ...]
    asked_for: bool = False


# ---- where a token is ----


def _position_off_by_a_page(patch: Patch) -> None:
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    forward = GPUModelRunner._model_forward

    def shifted(self, *args, positions, **kwargs):
        # As if the position were the place among resident pages, once a page has gone.
        return forward(self, *args, positions=positions.where(positions < 6 * 32, positions - 32), **kwargs)

    patch(GPUModelRunner, "_model_forward", shifted)


# ---- positions that rebase ----


def _keys_stay(patch: Patch) -> None:
    from vllm_evict.engine import positions

    patch(positions, "move_pages", lambda *args: None)


def _keys_move_up(patch: Patch) -> None:
    from vllm_evict.engine import positions

    move_pages = positions.move_pages
    patch(positions, "move_pages", lambda pages, rotation, blocks, down: move_pages(pages, rotation, blocks, -down))


def _last_page_stays(patch: Patch) -> None:
    from vllm_evict.engine import positions

    move_pages = positions.move_pages
    patch(
        positions,
        "move_pages",
        lambda pages, rotation, blocks, down: move_pages(pages, rotation, blocks[:-1], down[:-1]),
    )


def _offset_of_the_first_request(patch: Patch) -> None:
    from vllm_evict.engine.positions import RotaryPositions

    lower = RotaryPositions.lower

    def lower_all_alike(self, positions, requests):
        num_tokens = sum(request.num_scheduled_tokens for request in requests)
        lower(self, positions, [replace(requests[0], num_scheduled_tokens=num_tokens)])

    patch(RotaryPositions, "lower", lower_all_alike)


def _shared_pages_turned_in_place(patch: Patch) -> None:
    from vllm_evict.engine.messages import Rebase
    from vllm_evict.engine.rebase import PositionKeeper

    def rebase_in_place(self, request_id, blocks, resident):
        found = self._rebases[request_id] = Rebase(len(blocks) - len(resident), tuple(resident))
        return found

    patch(PositionKeeper, "rebase", rebase_in_place)


def _copies_are_empty(patch: Patch) -> None:
    from vllm_evict.positions.pages import PackedKeyPages

    patch(PackedKeyPages, "copy", lambda self, sources, blocks: None)


# ---- which page goes ----


def _wrong_page_freed(patch: Patch) -> None:
    from vllm_evict.engine.block_manager import EvictingBlockManager

    evict = EvictingBlockManager._evict

    def frees_its_neighbour(self, request, view, plan, reason):
        # The scheduler takes one block for the other and gives away what the worker still reads.
        blocks = self.req_to_blocks[request.request_id]
        victim = plan.pages[-1]
        neighbour = next(page for page in view.pages.tolist() if page > victim)
        blocks[victim], blocks[neighbour] = blocks[neighbour], blocks[victim]
        evict(self, request, view, plan, reason)

    patch(EvictingBlockManager, "_evict", frees_its_neighbour)


def _one_page_too_many_kept(patch: Patch) -> None:
    from vllm_evict.pages import PageBudget

    excess_pages = PageBudget.excess_pages
    patch(PageBudget, "excess_pages", lambda self, num_resident: max(excess_pages(self, num_resident) - 1, 0))


def _sinks_unprotected(patch: Patch) -> None:
    from vllm_evict.policies import base

    evictable = base.evictable
    patch(base, "evictable", lambda view, budget: evictable(view, replace(budget, sink_pages=0)))


def _only_the_first_request_trimmed(patch: Patch) -> None:
    from vllm_evict.engine.block_manager import EvictingBlockManager

    trim = EvictingBlockManager._trim

    def trim_the_first(self, request):
        if request is next(iter(self._requests.values())):
            trim(self, request)

    patch(EvictingBlockManager, "_trim", trim_the_first)


def _trim_comes_late(patch: Patch) -> None:
    from vllm_evict.engine.block_manager import EvictingBlockManager

    trim = EvictingBlockManager._trim
    seen: dict[str, int] = {}

    def every_third_time(self, request):
        seen[request.request_id] = seen.get(request.request_id, 0) + 1
        if seen[request.request_id] % 3 == 0:
            trim(self, request)

    patch(EvictingBlockManager, "_trim", every_third_time)


# ---- what the kernel reads ----


def _stale_row_kept(patch: Patch) -> None:
    from vllm_evict.engine.resident import ResidentRequest

    # The worker goes on reading pages that the scheduler has given away.
    patch(ResidentRequest, "punch", lambda self, holes: None)


def _null_page_read(patch: Patch) -> None:
    from vllm_evict.engine.resident import ResidentRequest

    def nulled(self, holes):
        self.block_ids = np.where(np.isin(self.pages, holes), 0, self.block_ids).astype(np.int32)

    patch(ResidentRequest, "punch", nulled)


def _row_of_the_neighbour(patch: Patch) -> None:
    from vllm_evict.engine.runtime import EvictionRuntime

    batch_rows = EvictionRuntime.batch_rows

    def swapped(self, request_ids, num_rows=None):
        fresh = self._rows is None
        rows = batch_rows(self, request_ids, num_rows)
        if fresh and len(request_ids) > 1:
            num_pages = [len(self.table[request_id].pages) for request_id in request_ids]
            if num_pages[0] == num_pages[1]:
                rows.block_table[[0, 1]] = rows.block_table[[1, 0]]
        return rows

    patch(EvictionRuntime, "batch_rows", swapped)


# ---- scores ----


def _scores_swapped(patch: Patch) -> None:
    from vllm_evict.engine.block_manager import EvictingBlockManager

    receive_scores = EvictingBlockManager.receive_scores
    latest: dict[str, np.ndarray] = {}

    def those_of_another(self, request_id, scores):
        latest[request_id] = scores.signals["attention"]
        others = [theirs for name, theirs in latest.items() if name != request_id]
        if others:
            scores = replace(scores, signals={"attention": np.resize(others[-1], len(scores.pages))})
        receive_scores(self, request_id, scores)

    patch(EvictingBlockManager, "receive_scores", those_of_another)


def _mass_of_the_next_page(patch: Patch) -> None:
    from vllm_evict.scores.aggregate import PageMass

    observe = PageMass.observe

    def shifted(self, pages, positions, page_mass):
        observe(self, pages, positions, np.roll(page_mass, 1, axis=1))

    patch(PageMass, "observe", shifted)


def _sum_instead_of_mean(patch: Patch) -> None:
    from vllm_evict.scores.aggregate import PageMass

    patch(PageMass, "scores", lambda self, pages, num_tokens: np.where(self.queries > 0, self.mass, np.nan))


def _near_queries_count(patch: Patch) -> None:
    from vllm_evict.config import EvictionConfig

    patch(EvictionConfig, "distant_tokens", property(lambda self: 0))


def _lowest_kept(patch: Patch) -> None:
    from vllm_evict.policies.h2o import H2O

    patch(H2O, "rank", lambda self, view: -view.signals["attention"])


def _keys_of_the_next_page(patch: Patch) -> None:
    from vllm_evict.engine.runtime import EvictionRuntime

    read_keys = EvictionRuntime._read_keys

    def shifted(self, request_ids):
        return {request_id: np.roll(keys, 1) for request_id, keys in read_keys(self, request_ids).items()}

    patch(EvictionRuntime, "_read_keys", shifted)


def _keys_of_one_layer(patch: Patch) -> None:
    from vllm_evict.engine.attention.cpu import EvictionCPUMetadataBuilder

    add_key_difference = EvictionCPUMetadataBuilder.add_key_difference

    def first_only(self, *, layer_weight, **arguments):
        names, self.layer_names = self.layer_names, self.layer_names[:1]
        add_key_difference(self, layer_weight=layer_weight * len(names), **arguments)
        self.layer_names = names

    patch(EvictionCPUMetadataBuilder, "add_key_difference", first_only)


def _query_sees_the_future(patch: Patch) -> None:
    from vllm_evict.engine.runtime import EvictionRuntime

    observe = EvictionRuntime._observe

    def all_visible(self, requests):
        mass = observe(self, requests)
        if mass is not None:  # the causal mask inside the chunk is forgotten
            lens = self._rows.physical_lens.numpy()
            mass.observed.visible_tokens[:] = lens[mass.observed.row]
        return mass

    patch(EvictionRuntime, "_observe", all_visible)


# ---- books ----


def _hashed_after_a_hole(patch: Patch) -> None:
    from vllm_evict.engine.block_manager import EvictingBlockManager

    patch(EvictingBlockManager, "num_exact_tokens", lambda self, request_id, num_tokens: num_tokens)


def _hit_pages_pinned(patch: Patch) -> None:
    from vllm_evict.engine.block_manager import EvictingBlockManager

    # A prefix hit longer than the budget is taken whole, and only said to have holes.
    patch(EvictingBlockManager, "_without", lambda self, blocks, plan: blocks)


def _holes_forgotten_on_a_hit(patch: Patch) -> None:
    from vllm_evict.engine.block_manager import EvictingBlockManager

    # The trace is not told which pages of a hit were left out.
    record = EvictingBlockManager._record_holes

    def silent(self, request, view, plan, reason, num_freed):
        trace = self._trace
        if request.num_computed_tokens == 0 or view.num_tokens != request.num_computed_tokens:
            self._trace = None
        record(self, request, view, plan, reason, num_freed)
        self._trace = trace

    patch(EvictingBlockManager, "_record_holes", silent)


def _trace_comes_late(patch: Patch) -> None:
    from vllm_evict.engine.trace import EvictionTrace

    write = EvictionTrace.write

    def late(self, request_id, epoch, view, plan, reason):
        write(self, request_id, epoch, replace(view, num_tokens=view.num_tokens + 1), plan, reason)

    patch(EvictionTrace, "write", late)


# ---- CUDA graphs ----


def _graph_keeps_its_first_queries(patch: Patch) -> None:
    from vllm_evict.engine.decode_mass import DecodeMass

    observe = DecodeMass.observe

    def into_a_new_tensor(self, *args):
        self._visible_tokens = self._visible_tokens.clone()
        return observe(self, *args)

    patch(DecodeMass, "observe", into_a_new_tensor)


def _graph_always_observes(patch: Patch) -> None:
    from vllm_evict.engine.decode_mass import DecodeMass

    patch(DecodeMass, "skip", lambda self: self._enabled.fill_(1))


FAULTS = (
    Fault(
        "position off by one page",
        "once a page has gone, tokens get the position of their place among resident pages",
        _position_off_by_a_page,
        (STREAMING,),
        asked_for=True,
    ),
    Fault(
        "wrong page freed",
        "the block of another page of the request goes back to the pool",
        _wrong_page_freed,
        (STREAMING,),
        asked_for=True,
    ),
    Fault(
        "scores swapped between requests",
        "each request is judged by the scores of another one",
        _scores_swapped,
        (H2O, PLANTED),
        asked_for=True,
    ),
    Fault(
        "stale row kept",
        "the worker goes on reading pages that were evicted",
        _stale_row_kept,
        (STREAMING, CANARY),
        asked_for=True,
    ),
    Fault(
        "page hashed after a hole",
        "pages computed with holes before them are offered to other requests",
        _hashed_after_a_hole,
        (STREAMING, HASHED),
        asked_for=True,
    ),
    Fault("one page too many kept", "the budget is exceeded by a page", _one_page_too_many_kept, (STREAMING, LIMITS)),
    Fault("sinks unprotected", "the first page goes like any other", _sinks_unprotected, (STREAMING, LIMITS)),
    Fault("trim comes late", "only every third trim is carried out", _trim_comes_late, (STREAMING,)),
    Fault(
        "only the first request trimmed",
        "while a request lives, those that came after it are not trimmed",
        _only_the_first_request_trimmed,
        (STREAMING, LIMITS),
    ),
    Fault("null page read", "holes stay in the table as the null block", _null_page_read, (STREAMING, CANARY)),
    Fault(
        "row of the neighbour",
        "two requests of equal size read each other's pages",
        _row_of_the_neighbour,
        (STREAMING,),
    ),
    Fault("mass of the next page", "attention is booked on the page after", _mass_of_the_next_page, (H2O, PLANTED)),
    Fault("lowest kept", "the pages of least attention are kept", _lowest_kept, (H2O, PLANTED)),
    Fault("sum instead of mean", "scores are not divided by observed queries", _sum_instead_of_mean, (H2O,)),
    Fault("near queries count", "a page's own neighbours vote for it", _near_queries_count, (H2O,)),
    Fault(
        "query sees the future",
        "observed queries are not masked inside their chunk",
        _query_sees_the_future,
        (H2O_EXACT, PAPER),
    ),
    Fault("keys of the next page", "key differences are booked on the page after", _keys_of_the_next_page, (KEYDIFF,)),
    Fault("keys of one layer", "only the first layer's keys are looked at", _keys_of_one_layer, (KEYDIFF,)),
    Fault("hit pages pinned", "a long prefix hit is held whole", _hit_pages_pinned, (PREFIX,)),
    Fault("trace silent on a hit", "holes in a prefix hit are not traced", _holes_forgotten_on_a_hit, (PREFIX,)),
    Fault("trace comes late", "an eviction is traced one token late", _trace_comes_late, (STREAMING,)),
    Fault("keys stay", "positions are rebased, and keys are not moved", _keys_stay, (REBASE,)),
    Fault("keys move up", "keys are moved the wrong way", _keys_move_up, (REBASE,)),
    Fault("last page stays", "all keys are moved but those of the newest page", _last_page_stays, (REBASE,)),
    Fault(
        "offset of the first request",
        "all of a batch are given the first one's offset",
        _offset_of_the_first_request,
        (REBASE,),
    ),
    Fault(
        "shared pages turned in place",
        "pages move though others hold or may find them",
        _shared_pages_turned_in_place,
        (REBASE_SHARED,),
    ),
    Fault("copies are empty", "a page is copied without what is in it", _copies_are_empty, (REBASE_SHARED,)),
    Fault(
        "graph keeps its first queries",
        "queries to observe are put where no captured graph looks",
        _graph_keeps_its_first_queries,
        (REPLAYED,),
    ),
    Fault("graph always observes", "steps that observe nobody are scored", _graph_always_observes, (REPLAYED,)),
)
