"""The worker hook: evicting attention in the model, resident pages before each step."""

from __future__ import annotations

import torch
from vllm import envs
from vllm.config import set_current_vllm_config
from vllm.distributed import get_pp_group, get_tp_group
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec, UniformTypeKVCacheSpecs
from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput
from vllm.v1.worker.block_table import get_block_table_width
from vllm.v1.worker.cpu_worker import CPUWorker
from vllm.v1.worker.gpu_worker import Worker

from vllm_evict.config import EvictionConfigError, flag_name
from vllm_evict.engine.attention.metadata import ResidentPagesBuilderMixin
from vllm_evict.engine.compat import attention_backends, xformers_backend
from vllm_evict.engine.configure import config_of
from vllm_evict.engine.host_copy import Arriving, HostCopy
from vllm_evict.engine.positions import RotaryPositions, check_keys_turn, rotations_of
from vllm_evict.engine.rows import RowBuffers
from vllm_evict.engine.runners import adapter_of
from vllm_evict.engine.runtime import EvictionRuntime
from vllm_evict.engine.sizing import check_pool, model_limit
from vllm_evict.engine.spec import EvictingAttentionSpec
from vllm_evict.engine.stages import StageRelay, group_for_relay
from vllm_evict.engine.support import check_layers
from vllm_evict.pages import pages_for

BACKENDS = {
    AttentionBackendEnum.CPU_ATTN: "vllm_evict.engine.attention.cpu.EvictionCPUAttentionBackend",
    AttentionBackendEnum.FLASH_ATTN: "vllm_evict.engine.attention.flash_attn.EvictionFlashAttentionBackend",
    AttentionBackendEnum.FLASHINFER: "vllm_evict.engine.attention.flashinfer.EvictionFlashInferBackend",
    AttentionBackendEnum.TRITON_ATTN: "vllm_evict.engine.attention.triton_attn.EvictionTritonAttentionBackend",
    xformers_backend(): "vllm_evict.engine.attention.xformers.EvictionXFormersBackend",
}
"""Attention backends that can evict, and what takes their place."""


