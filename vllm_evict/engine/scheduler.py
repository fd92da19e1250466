"""The scheduler hook: ships holes to the workers and scores back to the block manager."""

from __future__ import annotations

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.outputs import ModelRunnerOutput

from vllm_evict.engine.block_manager import EvictingBlockManager
from vllm_evict.engine.compat import limit_prefix_cache
from vllm_evict.engine.configure import config_of
from vllm_evict.engine.log import logger
from vllm_evict.engine.messages import attach_update, report_of
from vllm_evict.engine.sizing import check_pool, startup_line
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
        trace = EvictionTrace(config.trace) if config.trace is not None else None
        self.page_evictor.bind(config, self.requests, trace)
        limit_prefix_cache(self.kv_cache_manager.coordinator, self.page_evictor.num_exact_tokens)
        logger.info(startup_line(config, self.page_evictor, num_blocks))

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
        attach_update(output, self.page_evictor.take_update(restarted))
        return output

    def update_from_output(self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput):
        report = report_of(model_runner_output)
        if report is not None:
            for request_id, scores in report.scores.items():
                self.page_evictor.receive_scores(request_id, scores)
        return super().update_from_output(scheduler_output, model_runner_output)


class EvictionScheduler(EvictionSchedulerMixin, Scheduler):
    """vLLM's synchronous scheduler, evicting."""


class AsyncEvictionScheduler(EvictionSchedulerMixin, AsyncScheduler):
    """vLLM's asynchronous scheduler, evicting."""
