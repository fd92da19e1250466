"""vLLM's FlashAttention over resident pages."""

from __future__ import annotations

from vllm.v1.attention.backends.flash_attn import (
    FlashAttentionBackend,
    FlashAttentionImpl,
    FlashAttentionMetadataBuilder,
)

from vllm_evict.engine.attention.paged_gpu import EvictingBackendMixin, PagedGPUBuilderMixin, PageMassImplMixin


class EvictionFlashAttentionMetadataBuilder(PagedGPUBuilderMixin, FlashAttentionMetadataBuilder):
    """Stock FlashAttention metadata, from resident pages."""


class EvictionFlashAttentionImpl(PageMassImplMixin, FlashAttentionImpl):
    """Stock FlashAttention, then page mass."""


class EvictionFlashAttentionBackend(EvictingBackendMixin, FlashAttentionBackend):
    """``FLASH_ATTN``, evicting."""

    @staticmethod
    def get_impl_cls() -> type[EvictionFlashAttentionImpl]:
        return EvictionFlashAttentionImpl

    @staticmethod
    def get_builder_cls() -> type[EvictionFlashAttentionMetadataBuilder]:
        return EvictionFlashAttentionMetadataBuilder
