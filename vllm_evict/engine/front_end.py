"""What the API server does about eviction: refuses requests that cannot be, and tells clients what was dropped."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

from vllm.config import VllmConfig
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import SamplingParams

from vllm_evict.config import CONFIG_KEY, EvictionConfigError
from vllm_evict.engine.configure import config_of
from vllm_evict.engine.metrics import count_refused_request
from vllm_evict.pages import pages_for
from vllm_evict.requests import POLICY_KEY, asks_for_something, request_eviction, server_eviction


def check_request(vllm_config: VllmConfig, params: object, num_prompt_tokens: int) -> None:
    """Refuse a request whose wishes are wrong or not allowed, and one that the pool can never hold.

    Raises:
        VLLMValidationError: becomes HTTP 400.

    """
    config = config_of(vllm_config)
    if not isinstance(params, SamplingParams) or not config.enabled:
        return
    page_tokens = vllm_config.cache_config.block_size
    eviction = server_eviction(config, page_tokens)
    if asks_for_something(params.extra_args):
        try:
            eviction = request_eviction(config, params.extra_args, page_tokens, num_prompt_tokens)
        except EvictionConfigError as error:
            count_refused_request()
            raise VLLMValidationError(str(error), parameter=POLICY_KEY) from None
    num_pool_pages = vllm_config.cache_config.num_gpu_blocks
    if num_pool_pages is None:
        return
    # Each engine keeps one page as the null block.
    usable_pages = num_pool_pages // _num_engines(vllm_config) - 1
    most_tokens = min(vllm_config.model_config.max_model_len, num_prompt_tokens + (params.max_tokens or 0))
    num_pages = eviction.most_pages(most_tokens, vllm_config.max_in_flight_tokens)
    if num_pages > usable_pages:
        count_refused_request()
        raise VLLMValidationError(
            f"this request can never be held: {num_prompt_tokens} prompt tokens and max_tokens {params.max_tokens} "
            f"under policy {eviction.name} take {num_pages} pages at once ({pages_for(most_tokens, page_tokens)} "
            f"without eviction), and the server has {usable_pages} of {page_tokens} tokens. Ask for less, or for a "
            "policy that evicts.",
            parameter="max_tokens",
            value=params.max_tokens,
        )


def _num_engines(vllm_config: VllmConfig) -> int:
    """Data-parallel engines that ``cache_config.num_gpu_blocks`` of this front end is summed over."""
    parallel = vllm_config.parallel_config
    if parallel.data_parallel_rank_local is not None:
        return 1
    return parallel.data_parallel_size_local if parallel.local_engines_only else parallel.data_parallel_size


class StreamReport:
    """Puts on a stream's final usage chunk what the last output of the request said about eviction."""

    def __init__(self) -> None:
        self._summary: dict[str, Any] | None = None

    async def watch(self, results: AsyncIterator) -> AsyncIterator:
        """``results`` as they are; completions number theirs: ``(prompt, output)``."""
        async for result in results:
            output = result[1] if isinstance(result, tuple) else result
            if output.kv_transfer_params and CONFIG_KEY in output.kv_transfer_params:
                self._summary = output.kv_transfer_params
            yield result

    def complete(self, event: str) -> str:
        """A server-sent event; that of the usage chunk gets the field that answers without streaming have."""
        if self._summary is None or '"choices":[]' not in event:
            return event
        chunk = json.loads(event.removeprefix("data: "))
        chunk["kv_transfer_params"] = self._summary
        return f"data: {json.dumps(chunk, separators=(',', ':'), ensure_ascii=False)}\n\n"
