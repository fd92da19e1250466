"""vLLM's CPU attention over resident pages, reporting page mass and key difference."""

from __future__ import annotations

import numpy as np
import torch
from vllm import _custom_ops as ops
from vllm.v1.attention.backend import AttentionLayer
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadata,
    CPUAttentionMetadataBuilder,
)
from vllm.v1.kv_cache_interface import AttentionSpec

from vllm_evict.engine.attention.metadata import RequestIds, ResidentPagesBuilderMixin
from vllm_evict.engine.runtime import EvictionRuntime
from vllm_evict.engine.spec import evicting_spec
from vllm_evict.positions.pages import KeyPages, PackedKeyPages
from vllm_evict.scores import cpu_keys
from vllm_evict.scores.cpu import ObservedQueries, add_page_mass, warm_up
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
        return evicting_spec(super().customize_spec(spec))


class EvictionCPUMetadataBuilder(ResidentPagesBuilderMixin, CPUAttentionMetadataBuilder):
    """Stock CPU metadata, from resident pages."""

    key_layout: KeyLayout | None = None

    def bind(self, runtime: EvictionRuntime, request_ids: RequestIds) -> None:
        super().bind(runtime, request_ids)
        if self.runtime is None or not (runtime.observes_attention or runtime.reads_keys or runtime.rebases):
            return
        self.key_layout = self._detect_key_layout()
        runtime.make_observed = ObservedQueries
        if runtime.observes_attention:
            warm_up(dtype=self.dtype, layout=self.key_layout)
        if runtime.reads_keys:
            cpu_keys.warm_up(dtype=self.dtype, layout=self.key_layout)
            runtime.key_readers.append(self.add_key_difference)

    def build(self, *args, **kwargs) -> CPUAttentionMetadata:
        metadata = super().build(*args, **kwargs)
        metadata.key_layout = self.key_layout
        return metadata

    def add_key_difference(
        self, *, block_table: torch.Tensor, num_tokens: np.ndarray, key_difference: torch.Tensor, layer_weight: float
    ) -> None:
        """A :class:`vllm_evict.engine.runtime.KeyReader` of this builder's layers."""
        assert self.key_layout is not None
        layers = self.vllm_config.compilation_config.static_forward_context
        for name in self.layer_names:
            key_cache = _key_half(layers[name].kv_cache)
            cpu_keys.add_key_difference(
                key_cache=key_cache,
                block_table=block_table,
                num_tokens=num_tokens,
                key_difference=key_difference,
                weight=layer_weight / key_cache.shape[1],
                layout=self.key_layout,
            )

    def key_pages(self) -> dict[str, KeyPages]:
        """The caches of this builder's layers, by name."""
        assert self.key_layout is not None
        layers = self.vllm_config.compilation_config.static_forward_context
        caches = {name: layers[name].kv_cache for name in self.layer_names}
        return {name: PackedKeyPages(cache, _key_half(cache), self.key_layout) for name, cache in caches.items()}

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


def _key_half(kv_cache: torch.Tensor) -> torch.Tensor:
    """K of a layer's cache: ``[num_blocks, num_kv_heads, block_size, head_size]``, its pages packed for the kernel."""
    num_blocks, num_kv_heads, block_size, _ = kv_cache.shape
    return kv_cache.view(num_blocks, num_kv_heads, 2 * block_size, -1).chunk(2, dim=2)[0]


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
            with request.stopwatch:
                add_page_mass(
                    query=query,
                    key_cache=_key_half(kv_cache),
                    block_table=request.block_table,
                    observed=request.observed,
                    page_mass=request.page_mass,
                    scale=self.scale,
                    weight=request.layer_weight / self.num_heads,
                    softcap=self.logits_soft_cap,
                    layout=attn_metadata.key_layout,
                )
        return output
