"""What one request may hold, against what the pool has; said once in the log."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_evict.config import UNLIMITED, EvictionConfig, EvictionConfigError, flag_name
from vllm_evict.pages import pages_for, steady_pages

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig

    from vllm_evict.engine.block_manager import EvictingBlockManager
    from vllm_evict.engine.spec import EvictingAttentionSpec


def check_pool(spec: EvictingAttentionSpec, num_blocks: int, block_bytes: int) -> None:
    """Refuse a pool in which one request of ``max_model_len`` tokens would never finish.

    Args:
        spec: of the evicting layers.
        num_blocks: of the pool, the null block included.
        block_bytes: bytes that one block takes, all layers together.

    Raises:
        EvictionConfigError: with the number of pages it takes.

    """
    if spec.budget_tokens is None or spec.budget_tokens >= spec.max_request_tokens:
        return  # nothing will be evicted, and what vLLM starts with is vLLM's business
    usable_pages = num_blocks - 1  # vLLM keeps one as the null block
    if usable_pages < spec.max_pages:
        least = spec.max_pages + 1
        raise EvictionConfigError(
            f"the KV cache has {max(usable_pages, 0)} usable pages of {spec.block_size} tokens, and one request may "
            f"hold {spec.max_pages} (budget or floor {spec.budget_tokens} tokens, and {spec.max_in_flight_tokens} in "
            f"flight). Give the KV cache {least} pages (--kv-cache-memory-bytes {least * block_bytes}), or lower "
            f"{flag_name('budget')} (or {flag_name('floor')}) or --max-num-batched-tokens."
        )


def model_limit(model_config: ModelConfig) -> int:
    """Tokens that the model was made for, whatever ``max_model_len`` says."""
    model_tokens = model_config.get_and_verify_max_len(None)
    text_config = model_config.hf_text_config
    if (getattr(text_config, "rope_parameters", None) or {}).get("rope_type") == "dynamic":
        # vLLM counts ``factor`` times as many, but its table of dynamic NTK ends here.
        model_tokens = min(model_tokens, text_config.max_position_embeddings)
    return model_tokens


def check_positions(config: EvictionConfig, vllm_config: VllmConfig, page_tokens: int) -> None:
    """Refuse settings under which the pages that one request holds would not fit into the model's positions.

    Args:
        config: the settings.
        vllm_config: the model, and what is in flight.
        page_tokens: tokens in a page. An attention backend may choose others than were known before it was.

    Raises:
        EvictionConfigError: pages never go, or too few positions; with the numbers.

    """
    if not config.rebases:
        return
    if not config.evicts or config.budget == UNLIMITED:
        what = f"{flag_name('budget')} {UNLIMITED}" if config.evicts else f"{flag_name('policy')} {config.policy}"
        raise EvictionConfigError(
            f"{flag_name('positions')} rebase does not work with {what}: a request that holds all its tokens has no "
            f"lower positions to move to. Set {flag_name('budget')} to a number of tokens, with a policy that evicts."
        )
    if vllm_config.parallel_config.pipeline_parallel_size > 1:
        raise EvictionConfigError(
            f"{flag_name('positions')} rebase does not work with pipeline parallelism: it is not tested yet. Use "
            f"--tensor-parallel-size, or {flag_name('positions')} absolute."
        )
    model_tokens = model_limit(vllm_config.model_config)
    if vllm_config.model_config.max_model_len <= model_tokens:
        return  # no request gets that far
    in_flight_tokens = vllm_config.max_in_flight_tokens
    # A step begins at the budget, its newest page perhaps half full; then tokens follow without gap.
    most_tokens = pages_for(config.budget, page_tokens) * page_tokens + in_flight_tokens
    if most_tokens > model_tokens:
        raise EvictionConfigError(
            f"{flag_name('positions')} rebase needs positions for all tokens that a request holds at once: "
            f"{flag_name('budget')} {config.budget} in pages of {page_tokens}, and {in_flight_tokens} in flight, are "
            f"{most_tokens} tokens, and the model has {model_tokens} positions. Lower {flag_name('budget')} or "
            "--max-num-batched-tokens."
        )


def startup_line(
    config: EvictionConfig, evictor: EvictingBlockManager, num_blocks: int, position_limit: int | None = None
) -> str:
    """Policy, lengths in tokens and pages, bounds, and concurrency without and with eviction."""
    spec = evictor.kv_cache_spec
    page_tokens = spec.block_size
    budget, floor = config.page_budget(page_tokens), config.page_floor(page_tokens)
    usable_pages = num_blocks - 1
    full_pages = pages_for(spec.max_request_tokens, page_tokens)
    without = f"{usable_pages / full_pages:.2f}x requests of {spec.max_request_tokens:,} tokens"
    least = floor or budget
    if least.budget_pages is None:
        return (
            f"KV eviction {config.policy}: nothing is evicted; {usable_pages} usable pages of "
            f"{page_tokens} tokens, concurrency {without}"
        )
    steady = min(steady_pages(least.budget_pages), full_pages)

    def length(name: str, tokens: int | str, pages: int | None) -> str:
        return f"{name} {tokens}" if pages is None else f"{name} {tokens:,} tokens = {pages} pages"

    lengths = [length("budget", config.budget, budget.budget_pages)]
    if floor is not None:
        lengths.append(length("floor", config.floor, floor.budget_pages))
    lengths.append(length("sink", config.sink, least.sink_pages))
    lengths.append(length("recent", config.recent_tokens, (budget if budget.budget_pages else least).recent_pages))
    if position_limit is not None:
        lengths.append(f"positions rebased at {position_limit:,}")
    return (
        f"KV eviction {config.policy}: pages of {page_tokens} tokens; {'; '.join(lengths)}; "
        f"a request {'holds' if floor is None else 'can be brought down to'} at most {steady} pages decoding, "
        f"{spec.max_pages} in prefill; {usable_pages} usable pages: concurrency without eviction {without}, "
        f"with eviction {usable_pages / steady:.2f}x decoding "
        f"({usable_pages / spec.max_pages:.2f}x in prefill)"
    )
