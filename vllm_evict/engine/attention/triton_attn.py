"""vLLM's Triton attention over resident pages."""

from __future__ import annotations

from vllm.v1.attention.backends.triton_attn import (
    TritonAttentionBackend,
    TritonAttentionImpl,
    TritonAttentionMetadataBuilder,
)

from vllm_evict.engine.attention.paged_gpu import EvictingBackendMixin, PagedGPUBuilderMixin, PageMassImplMixin


class EvictionTritonMetadataBuilder(PagedGPUBuilderMixin, TritonAttentionMetadataBuilder):
    """Stock Triton metadata, from resident pages."""


class EvictionTritonAttentionImpl(PageMassImplMixin, TritonAttentionImpl):
    """Stock Triton attention, then page mass."""


class EvictionTritonAttentionBackend(EvictingBackendMixin, TritonAttentionBackend):
    """``TRITON_ATTN``, evicting."""

    @staticmethod
    def get_impl_cls() -> type[EvictionTritonAttentionImpl]:
        return EvictionTritonAttentionImpl

    @staticmethod
    def get_builder_cls() -> type[EvictionTritonMetadataBuilder]:
        return EvictionTritonMetadataBuilder
