"""The scheduler hook: ships holes to the workers and scores back to the block manager."""

from __future__ import annotations

from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.request_queue import SchedulingPolicy
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from vllm_evict.config import CONFIG_KEY
from vllm_evict.engine.block_manager import EvictingBlockManager
from vllm_evict.engine.compat import limit_prefix_cache
from vllm_evict.engine.configure import config_of
from vllm_evict.engine.log import logger
from vllm_evict.engine.messages import attach_update, report_of
from vllm_evict.engine.sizing import check_pool, check_positions, model_limit, startup_line
from vllm_evict.engine.trace import EvictionTrace


class EvictionSchedulerMixin:
    """Adds eviction to a vLLM scheduler; everything else stays vLLM's.

    Raises:
        ValueError: no layer of the model carries the evicting spec (the workers
            run without the plugin), or the pool cannot hold one request.

    """

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        config = config_of(self.vllm_config)
        self.page_evictor = self._find_evictor()
        num_blocks = self.kv_cache_config.num_blocks
        pool_bytes = sum(tensor.size for tensor in self.kv_cache_config.kv_cache_tensors)
        check_pool(self.page_evictor.kv_cache_spec, num_blocks, pool_bytes // num_blocks)
        check_positions(config, self.vllm_config, self.page_evictor.block_size)
        trace = EvictionTrace(config.trace) if config.trace is not None else None
        position_limit = model_limit(self.vllm_config.model_config) if config.rebases else None
        self.page_evictor.bind(config, self.requests, trace, position_limit)
        if config.page_floor(self.page_evictor.block_size) is not None:
            self._allocate_slots = self.kv_cache_manager.allocate_slots
            self.kv_cache_manager.allocate_slots = self._allocate_or_relieve
        self.page_evictor.stats.keeps_shares = self.log_stats
        limit_prefix_cache(self.kv_cache_manager.coordinator, self.page_evictor.num_exact_tokens)
        logger.info(startup_line(config, self.page_evictor, num_blocks, position_limit))

    def _find_evictor(self) -> EvictingBlockManager:
        managers = self.kv_cache_manager.coordinator.single_type_managers
        evictors = [m for m in managers if isinstance(m, EvictingBlockManager)]
        if not any(isinstance(m.kv_cache_spec, FullAttentionSpec) for m in managers):
            raise ValueError(
                "KV eviction acts on full-attention layers, and this model has none (layers with a sliding window "
                "give their pages back by themselves). Drop --kv-eviction for this model."
            )
        if not evictors:
            raise ValueError(
                "KV eviction is on, but no attention layer reported an evicting KV cache: the "
                "workers did not load vllm-evict. Install vllm-evict in the workers' environment "
                "or drop --kv-eviction."
            )
        if len(evictors) > 1:
            raise ValueError(
                f"KV eviction got {len(evictors)} groups of full-attention layers and supports "
                "one per model. Drop --kv-eviction for this model."
            )
        return evictors[0]

    def schedule(self, *args, **kwargs) -> SchedulerOutput:
        output = super().schedule(*args, **kwargs)
        restarted = [request.req_id for request in output.scheduled_new_reqs]
        restarted += output.scheduled_cached_reqs.resumed_req_ids
        attach_update(output, self.page_evictor.take_update(output.num_scheduled_tokens, restarted))
        return output

    def _allocate_or_relieve(self, request: Request, num_new_tokens: int, *args, **kwargs) -> KVCacheBlocks | None:
        """vLLM's ``allocate_slots``; where it would preempt, requests over their floor give up pages first."""
        blocks = self._allocate_slots(request, num_new_tokens, *args, **kwargs)
        # Who waits to be admitted goes on waiting, as in vLLM: pages are taken only where work would be lost.
        if blocks is None and request.status == RequestStatus.RUNNING:
            for_priority = request.priority if self.policy == SchedulingPolicy.PRIORITY else None
            if self.page_evictor.relieve(self._num_pages_needed(request, num_new_tokens), for_priority):
                blocks = self._allocate_slots(request, num_new_tokens, *args, **kwargs)
                if blocks is not None:
                    self.page_evictor.stats.preemption_saved()
        return blocks

    def _num_pages_needed(self, request: Request, num_new_tokens: int) -> int:
        """Free pages that ``allocate_slots`` asks for, of all groups, for a running request."""
        num_tokens = min(request.num_computed_tokens + num_new_tokens, self.max_model_len)
        return self.kv_cache_manager.coordinator.get_num_blocks_to_allocate(
            request_id=request.request_id,
            num_tokens=num_tokens,
            new_computed_blocks=self.kv_cache_manager.empty_kv_cache_blocks.blocks,
            num_encoder_tokens=0,
            total_computed_tokens=request.num_computed_tokens,
            num_local_computed_tokens=request.num_computed_tokens,
            num_tokens_main_model=num_tokens,
        )

    def update_from_output(self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput):
        report = report_of(model_runner_output)
        if report is not None:
            for request_id, scores in report.scores.items():
                self.page_evictor.receive_scores(request_id, scores)
            self.page_evictor.stats.scored(report.seconds)
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        self._tell_of_stop_strings(outputs)
        return outputs

    def _tell_of_stop_strings(self, outputs: dict[int, EngineCoreOutputs]) -> None:
        """A stop string is found by the front end, to which each output so far must be the last."""
        for client_outputs in outputs.values():
            for output in client_outputs.outputs:
                request = self.requests.get(output.request_id)
                if request is not None and request.sampling_params is not None and request.sampling_params.stop:
                    summary = self.page_evictor.summary(request.request_id)
                    output.kv_transfer_params = {CONFIG_KEY: summary} if summary is not None else None

    def make_stats(self, *args, **kwargs) -> SchedulerStats | None:
        stats = super().make_stats(*args, **kwargs)
        if stats is not None:
            # A free dict that crosses processes; no connector can be beside eviction to fill it.
            stats.kv_connector_stats = {CONFIG_KEY: self.page_evictor.stats.take_report(self.page_evictor.block_size)}
        return stats

    def _free_request(self, request: Request, *args, **kwargs):
        summary = self.page_evictor.summary(request.request_id)
        kv_transfer_params, *others = super()._free_request(request, *args, **kwargs)
        if summary is not None:
            kv_transfer_params = {**(kv_transfer_params or {}), CONFIG_KEY: summary}
        return kv_transfer_params, *others

    def reset_prefix_cache(self, *args, **kwargs) -> bool:
        self.page_evictor.forget_prior_scores()
        return super().reset_prefix_cache(*args, **kwargs)


class EvictionScheduler(EvictionSchedulerMixin, Scheduler):
    """vLLM's synchronous scheduler, evicting."""


class AsyncEvictionScheduler(EvictionSchedulerMixin, AsyncScheduler):
    """vLLM's asynchronous scheduler, evicting."""
