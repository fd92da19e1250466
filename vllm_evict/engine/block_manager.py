"""The block manager: vLLM's full-attention manager that makes holes.

It follows, per request, which logical pages are resident; asks the policy for
victims at the start of a step, before anybody allocates; and returns their
blocks to the pool. The request's list keeps the null block where a page was, so
its length stays logical and everything else in vLLM goes on counting tokens.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.v1.request import Request

from vllm_evict.config import EvictionConfig, EvictionConfigError
from vllm_evict.engine.log import logger
from vllm_evict.engine.messages import EvictionUpdate, PageScores
from vllm_evict.engine.pressure import Offers
from vllm_evict.engine.prior import PriorScores
from vllm_evict.engine.rebase import PositionKeeper
from vllm_evict.engine.request_pages import RequestPages
from vllm_evict.engine.stats import EvictionStats
from vllm_evict.engine.trace import EvictionTrace
from vllm_evict.pages import EvictionPlan, PageView, pages_for
from vllm_evict.requests import RequestEviction, asks_for_something, request_eviction, server_eviction

if TYPE_CHECKING:
    from vllm_evict.engine.spec import EvictingAttentionSpec


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
        self._prior = PriorScores()
        self._pages: dict[str, RequestPages] = {}
        self._over_budget: set[str] = set()
        self._over_floor: set[str] = set()
        self._new_holes: dict[str, tuple[int, ...]] = {}
        self._offers: Offers | None = None
        self._positions: PositionKeeper | None = None

    def bind(
        self,
        config: EvictionConfig,
        requests: Mapping[str, Request],
        trace: EvictionTrace | None = None,
        position_limit: int | None = None,
    ) -> None:
        """Connect to the scheduler.

        Args:
            config: the policy to apply.
            requests: its live requests.
            trace: where to write evictions down.
            position_limit: tokens after which rotary positions are rebased; None = never.

        """
        self._requests = requests
        self._config = config
        self._default = server_eviction(config, self.block_size)
        self._trace = trace
        if position_limit is not None:
            self._positions = PositionKeeper(position_limit, self.block_size, self.block_pool)

    # ---- one step -------------------------------------------------------------

    def new_step_starts(self) -> None:
        """Trim every request that is over its budget, scheduled or not."""
        super().new_step_starts()
        self._offers = None
        if self._positions is not None:
            self._positions.new_step_starts()
        for request_id in sorted(self._over_budget):
            if not self._pages[request_id].awaits_scores:
                self._trim(self._requests[request_id])

    def relieve(self, num_pages: int, for_priority: int | None = None) -> bool:
        """Trim requests over their floor, least valuable page first, until the pool has ``num_pages`` free.

        A page that several requests hold goes only if all of them can give it up.

        Args:
            num_pages: how many.
            for_priority: priority value of who asks. Then pages of less important requests (higher values) go
                first, and those of more important ones never. None: all are equal.

        Returns:
            Whether any page came free.

        """
        if self._offers is None:
            self._offers = Offers(self._on_offer(by_priority=for_priority is not None))

        def may_give(request_id: str, page: int, block: KVCacheBlock, num_taken: int) -> bool:
            pages, request = self._pages.get(request_id), self._requests[request_id]
            if pages is None or self.req_to_blocks[request_id][page] is not block:
                return False  # it was preempted in this step
            # Pages that this step will fill are hashed already, as seeing everything that is there now.
            fills_hashed_page = self.num_cached_block.get(request_id, 0) * self.block_size > request.num_computed_tokens
            return (
                not fills_hashed_page
                and pages.eviction.floor.excess_pages(len(pages.resident)) >= num_taken
                and (for_priority is None or request.priority >= for_priority)
            )

        taken = self._offers.take(num_pages - self.block_pool.get_num_free_blocks(), may_give)
        for request_id, victims in taken.items():
            plan = EvictionPlan(tuple(sorted(victims)))
            self._evict(self._requests[request_id], self._view_now(request_id), plan, reason="pressure")
        return bool(taken)

    def _on_offer(self, by_priority: bool) -> Iterator[tuple[str, int, KVCacheBlock, int, float]]:
        for request_id in sorted(self._over_floor):
            eviction, blocks = self._pages[request_id].eviction, self.req_to_blocks[request_id]
            importance = -self._requests[request_id].priority if by_priority else 0
            pages, ranks = eviction.policy.ranked(self._view_now(request_id), eviction.floor)
            for page, rank in zip(pages.tolist(), ranks.tolist(), strict=True):
                yield request_id, page, blocks[page], importance, rank

    def take_update(self, scheduled: Collection[str], restarted: Sequence[str]) -> EvictionUpdate:
        """What this step's workers must know; drains the new holes.

        Args:
            scheduled: requests that take part in this step.
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
        for request_id in self._over_budget | self._may_be_relieved():
            pages = self._pages[request_id]
            # Of a request that sits out a report on its way says it all; a second one would pass for its next step's.
            if pages.eviction.signals and not (pages.awaits_scores and request_id not in scheduled):
                pages.awaits_scores = True
                pages.num_pages_asked = pages.num_pages
                wanted[request_id] = self._requests[request_id].num_preemptions
        rebases = self._positions.take() if self._positions is not None else {}
        self.stats.rebased(len(rebases))
        return EvictionUpdate(holes, wanted, rebases)

    def _may_be_relieved(self) -> set[str]:
        """Requests that may soon have to give up pages to others, and have grown a page since they were last scored."""
        if not self._over_floor or self.block_pool.get_num_free_blocks() > len(self.block_pool.blocks) // 8:
            return set()
        return {r for r in self._over_floor if self._pages[r].num_pages != self._pages[r].num_pages_asked}

    def receive_scores(self, request_id: str, scores: PageScores) -> None:
        """Keep a report, unless the request is gone or was preempted since."""
        pages = self._pages.get(request_id)
        request = self._requests.get(request_id)
        if pages is None or request is None or scores.epoch != request.num_preemptions:
            return
        pages.scores = scores = scores.or_else(pages.scores)
        pages.awaits_scores = False
        self._prior.remember(scores, self.req_to_blocks[request_id])

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

    def offset_pages(self, request_id: str) -> int:
        """By how many pages the request's rotary positions lag behind its tokens."""
        pages = self._pages.get(request_id)
        return pages.offset_pages if pages is not None else 0

    def summary(self, request_id: str) -> dict[str, str | int] | None:
        """What a client is told of its request: policy, tokens resident and evicted. None if it never ran."""
        pages = self._pages.get(request_id)
        if pages is None:
            return None
        num_evicted = (pages.num_pages - len(pages.resident)) * self.block_size
        request = self._requests[request_id]
        # The last token was sampled, not computed; a step in flight may have got ahead of a stop.
        num_tokens = min(request.num_computed_tokens, request.num_tokens - 1)
        return {
            "policy": pages.eviction.name,
            "evicted_tokens": num_evicted,
            "resident_tokens": num_tokens - num_evicted,
        }

    def forget_prior_scores(self) -> None:
        """The prefix cache was reset."""
        self._prior = PriorScores()

    def _eviction_of(self, request_id: str) -> RequestEviction:
        if request_id in self._pages:
            return self._pages[request_id].eviction
        request = self._requests[request_id]
        xargs = request.sampling_params.extra_args if request.sampling_params is not None else None
        if not asks_for_something(xargs):
            return self._default
        try:
            return request_eviction(self._config, xargs, self.block_size, request.num_prompt_tokens)
        except EvictionConfigError as error:  # the front end refuses it, but somebody went round it
            logger.warning("KV eviction: request %s is served as the server's settings say: %s", request_id, error)
            return self._default

    def _trim(self, request: Request) -> None:
        eviction = self._pages[request.request_id].eviction
        view = self._view_now(request.request_id)
        plan = eviction.policy.plan(view, eviction.budget)
        if plan:
            self._evict(request, view, plan, reason="budget")

    def _view_now(self, request_id: str) -> PageView:
        request, pages = self._requests[request_id], self._pages[request_id]
        num_tokens = request.num_computed_tokens
        return pages.view(num_tokens, num_tokens - request.num_in_flight_tokens)

    def _evict(self, request: Request, view: PageView, plan: EvictionPlan, reason: str) -> None:
        request_id = request.request_id
        blocks = self.req_to_blocks[request_id]
        # Last page first, so that of hashed pages the prefix stays hittable longest.
        freed = [blocks[page] for page in reversed(plan.pages)]
        for page in plan.pages:
            blocks[page] = self._null_block
        self.block_pool.free_blocks(freed)
        self._record_holes(request, view, plan, reason, num_freed=sum(block.ref_cnt == 0 for block in freed))
        self._new_holes[request_id] = self._new_holes.get(request_id, ()) + plan.pages

    def _record_holes(self, request: Request, view: PageView, plan: EvictionPlan, reason: str, num_freed: int) -> None:
        """Book ``plan`` on the request's state, wherever the blocks went."""
        pages = self._pages[request.request_id]
        for page in plan.pages:
            pages.resident.remove(page)
        if pages.exact_tokens is None:
            pages.exact_tokens = view.num_tokens
        self._note_size(request.request_id, pages)
        self.stats.num_resident_pages -= len(plan.pages)
        self.stats.evicted(pages.eviction.name, reason, view, plan, num_freed)
        if self._trace is not None:
            self._trace.write(request.request_id, request.num_preemptions, view, plan, reason)

    def _grow(self, request_id: str) -> None:
        """Book the blocks that vLLM has appended to the request's list."""
        pages = self._pages.get(request_id)
        if pages is None:
            pages = self._pages[request_id] = RequestPages(self._eviction_of(request_id))
        num_pages = len(self.req_to_blocks[request_id])
        num_new = num_pages - pages.num_pages
        pages.resident.extend(range(pages.num_pages, num_pages))
        pages.num_pages = num_pages
        self.stats.num_resident_pages += num_new
        self.stats.num_logical_pages += num_new
        self._note_size(request_id, pages)

    def _note_size(self, request_id: str, pages: RequestPages) -> None:
        for holders, budget in (
            (self._over_budget, pages.eviction.budget),
            (self._over_floor, pages.eviction.floor),
        ):
            if budget is not None and budget.excess_pages(len(pages.resident)):
                holders.add(request_id)
            else:
                holders.discard(request_id)

    # ---- vLLM's hooks ---------------------------------------------------------

    def allocate_new_blocks(self, request_id: str, num_tokens: int, num_tokens_main_model: int) -> list[KVCacheBlock]:
        if self._is_rebase_due(request_id, num_tokens):
            self._rebase(request_id)
        new_blocks = super().allocate_new_blocks(request_id, num_tokens, num_tokens_main_model)
        if new_blocks:  # in most steps of a decoding request there are none
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
        if request_id in self.num_cached_block and not apply_admission_cap:
            # As vLLM's for a running request, which is asked in every step and has no prefix hit.
            blocks = self.req_to_blocks[request_id]
            num_new = max(pages_for(num_tokens, self.block_size) - len(blocks), 0)
            if self._is_rebase_due(request_id, num_tokens):
                num_new += self._positions.num_copies(blocks, self._pages[request_id].resident, num_holders=1)
            return num_new
        if apply_admission_cap:
            spec = self.kv_cache_spec
            self.max_admission_blocks_per_request = self._eviction_of(request_id).most_pages(
                spec.max_request_tokens, spec.max_in_flight_tokens
            )
        plan = self._plan_hit(request_id, new_computed_blocks, num_local_computed_tokens)
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
        if self._positions is not None and not apply_admission_cap and self._positions.is_due(num_tokens, 0):
            resident = [page for page, block in enumerate(kept) if not block.is_null]
            if self._positions.must_wait(kept, resident):
                return len(self.block_pool.blocks)  # never free, so it stays in the queue; next step they are there
            num_new += self._positions.num_copies(kept, resident, num_holders=0)
        return num_new + self._get_num_evictable_blocks(kept)

    def add_local_computed_blocks(
        self,
        request_id: str,
        new_computed_blocks: Sequence[KVCacheBlock],
        num_local_computed_tokens: int,
        num_external_computed_tokens: int,
    ) -> None:
        """Adopt a prefix hit; one that is longer than the budget comes with its holes."""
        prior = self._prior_of(request_id, new_computed_blocks)
        plan = self._plan_hit(request_id, new_computed_blocks, num_local_computed_tokens)
        null_ref_cnt = self._null_block.ref_cnt
        super().add_local_computed_blocks(
            request_id,
            self._without(new_computed_blocks, plan),
            num_local_computed_tokens,
            num_external_computed_tokens,
        )
        # Holes are not given back one by one. touch() counts them in vLLM 0.32, and leaves them alone in 0.33.
        self._null_block.ref_cnt = null_ref_cnt
        self._grow(request_id)
        pages = self._pages[request_id]
        pages.scores = prior
        if plan:
            view = pages.view(num_local_computed_tokens, num_local_computed_tokens)
            self._record_holes(self._requests[request_id], view, plan, reason="budget", num_freed=0)

    def cache_blocks(self, request: Request, *args, **kwargs) -> None:
        """As vLLM's."""
        num_cached = self.num_cached_block.get(request.request_id, 0)
        super().cache_blocks(request, *args, **kwargs)
        if self._positions is not None:
            now_cached = self.num_cached_block.get(request.request_id, 0)
            self._positions.filled(self.req_to_blocks[request.request_id][num_cached:now_cached])

    def pop_blocks_for_free(self, request_id: str) -> list[KVCacheBlock]:
        """Forget the request; holes have nothing to give back."""
        pages = self._pages.pop(request_id, None)
        if pages is not None:
            self.stats.num_resident_pages -= len(pages.resident)
            self.stats.num_logical_pages -= pages.num_pages
        self._over_budget.discard(request_id)
        self._over_floor.discard(request_id)
        self._new_holes.pop(request_id, None)
        if self._positions is not None:
            self._positions.forget(request_id)
        return [block for block in super().pop_blocks_for_free(request_id) if not block.is_null]

    # ---- positions ------------------------------------------------------------

    def _is_rebase_due(self, request_id: str, num_tokens: int) -> bool:
        if self._positions is None:
            return False
        pages = self._pages.get(request_id)
        return pages is not None and self._positions.is_due(num_tokens, pages.offset_pages)

    def _rebase(self, request_id: str) -> None:
        assert self._positions is not None
        pages, request = self._pages[request_id], self._requests[request_id]
        rebase = self._positions.rebase(request_id, self.req_to_blocks[request_id], pages.resident)
        assert rebase.offset_pages > pages.offset_pages, "a request's pages take all positions there are"
        pages.offset_pages = rebase.offset_pages
        if self._trace is not None:
            # One that begins with a prefix hit is not yet told that it is computed.
            num_tokens = request.num_computed_tokens or pages.num_pages * self.block_size
            self._trace.write_rebase(
                request_id, request.num_preemptions, num_tokens, rebase.offset_pages * self.block_size, rebase.pages
            )

    # ---- prefix hits longer than the budget -----------------------------------

    def _plan_hit(self, request_id: str, hit_blocks: Sequence[KVCacheBlock], num_hit_tokens: int) -> EvictionPlan:
        """Which pages of a prefix hit not to take, as if trimmed right after computing it."""
        eviction = self._eviction_of(request_id)
        budget = eviction.budget
        if eviction.floor is not None:
            # With its first chunk the hit must fit in the pool, or the request would wait for ever.
            first_chunk_pages = pages_for(self.kv_cache_spec.max_in_flight_tokens, self.block_size) + 1
            if len(hit_blocks) + first_chunk_pages >= len(self.block_pool.blocks):
                budget = eviction.floor
        if not budget.excess_pages(len(hit_blocks)):
            return EvictionPlan()
        hit = RequestPages(
            eviction, resident=list(range(len(hit_blocks))), scores=self._prior_of(request_id, hit_blocks)
        )
        return eviction.policy.plan(hit.view(num_hit_tokens, num_hit_tokens), budget)

    def _prior_of(self, request_id: str, hit_blocks: Sequence[KVCacheBlock]) -> PageScores | None:
        """What earlier owners last reported of the pages of a prefix hit."""
        signals = self._eviction_of(request_id).signals
        return self._prior.recall(hit_blocks, signals) if signals and hit_blocks else None

    def _without(self, blocks: Sequence[KVCacheBlock], plan: EvictionPlan) -> Sequence[KVCacheBlock]:
        if not plan:
            return blocks
        evicted = set(plan.pages)
        return [self._null_block if i in evicted else block for i, block in enumerate(blocks)]
