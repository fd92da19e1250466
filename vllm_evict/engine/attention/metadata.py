"""One mixin that makes any stock metadata builder read resident pages only.

Attention over the compacted table is attention over the kept tokens: cached keys
carry their own rotation, and the queries stand at the end of the sequence, so the
stock causal mask is right as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from vllm.v1.attention.backend import CommonAttentionMetadata

from vllm_evict.engine.runtime import EvictionRuntime
from vllm_evict.engine.spec import EvictingAttentionSpec


class ResidentPagesBuilderMixin:
    """Put before a stock ``AttentionMetadataBuilder``.

    The builder of a group that does not evict (sliding window) stays stock.
    """

    runtime: EvictionRuntime | None = None
    request_ids: Callable[[], Sequence[str]]

    def bind(self, runtime: EvictionRuntime, request_ids: Callable[[], Sequence[str]]) -> None:
        """Connect to the worker: its state, and the order of requests in the batch."""
        if isinstance(self.kv_cache_spec, EvictingAttentionSpec):
            self.runtime = runtime
            self.request_ids = request_ids

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ):
        if self.runtime is None or not self.runtime.in_step:
            return super().build(common_prefix_len, common_attn_metadata, fast_build)
        rows = self.runtime.batch_rows(self.request_ids()[: common_attn_metadata.num_reqs])
        metadata = super().build(
            0,
            replace(
                common_attn_metadata,
                block_table_tensor=rows.block_table,
                seq_lens=rows.physical_lens,
                seq_lens_cpu_upper_bound=rows.physical_lens,
                max_seq_len=int(rows.physical_lens.max()),
            ),
            fast_build,
        )
        metadata.mass_request = self.runtime.mass_request
        return metadata
