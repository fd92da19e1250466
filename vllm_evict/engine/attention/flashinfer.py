"""vLLM's FlashInfer over resident pages."""

from __future__ import annotations

from vllm.v1.attention.backends.flashinfer import (
    FlashInferBackend,
    FlashInferImpl,
    FlashInferMetadataBuilder,
)

from vllm_evict.engine.attention.paged_gpu import EvictingBackendMixin, PagedGPUBuilderMixin, PageMassImplMixin


class EvictionFlashInferMetadataBuilder(PagedGPUBuilderMixin, FlashInferMetadataBuilder):
    """Stock FlashInfer metadata, from resident pages."""


class EvictionFlashInferImpl(PageMassImplMixin, FlashInferImpl):
    """Stock FlashInfer, then page mass."""


class EvictionFlashInferBackend(EvictingBackendMixin, FlashInferBackend):
    """``FLASHINFER``, evicting."""

    @staticmethod
    def get_impl_cls() -> type[EvictionFlashInferImpl]:
        return EvictionFlashInferImpl

    @staticmethod
    def get_builder_cls() -> type[EvictionFlashInferMetadataBuilder]:
        return EvictionFlashInferMetadataBuilder
