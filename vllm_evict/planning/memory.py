"""Pages, requests and bytes: what a cache of a given size holds, without and with a budget.

The pages of a request come from `vllm_evict.pages`, the formulas that the engine itself lives by. What is vLLM's own
(the window rule, how layers are grouped) is repeated here, and a test holds it against vLLM.
"""

from __future__ import annotations

from dataclasses import dataclass

from vllm_evict.config import EvictionConfig
from vllm_evict.pages import pages_for, peak_pages, steady_pages
from vllm_evict.planning.model import ModelShape


@dataclass(frozen=True)
class Serving:
    """How the model is served.

    Args:
        context_tokens: longest request (`--max-model-len`).
        page_tokens: tokens in a page (`--block-size`).
        max_num_batched_tokens: most tokens of one step.
        steps_in_flight: steps scheduled before the first has finished; 2 with async scheduling, else 1.
        kv_dtype: of the cache.
        num_ranks: tensor-parallel size. All bytes are those of one rank.

    """

    context_tokens: int
    page_tokens: int
    max_num_batched_tokens: int
    steps_in_flight: int
    kv_dtype: str
    num_ranks: int = 1

    @property
    def max_in_flight_tokens(self) -> int:
        """Most tokens scheduled and not finished, as vLLM counts them."""
        return self.steps_in_flight * self.max_num_batched_tokens


@dataclass(frozen=True)
class RequestPages:
    """Pool pages that one request holds at most.

    Args:
        decoding: once its prompt is processed.
        prefilling: while its prompt is processed; what vLLM sizes and admits by.

    """

    decoding: int
    prefilling: int


class CacheLayout:
    """How vLLM lays the layers of a model out in one pool.

    Layers of one kind share a page table. With two kinds, every table covers equally many layers, and a page of the
    pool is one page of each of them.
    """

    def __init__(self, shape: ModelShape, serving: Serving) -> None:
        self.shape = shape
        self.serving = serving
        counts = [n for n in (shape.num_full_layers, shape.num_window_layers) if n]
        least, most = min(counts), max(counts)
        # vLLM's rule: tables as long as the rarer kind, but padded to the longer one when they are about equal.
        self.layers_per_table = most if most < 1.5 * least else least
        self.num_full_tables = pages_for(shape.num_full_layers, self.layers_per_table)
        self.num_window_tables = pages_for(shape.num_window_layers, self.layers_per_table)

    @property
    def layer_token_bytes(self) -> int:
        """Bytes of one token in one layer."""
        return self.shape.layer_token_bytes(self.serving.kv_dtype, self.serving.num_ranks)

    @property
    def token_bytes(self) -> int:
        """Bytes of one token in all layers that keep every token."""
        return self.layer_token_bytes * self.shape.num_full_layers

    @property
    def page_bytes(self) -> int:
        """Bytes of one page of the pool."""
        return self.layer_token_bytes * self.serving.page_tokens * self.layers_per_table

    @property
    def full_pages(self) -> int:
        """Logical pages of a request of full length."""
        return pages_for(self.serving.context_tokens, self.serving.page_tokens)

    def request_pages(self, config: EvictionConfig) -> RequestPages:
        """What a request of full length holds under `config`."""
        budget_pages = config.page_budget(self.serving.page_tokens).budget_pages
        decoding = prefilling = self.full_pages
        if budget_pages is not None:
            in_flight = self.serving.max_in_flight_tokens
            decoding = min(steady_pages(budget_pages), self.full_pages)
            prefilling = min(peak_pages(budget_pages, in_flight, self.serving.page_tokens), self.full_pages)
        return RequestPages(
            decoding * self.num_full_tables + self._window_pages(self.serving.steps_in_flight),
            prefilling * self.num_full_tables + self._window_pages(self.serving.max_in_flight_tokens),
        )

    def _window_pages(self, in_flight_tokens: int) -> int:
        """Pages in the tables of sliding layers: the window, what is in flight, and one it may start inside of."""
        if self.shape.window_tokens is None:
            return 0
        num_tokens = min(self.shape.window_tokens - 1 + in_flight_tokens, self.serving.context_tokens)
        return (pages_for(num_tokens, self.serving.page_tokens) + 1) * self.num_window_tables


@dataclass(frozen=True)
class Fit:
    """How many requests of full length a pool holds.

    Args:
        num_requests: all decoding but one that is still in its prompt, which is how a full server looks.
        vllm_concurrency: the figure in vLLM's start-up line "Maximum concurrency": as if all were in their prompts.

    """

    num_requests: int
    vllm_concurrency: float


def fit(request: RequestPages, num_pages: int) -> Fit:
    """How often `request` fits a pool of `num_pages`, one of which vLLM keeps as the null block."""
    usable_pages = num_pages - 1
    num_requests = 0
    if request.prefilling <= usable_pages:
        num_requests = 1 + (usable_pages - request.prefilling) // request.decoding
    return Fit(num_requests, num_pages / request.prefilling)


def largest_budget_tokens(layout: CacheLayout, policy: str, num_requests: int, num_pages: int) -> int | None:
    """The largest budget at which `num_requests` fit; None if none does.

    Only budgets below the full length are tried: whatever evicts nothing is no answer.
    """
    page_tokens = layout.serving.page_tokens

    def fits(budget_pages: int) -> bool:
        config = EvictionConfig(policy=policy, budget=budget_pages * page_tokens)
        return fit(layout.request_pages(config), num_pages).num_requests >= num_requests

    # Sinks and the page being written are the least that a budget holds.
    least = pages_for(EvictionConfig().sink, page_tokens) + 1
    if layout.full_pages <= least or not fits(least):
        return None
    low, high = least, layout.full_pages
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low * page_tokens
