"""The block manager: vLLM's full-attention manager that makes holes.

It follows, per request, which logical pages are resident; asks the policy for
victims at the start of a step, before anybody allocates; and returns their
blocks to the pool. The request's list keeps the null block where a page was, so
its length stays logical and everything else in vLLM goes on counting tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.v1.request import Request

from vllm_evict.config import EvictionConfig
from vllm_evict.engine.messages import EvictionUpdate, PageScores
from vllm_evict.engine.trace import EvictionTrace
from vllm_evict.pages import EvictionPlan, PageView, pages_for

if TYPE_CHECKING:
    from vllm_evict.engine.spec import EvictingAttentionSpec


@dataclass
class RequestPages:
    """Eviction state of one request; lives exactly as long as its blocks.

    Args:
        resident: logical pages held, ascending.
        num_pages: logical length of the request's block list, holes included.
        exact_tokens: leading tokens computed while everything before them was
            visible; None while that is all of them. Only these may be hashed.
        scores: the last report, or None.
        awaits_scores: scores were asked for and have not arrived.

    """

    resident: list[int] = field(default_factory=list)
    num_pages: int = 0
    exact_tokens: int | None = None
    scores: PageScores | None = None
    awaits_scores: bool = False


@dataclass
class EvictionStats:
    """Counters since start."""

    num_evicted_pages: int = 0
    num_evictions: int = 0


class EvictingBlockManager(FullAttentionManager):
    """Full attention, each request held to a budget of whole pages.

    ``bind`` must be called once before the first step.
    """

    kv_cache_spec: EvictingAttentionSpec

    def __init__(self, kv_cache_spec: EvictingAttentionSpec, **kwargs) -> None:
        super().__init__(kv_cache_spec, **kwargs)
        # vLLM fills this in for its own window specs only.
        self.max_admission_blocks_per_request = kv_cache_spec.max_pages
        self.stats = EvictionStats()
        self._pages: dict[str, RequestPages] = {}
        self._over_budget: set[str] = set()
        self._new_holes: dict[str, tuple[int, ...]] = {}

    def bind(
        self,
        config: EvictionConfig,
        requests: Mapping[str, Request],
        trace: EvictionTrace | None = None,
    ) -> None:
        """Connect to the scheduler: its live requests, the policy to apply, where to trace."""
        self._requests = requests
        self._policy = config.make_policy()
        self._budget = config.page_budget(self.block_size)
        self._trace = trace

    # ---- one step -------------------------------------------------------------

    def new_step_starts(self) -> None:
        """Trim every request that is over its budget, scheduled or not."""
        super().new_step_starts()
        for request_id in sorted(self._over_budget):
            if not self._pages[request_id].awaits_scores:
                self._trim(self._requests[request_id])

    def take_update(self, restarted: Sequence[str]) -> EvictionUpdate:
        """What this step's workers must know; drains the new holes.

        Args:
            restarted: requests that the workers learn anew in this step, who are
                told all their holes.

        """
        holes, self._new_holes = self._new_holes, {}
        for request_id in restarted:
            pages = self._pages.get(request_id)
            if pages is not None and len(pages.resident) < pages.num_pages:
                resident = set(pages.resident)
                holes[request_id] = tuple(i for i in range(pages.num_pages) if i not in resident)
        wanted = {}
        if self._policy.signals:
            for request_id in self._over_budget:
                self._pages[request_id].awaits_scores = True
                wanted[request_id] = self._requests[request_id].num_preemptions
        return EvictionUpdate(holes, wanted)

    def receive_scores(self, request_id: str, scores: PageScores) -> None:
        """Keep a report, unless the request is gone or was preempted since."""
        pages = self._pages.get(request_id)
        request = self._requests.get(request_id)
        if pages is None or request is None or scores.epoch != request.num_preemptions:
            return
        pages.scores = scores
        pages.awaits_scores = False

    def num_exact_tokens(self, request_id: str, num_tokens: int) -> int:
        """How many of the request's first ``num_tokens`` were computed while all before them was visible.

        Only their pages may be offered to others, in every group: what a hole hid from one layer
        is missing from the input of the next.
        """
        pages = self._pages.get(request_id)
        if pages is None or pages.exact_tokens is None:
            return num_tokens
        return min(num_tokens, pages.exact_tokens)

    def resident_pages(self, request_id: str) -> int:
        """Pages the request holds now."""
        pages = self._pages.get(request_id)
        return len(pages.resident) if pages is not None else 0

    def _trim(self, request: Request) -> None:
        pages = self._pages[request.request_id]
        num_tokens = request.num_computed_tokens
        view = self._view(pages, num_tokens, num_tokens - request.num_in_flight_tokens)
        plan = self._policy.plan(view, self._budget)
        if plan:
            self._evict(request, pages, view, plan)

    def _view(self, pages: RequestPages, num_tokens: int, num_processed_tokens: int) -> PageView:
        resident = np.asarray(pages.resident, dtype=np.int32)
        signals = {signal: np.full(len(resident), np.nan) for signal in self._policy.signals}
        if signals and pages.scores is not None:
            # The report may be older than the last eviction: match by page.
            _, at, where = np.intersect1d(resident, pages.scores.pages, assume_unique=True, return_indices=True)
            for signal, values in signals.items():
                values[at] = pages.scores.signals[signal][where]
        return PageView(resident, num_tokens, num_processed_tokens, signals)

    def _evict(self, request: Request, pages: RequestPages, view: PageView, plan: EvictionPlan) -> None:
        request_id = request.request_id
        blocks = self.req_to_blocks[request_id]
        # Last page first, so that of hashed pages the prefix stays hittable longest.
        freed = [blocks[page] for page in reversed(plan.pages)]
        for page in plan.pages:
            blocks[page] = self._null_block
        self.block_pool.free_blocks(freed)
        self._record_holes(request, pages, view, plan)
        self._new_holes[request_id] = self._new_holes.get(request_id, ()) + plan.pages

    def _record_holes(self, request: Request, pages: RequestPages, view: PageView, plan: EvictionPlan) -> None:
        """Book ``plan`` on the request's state, wherever the blocks went."""
        evicted = set(plan.pages)
        pages.resident = [page for page in pages.resident if page not in evicted]
        if pages.exact_tokens is None:
            pages.exact_tokens = view.num_tokens
        self._note_size(request.request_id, pages)
        self.stats.num_evictions += 1
        self.stats.num_evicted_pages += len(plan.pages)
        if self._trace is not None:
            self._trace.write(request.request_id, request.num_preemptions, view, plan, reason="budget")

    def _grow(self, request_id: str) -> None:
        """Book the blocks that vLLM has appended to the request's list."""
        pages = self._pages.setdefault(request_id, RequestPages())
        num_pages = len(self.req_to_blocks[request_id])
        pages.resident.extend(range(pages.num_pages, num_pages))
        pages.num_pages = num_pages
        self._note_size(request_id, pages)

    def _note_size(self, request_id: str, pages: RequestPages) -> None:
        if self._budget.excess_pages(len(pages.resident)):
            self._over_budget.add(request_id)
        else:
            self._over_budget.discard(request_id)

    # ---- vLLM's hooks ---------------------------------------------------------

    def allocate_new_blocks(self, request_id: str, num_tokens: int, num_tokens_main_model: int) -> list[KVCacheBlock]:
        new_blocks = super().allocate_new_blocks(request_id, num_tokens, num_tokens_main_model)
        self._grow(request_id)
        return new_blocks

    def get_num_blocks_to_allocate(
        self,
        request_id: str,
        num_tokens: int,
        new_computed_blocks: Sequence[KVCacheBlock],
        total_computed_tokens: int,
        num_local_computed_tokens: int,
        num_tokens_main_model: int,
        apply_admission_cap: bool = False,
        prefill_end: int = 0,
    ) -> int:
        """As vLLM's; of a prefix hit only the pages that will be kept count (and are pinned)."""
        plan = self._plan_hit(new_computed_blocks, num_local_computed_tokens)
        if not plan:
            return super().get_num_blocks_to_allocate(
                request_id,
                num_tokens,
                new_computed_blocks,
                total_computed_tokens,
                num_local_computed_tokens,
                num_tokens_main_model,
                apply_admission_cap=apply_admission_cap,
                prefill_end=prefill_end,
            )
        kept = self._without(new_computed_blocks, plan)
        num_kept = len(new_computed_blocks) - len(plan.pages)
        num_required = pages_for(num_tokens, self.block_size) - len(plan.pages)
        if apply_admission_cap:
            num_required = min(num_required, self.max_admission_blocks_per_request)
        num_new = max(num_required - num_kept, 0)
        if self._has_partial_local_hit(new_computed_blocks, num_local_computed_tokens):
            num_new += 1  # the private copy of the shared tail page
        return num_new + self._get_num_evictable_blocks(kept)

    def add_local_computed_blocks(
        self,
        request_id: str,
        new_computed_blocks: Sequence[KVCacheBlock],
        num_local_computed_tokens: int,
        num_external_computed_tokens: int,
    ) -> None:
        """Adopt a prefix hit; one that is longer than the budget comes with its holes."""
        plan = self._plan_hit(new_computed_blocks, num_local_computed_tokens)
        super().add_local_computed_blocks(
            request_id,
            self._without(new_computed_blocks, plan),
            num_local_computed_tokens,
            num_external_computed_tokens,
        )
        self._grow(request_id)
        if plan:
            self._null_block.ref_cnt -= len(plan.pages)  # vLLM's touch() has counted the holes
            pages = self._pages[request_id]
            view = self._view(pages, num_local_computed_tokens, num_local_computed_tokens)
            self._record_holes(self._requests[request_id], pages, view, plan)

    def pop_blocks_for_free(self, request_id: str) -> list[KVCacheBlock]:
        """Forget the request; holes have nothing to give back."""
        self._pages.pop(request_id, None)
        self._over_budget.discard(request_id)
        self._new_holes.pop(request_id, None)
        return [block for block in super().pop_blocks_for_free(request_id) if not block.is_null]

    # ---- prefix hits longer than the budget -----------------------------------

    def _plan_hit(self, hit_blocks: Sequence[KVCacheBlock], num_hit_tokens: int) -> EvictionPlan:
        """Which pages of a prefix hit not to take, as if trimmed right after computing it."""
        if not self._budget.excess_pages(len(hit_blocks)):
            return EvictionPlan()
        hit = RequestPages(resident=list(range(len(hit_blocks))))
        return self._policy.plan(self._view(hit, num_hit_tokens, num_hit_tokens), self._budget)

    def _without(self, blocks: Sequence[KVCacheBlock], plan: EvictionPlan) -> Sequence[KVCacheBlock]:
        if not plan:
            return blocks
        evicted = set(plan.pages)
        return [self._null_block if i in evicted else block for i, block in enumerate(blocks)]
