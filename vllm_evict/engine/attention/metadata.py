"""One mixin that makes any stock metadata builder read resident pages only.

Attention over the compacted table is attention over the kept tokens: cached keys
carry their own rotation, and the queries stand at the end of the sequence, so the
stock causal mask is right as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from vllm.config import VllmConfig
from vllm.v1.attention.backend import AttentionCGSupport, CommonAttentionMetadata
from vllm.v1.kv_cache_interface import KVCacheSpec, iter_layer_specs

from vllm_evict.engine.configure import config_of
from vllm_evict.engine.runtime import EvictionRuntime
from vllm_evict.engine.spec import EvictingAttentionSpec

RequestIds = Callable[[CommonAttentionMetadata], Sequence[str]]
"""The ids of a batch's requests, row by row."""


class ResidentPagesBuilderMixin:
    """Put before a stock ``AttentionMetadataBuilder``.

    The builder of a group that does not evict (sliding window) stays stock.
    """

    reads_resident_pages = True
    # vLLM would put its own table, with the pages that are gone, into metadata made for another group of layers.
    supports_update_block_table = False
    # A graph would replay the queries that were observed when it was captured.
    graphs_while_observing = AttentionCGSupport.NEVER
    runtime: EvictionRuntime | None = None
    request_ids: RequestIds

    @classmethod
    def get_cudagraph_support(cls, vllm_config: VllmConfig, kv_cache_spec: KVCacheSpec) -> AttentionCGSupport:
        """What the stock builder can; where attention is observed, ``graphs_while_observing`` at most."""
        support = super().get_cudagraph_support(vllm_config, kv_cache_spec)
        evicts = any(isinstance(spec, EvictingAttentionSpec) for spec in iter_layer_specs(kv_cache_spec))
        if evicts and "attention" in config_of(vllm_config).make_policy().signals:
            return min(support, cls.graphs_while_observing, key=lambda support: support.value)
        return support

    def bind(self, runtime: EvictionRuntime, request_ids: RequestIds) -> None:
        """Connect to the worker: its state, and the order of requests in the batch."""
        if isinstance(self.kv_cache_spec, EvictingAttentionSpec):
            self.runtime = runtime
            self.request_ids = request_ids

    def build(self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, *args, **kwargs):
        if self.runtime is None:
            return super().build(common_prefix_len, common_attn_metadata, *args, **kwargs)
        if not self.runtime.in_step:
            metadata = super().build(common_prefix_len, self._of_nobody(common_attn_metadata), *args, **kwargs)
            metadata.mass_request = self.runtime.nobodys_mass(common_attn_metadata.num_reqs)
            return metadata
        # Full CUDA graphs pad the batch with rows of no request.
        rows = self.runtime.batch_rows(self.request_ids(common_attn_metadata), common_attn_metadata.num_reqs)
        resident = replace(
            common_attn_metadata,
            block_table_tensor=rows.block_table,
            seq_lens=rows.physical_lens,
            seq_lens_cpu_upper_bound=rows.physical_lens_cpu,
            max_seq_len=int(rows.physical_lens_cpu.max()),
        )
        metadata = super().build(0, resident, *args, **kwargs)
        metadata.mass_request = self.runtime.mass_request
        return metadata

    def _of_nobody(self, common_attn_metadata: CommonAttentionMetadata) -> CommonAttentionMetadata:
        """A batch without requests in the persistent tensors, which graphs read, be it captured or replayed with it.

        Whose pages the table names does not matter: nobody looks at the answers.
        """
        assert self.runtime is not None
        buffers, num_rows = self.runtime.buffers, common_attn_metadata.num_reqs
        buffers.physical_lens[:num_rows].copy_(common_attn_metadata.seq_lens[:num_rows])
        return replace(
            common_attn_metadata,
            block_table_tensor=buffers.block_table[:num_rows],
            seq_lens=buffers.physical_lens[:num_rows],
        )
