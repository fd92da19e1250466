"""Attention through xFormers, ``--attention-backend XFORMERS``, which vLLM itself no longer has.

What needs the package ``xformers`` is in `xformers_impl`, so that choosing the backend without it ends in a
message of ours instead of an import error.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, ClassVar

import torch
from vllm.config.cache import CacheDType
from vllm.platforms.interface import DeviceCapability
from vllm.v1.attention.backend import AttentionBackend, MultipleOf
from vllm.v1.kv_cache_layout import KVCacheLayout

from vllm_evict.engine.attention.paged_gpu import EvictingBackendMixin

if TYPE_CHECKING:
    from vllm_evict.engine.attention import xformers_impl as impl

INSTALL = "xformers is not installed: pip install 'vllm-evict[xformers]'"


class XFormersBackend(AttentionBackend):
    """Decoder self-attention over the paged cache with xFormers' split-K kernel."""

    forward_includes_kv_cache_update = False
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16]
    supported_kv_cache_dtypes: ClassVar[list[CacheDType]] = ["auto", "float16", "bfloat16"]

    @staticmethod
    def get_name() -> str:
        return "XFORMERS"

    @staticmethod
    def get_impl_cls() -> type[impl.XFormersImpl]:
        from vllm_evict.engine.attention.xformers_impl import XFormersImpl

        return XFormersImpl

    @staticmethod
    def get_builder_cls() -> type[impl.XFormersMetadataBuilder]:
        from vllm_evict.engine.attention.xformers_impl import XFormersMetadataBuilder

        return XFormersMetadataBuilder

    # ---- what fits: vLLM asks, and refuses by name ----------------------------------

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec=None) -> list[int | MultipleOf]:
        return [MultipleOf(16)]  # a tile of keys lies within a page, and Triton multiplies tiles of 16 or more

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        return [16, 32, 64, 128, 256, 512]

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        return (KVCacheLayout.LBNHC,)  # xFormers sees one long row of tokens, so they must lie equally far apart

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True

    @classmethod
    def supports_compute_capability(cls, capability: DeviceCapability) -> bool:
        return capability >= DeviceCapability(8, 0)

    @classmethod
    def supports_device_cpu_query_lens_mismatch(cls) -> bool:
        return False

    @classmethod
    def validate_configuration(cls, *args, **kwargs) -> list[str]:
        missing = [] if find_spec("xformers") else [INSTALL]
        return missing + super().validate_configuration(*args, **kwargs)


class EvictionXFormersBackend(EvictingBackendMixin, XFormersBackend):
    """``XFORMERS``, evicting."""

    @staticmethod
    def get_impl_cls() -> type[impl.EvictionXFormersImpl]:
        from vllm_evict.engine.attention.xformers_impl import EvictionXFormersImpl

        return EvictionXFormersImpl

    @staticmethod
    def get_builder_cls() -> type[impl.EvictionXFormersMetadataBuilder]:
        from vllm_evict.engine.attention.xformers_impl import EvictionXFormersMetadataBuilder

        return EvictionXFormersMetadataBuilder
