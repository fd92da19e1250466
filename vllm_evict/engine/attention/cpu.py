"""vLLM's CPU attention over resident pages, reporting page mass."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from vllm import _custom_ops as ops
from vllm.config import get_current_vllm_config
from vllm.v1.attention.backend import AttentionLayer
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadata,
    CPUAttentionMetadataBuilder,
)
from vllm.v1.kv_cache_interface import AttentionSpec, FullAttentionSpec

from vllm_evict.engine.attention.metadata import ResidentPagesBuilderMixin
from vllm_evict.engine.configure import config_of
from vllm_evict.engine.runtime import EvictionRuntime
from vllm_evict.engine.spec import EvictingAttentionSpec
from vllm_evict.scores.cpu import add_page_mass, warm_up
from vllm_evict.scores.cpu_layout import KeyLayout, detect_key_layout


class EvictionCPUAttentionBackend(CPUAttentionBackend):
    """``CPU_ATTN``, evicting."""

    @staticmethod
    def get_impl_cls() -> type[EvictionCPUAttentionImpl]:
        return EvictionCPUAttentionImpl

    @staticmethod
    def get_builder_cls() -> type[EvictionCPUMetadataBuilder]:
        return EvictionCPUMetadataBuilder

    @classmethod
    def customize_spec(cls, spec: AttentionSpec) -> AttentionSpec:
        spec = super().customize_spec(spec)
        if type(spec) is not FullAttentionSpec or spec.sliding_window is not None:
            return spec
        vllm_config = get_current_vllm_config()
        return EvictingAttentionSpec.from_full_attention(spec, config_of(vllm_config), vllm_config)


class EvictionCPUMetadataBuilder(ResidentPagesBuilderMixin, CPUAttentionMetadataBuilder):
    """Stock CPU metadata, from resident pages."""

    key_layout: KeyLayout | None = None

    def bind(self, runtime: EvictionRuntime, request_ids: Callable[[], Sequence[str]]) -> None:
        super().bind(runtime, request_ids)
        if self.runtime is not None and runtime.needs_scores:
            self.key_layout = self._detect_key_layout()
            warm_up(dtype=self.dtype, layout=self.key_layout)

    def build(self, *args, **kwargs) -> CPUAttentionMetadata:
        metadata = super().build(*args, **kwargs)
        metadata.key_layout = self.key_layout
        return metadata

    def _detect_key_layout(self) -> KeyLayout:
        """How vLLM's kernels pack K on this machine, read off by writing keys through them."""

        def write_key(key: torch.Tensor, key_cache: torch.Tensor, slots: torch.Tensor) -> None:
            ops.cpu_attn_reshape_and_cache(
                key,
                torch.zeros_like(key),
                key_cache,
                torch.zeros_like(key_cache),
                slots,
                self.isa,
                kv_cache_dtype=self.kv_cache_dtype,
            )

        return detect_key_layout(
            write_key,
            block_size=self.block_size,
            head_size=self.head_dim,
            dtype=self.dtype,
            isa=self.isa,
        )


class EvictionCPUAttentionImpl(CPUAttentionBackendImpl):
    """Stock CPU attention, then page mass where the step asks for it."""

    def forward(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: CPUAttentionMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        output = super().forward(
            layer,
            query,
            key,
            value,
            kv_cache,
            attn_metadata,
            output,
            output_scale,
            output_block_scale,
        )
        request = getattr(attn_metadata, "mass_request", None)
        if request is not None:
            num_blocks, num_kv_heads, block_size, _ = kv_cache.shape
            key_cache, _ = kv_cache.view(num_blocks, num_kv_heads, 2 * block_size, -1).chunk(2, dim=2)
            add_page_mass(
                query=query,
                key_cache=key_cache,
                block_table=request.block_table,
                observed=request.observed,
                page_mass=request.page_mass,
                scale=self.scale,
                weight=request.layer_weight / self.num_heads,
                softcap=self.logits_soft_cap,
                layout=attn_metadata.key_layout,
            )
        return output