class EvictionWorkerMixin:
    """Adds eviction to a vLLM worker, whichever model runner it has."""

    eviction: EvictionRuntime
    stage_relay: StageRelay | None = None
    _warms_up = False

    def load_model(self, **kwargs) -> None:
        with attention_backends(BACKENDS, self.vllm_config):
            super().load_model(**kwargs)
        layers = self.vllm_config.compilation_config.static_forward_context.values()
        check_layers(layers, config_of(self.vllm_config))

    def get_kv_cache_spec(self) -> dict[str, KVCacheSpec]:
        # Our backend's customize_spec() reads the settings from the current config.
        with set_current_vllm_config(self.vllm_config):
            return super().get_kv_cache_spec()

    def determine_available_memory(self) -> int:
        available_bytes = super().determine_available_memory()
        specs = list(self.get_kv_cache_spec().values())
        if all(isinstance(spec, EvictingAttentionSpec) for spec in specs) and specs:
            # Before vLLM says it in GiB. With other layers beside ours a page is not simply one of each.
            block_bytes = sum(spec.page_size_bytes for spec in specs)
            check_pool(specs[0], available_bytes // block_bytes, block_bytes)
        return available_bytes

    def initialize_from_config(self, kv_cache_config: KVCacheConfig) -> None:
        super().initialize_from_config(kv_cache_config)
        groups = [
            (group_id, group)
            for group_id, group in enumerate(kv_cache_config.kv_cache_groups)
            if isinstance(_spec_of_a_layer(group.kv_cache_spec), EvictingAttentionSpec)
        ]
        assert len(groups) == 1, "the scheduler accepts exactly one evicting group"
        group_id, group = groups[0]
        config, num_layers = config_of(self.vllm_config), len(group.layer_names)
        if get_pp_group().world_size > 1 and config.make_policy().signals:
            timeout_seconds = envs.VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS
            self.stage_relay = StageRelay(group_for_relay(get_pp_group().ranks, timeout_seconds), timeout_seconds)
            num_layers = self.stage_relay.count(num_layers)
        page_tokens, scheduler_config = group.kv_cache_spec.block_size, self.vllm_config.scheduler_config
        self.eviction = EvictionRuntime(
            config,
            group_id,
            page_tokens=page_tokens,
            num_layers=num_layers,
            buffers=RowBuffers(
                max_rows=scheduler_config.max_num_seqs,
                max_pages=self._table_width(page_tokens, kv_cache_config.num_blocks),
                page_tokens=page_tokens,
                device=self.device,
            ),
            combine=self._combine,
            reports=get_pp_group().is_last_rank,
            asynchronous=bool(scheduler_config.async_scheduling),
        )
        runner = adapter_of(self.model_runner)
        for attention_group in self.model_runner.attn_groups[group_id]:
            for builder in attention_group.metadata_builders:
                assert isinstance(builder, ResidentPagesBuilderMixin)
                _check_kernel_page(builder.kv_cache_spec.block_size, page_tokens, attention_group.backend.get_name())
                builder.bind(self.eviction, runner.request_ids)
        assert self.eviction.key_readers or not (group.layer_names and self.eviction.reads_keys)
        if self.eviction.rebases:
            builders = [b for g in self.model_runner.attn_groups[group_id] for b in g.metadata_builders]
            self.eviction.positions = self._rotary_positions(group.layer_names, builders, page_tokens)
            runner.lower_positions(self._lower_positions)

    def _rotary_positions(
        self, layer_names: list[str], builders: list[ResidentPagesBuilderMixin], page_tokens: int
    ) -> RotaryPositions:
        """What moves keys; proven on the loaded model first."""
        context = self.vllm_config.compilation_config.static_forward_context
        # Who shares the cache of another layer writes no keys.
        layers = {name: context[name] for name in layer_names if not context[name].kv_sharing_target_layer_name}
        model_tokens = model_limit(self.vllm_config.model_config)
        rotations = rotations_of(self.model_runner.get_model(), layers, model_tokens)
        check_keys_turn(adapter_of(self.model_runner).run_at, layers, rotations, model_tokens)
        caches = {name: pages for builder in builders for name, pages in builder.key_pages().items()}
        cached = [(caches[name], rotation) for name, rotation in rotations.items()]
        return RotaryPositions(page_tokens, cached, self.device)

    def _lower_positions(self, positions: torch.Tensor) -> None:
        if self.eviction.in_step:
            assert self.eviction.positions is not None
            self.eviction.positions.lower(positions, self.eviction.step_requests)

    def _table_width(self, page_tokens: int, num_blocks: int) -> int:
        # Without a budget, or while there is room, a request may grow to its full length.
        full_pages = pages_for(self.vllm_config.model_config.max_model_len, page_tokens)
        # Kernels may read whole 128 tokens' worth of a row at once.
        return get_block_table_width(min(full_pages, num_blocks), page_tokens)

    def compile_or_warm_up_model(self):
        # vLLM takes steps of its own here, of requests that our scheduler never hears of.
        self._warms_up = True
        try:
            return super().compile_or_warm_up_model()
        finally:
            self._warms_up = False

    def execute_model(self, scheduler_output: SchedulerOutput):
        if self._warms_up:
            return super().execute_model(scheduler_output)
        self.eviction.begin_step(scheduler_output)
        output = super().execute_model(scheduler_output)
        if output is None and get_pp_group().is_last_rank:
            return output  # The step goes on in sample_tokens().
        return self.eviction.end_step(output)

    def sample_tokens(self, grammar_output):
        output = super().sample_tokens(grammar_output)
        # Pipeline stages but the last have ended the step: they have nothing to sample.
        if self.eviction.in_step and isinstance(output, (ModelRunnerOutput, AsyncModelRunnerOutput)):
            return self.eviction.end_step(output)
        return output

    def _combine(self, measured: torch.Tensor) -> Arriving:
        """Every rank of a stage holds equally many heads, so the mean of ranks is the mean of heads."""
        ranks = get_tp_group()
        if ranks.world_size > 1:
            measured = ranks.all_reduce(measured) / ranks.world_size
        arriving = HostCopy(measured)
        return arriving if self.stage_relay is None else self.stage_relay.add(arriving)


def _check_kernel_page(kernel_page_tokens: int, page_tokens: int, backend: str) -> None:
    """Refuse a page that vLLM splits for the kernel, whose block ids are then not those of the scheduler."""
    if kernel_page_tokens != page_tokens:
        raise EvictionConfigError(
            f"KV eviction takes whole pages, and {backend} reads pages of {kernel_page_tokens} tokens where "
            f"--block-size is {page_tokens}. Use --block-size {kernel_page_tokens}, or drop {flag_name('policy')}."
        )


def _spec_of_a_layer(spec: KVCacheSpec) -> KVCacheSpec:
    """Layers of one kind that differ in their heads come wrapped together."""
    return spec.first_spec if isinstance(spec, UniformTypeKVCacheSpecs) else spec


class EvictionCPUWorker(EvictionWorkerMixin, CPUWorker):
    """vLLM's CPU worker, evicting."""


class EvictionGPUWorker(EvictionWorkerMixin, Worker):
    """vLLM's GPU worker, evicting."""
