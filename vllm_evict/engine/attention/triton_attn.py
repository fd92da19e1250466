"""vLLM's Triton attention over resident pages; if asked to, one kernel for a decode step's attention and page mass."""

from __future__ import annotations

from functools import cached_property

import torch
from vllm.v1.attention.backend import AttentionLayer, AttentionType
from vllm.v1.attention.backends.triton_attn import (
    TritonAttentionBackend,
    TritonAttentionImpl,
    TritonAttentionMetadata,
    TritonAttentionMetadataBuilder,
)

from vllm_evict.config import EvictionConfigError, flag_name
from vllm_evict.engine.attention.metadata import RequestIds
from vllm_evict.engine.attention.paged_gpu import EvictingBackendMixin, PagedGPUBuilderMixin, PageMassImplMixin
from vllm_evict.engine.configure import config_of
from vllm_evict.engine.mass_request import MassRequest
from vllm_evict.engine.runtime import EvictionRuntime
from vllm_evict.scores.triton import MAX_SCRATCH_BYTES
from vllm_evict.scores.triton_decode import MAX_PAGE_BYTES, decode_scratch, decode_with_page_mass


class EvictionTritonMetadataBuilder(PagedGPUBuilderMixin, TritonAttentionMetadataBuilder):
    """Stock Triton metadata, from resident pages."""

    fuses_page_mass = True
    _fuses = False

    def bind(self, runtime: EvictionRuntime, request_ids: RequestIds) -> None:
        super().bind(runtime, request_ids)
        self._fuses = self.runtime is not None and config_of(self.vllm_config).score_kernel == "fused"
        if self._fuses:
            spec = self.kv_cache_spec
            _check_fused_page(spec.block_size, spec.head_size * spec.dtype.itemsize)

    def build(self, *args, **kwargs) -> TritonAttentionMetadata:
        metadata = super().build(*args, **kwargs)
        metadata.is_plain_decode = (
            self._fuses
            and metadata.max_query_len == 1
            and metadata.causal is True
            and metadata.mm_prefix_range_tensor is None
            and metadata.rswa_window is None
        )
        return metadata


class EvictionTritonAttentionImpl(PageMassImplMixin, TritonAttentionImpl):
    """Stock Triton attention, then page mass; where one kernel may do both, that kernel."""

    def forward(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: TritonAttentionMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        request = getattr(attn_metadata, "mass_request", None)
        is_plain = self._is_plain and output_scale is None and output_block_scale is None
        is_plain = is_plain and request is not None and attn_metadata.is_plain_decode
        if is_plain and self._has_room(request, kv_cache):
            self._decode(query, kv_cache, attn_metadata, request, output)
            return output
        return super().forward(
            layer, query, key, value, kv_cache, attn_metadata, output, output_scale, output_block_scale
        )

    @cached_property
    def _is_plain(self) -> bool:
        """Whether the layer is what our kernel computes: softmax over all keys, with a soft cap or none."""
        return (
            self.attn_type == AttentionType.DECODER
            and self.kv_cache_dtype in ("auto", "bfloat16", "float16", "float32")
            and self.sliding_window == (-1, -1)
            and self.chunk_lookback == -1
            and self.alibi_slopes is None
            and self.sinks is None
        )

    def _has_room(self, request: MassRequest, kv_cache: torch.Tensor) -> bool:
        """Whether the kernel's scratch is within what page mass by itself keeps to, by several passes if need be."""
        num_rows, max_pages = request.block_table.shape
        elements = decode_scratch(
            num_rows=num_rows,
            num_observed=len(request.page_mass),
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_size=self.head_size,
            max_pages=max_pages,
            page_tokens=kv_cache.shape[2],
            element_bytes=kv_cache.element_size(),
        )
        return 4 * elements <= MAX_SCRATCH_BYTES

    def _decode(
        self,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: TritonAttentionMetadata,
        request: MassRequest,
        output: torch.Tensor,
    ) -> None:
        """Query i is row i's; what pads the tokens or the rows of a CUDA graph is behind them."""
        num_rows = min(attn_metadata.num_actual_tokens, len(attn_metadata.seq_lens))
        heads = (-1, self.num_heads, self.head_size)
        key_cache, value_cache = kv_cache.transpose(1, 2).split(self.head_size, dim=-1)
        decode_with_page_mass(
            query=query.view(heads)[:num_rows],
            key_cache=key_cache,
            value_cache=value_cache,
            block_table=request.block_table[:num_rows],
            num_tokens=attn_metadata.seq_lens[:num_rows],
            output=output.view(heads)[:num_rows],
            row=request.observed.row,
            visible_tokens=request.observed.visible_tokens,
            page_mass=request.page_mass,
            scale=self.scale,
            weight=request.layer_weight / self.num_heads,
            softcap=self.logits_soft_cap,
            enabled=request.enabled,
        )


def _check_fused_page(page_tokens: int, token_bytes: int) -> None:
    """Refuse at start-up what the kernel would refuse in the first step that scores; bytes of a head's key."""
    if page_tokens * token_bytes > MAX_PAGE_BYTES:
        raise EvictionConfigError(
            f"{flag_name('score_kernel')} fused holds a page's keys of one head in at most {MAX_PAGE_BYTES} bytes, and "
            f"--block-size is {page_tokens} where a key takes {token_bytes}. Use --block-size "
            f"{MAX_PAGE_BYTES // token_bytes} or less, or {flag_name('score_kernel')} separate."
        )


class EvictionTritonAttentionBackend(EvictingBackendMixin, TritonAttentionBackend):
    """``TRITON_ATTN``, evicting."""

    @staticmethod
    def get_impl_cls() -> type[EvictionTritonAttentionImpl]:
        return EvictionTritonAttentionImpl

    @staticmethod
    def get_builder_cls() -> type[EvictionTritonMetadataBuilder]:
        return EvictionTritonMetadataBuilder
