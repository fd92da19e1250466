"""What the GPU backends share: resident pages for the stock builder, page mass and key difference by Triton kernels.

vLLM keeps K and V of a page side by side, ``[num_blocks, num_kv_heads, block_size, 2 * head_size]`` with any strides,
for all of them, so one kernel serves them all. It needs nothing from the attention kernel.
"""

from __future__ import annotations

import numpy as np
import torch
from vllm.v1.attention.backend import AttentionCGSupport, AttentionImpl, AttentionLayer
from vllm.v1.kv_cache_interface import AttentionSpec

from vllm_evict.config import EvictionConfigError, flag_name
from vllm_evict.engine.attention.metadata import RequestIds, ResidentPagesBuilderMixin
from vllm_evict.engine.decode_mass import DecodeMass
from vllm_evict.engine.host_copy import to_device
from vllm_evict.engine.mass_request import DeviceQueries, MassRequest
from vllm_evict.engine.runtime import EvictionRuntime
from vllm_evict.engine.spec import evicting_spec
from vllm_evict.positions.pages import KeyPages, PlainKeyPages
from vllm_evict.scores import triton as kernels
from vllm_evict.scores import triton_arguments


class EvictingBackendMixin:
    """Put before a stock ``AttentionBackend``."""

    @classmethod
    def customize_spec(cls, spec: AttentionSpec) -> AttentionSpec:
        return evicting_spec(super().customize_spec(spec))


class PagedGPUBuilderMixin(ResidentPagesBuilderMixin):
    """Put before a stock builder whose layers keep their cache as above."""

    graphs_while_observing = AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE  # see `decode_mass`

    def bind(self, runtime: EvictionRuntime, request_ids: RequestIds) -> None:
        super().bind(runtime, request_ids)
        if self.runtime is None:
            return
        if runtime.observes_attention or runtime.reads_keys:
            _check_scored_page(self.kv_cache_spec.block_size)
        runtime.buffers.gather = kernels.gather_rows
        runtime.make_observed = self._make_observed
        if runtime.observes_attention and runtime.decode_mass is None:
            runtime.decode_mass = DecodeMass(*runtime.buffers.block_table.shape, self.device)
        if runtime.reads_keys:
            runtime.key_readers.append(self.add_key_difference)

    def _make_observed(self, *, token: np.ndarray, row: np.ndarray, visible_tokens: np.ndarray) -> DeviceQueries:
        return DeviceQueries(*to_device(np.stack([token, row, visible_tokens]), self.device))

    def add_key_difference(
        self, *, block_table: torch.Tensor, num_tokens: np.ndarray, key_difference: torch.Tensor, layer_weight: float
    ) -> None:
        """A :class:`vllm_evict.engine.runtime.KeyReader` of this builder's layers."""
        layers = self.vllm_config.compilation_config.static_forward_context
        tokens = to_device(num_tokens, self.device)
        for name in self.layer_names:
            key_cache = _key_half(layers[name].kv_cache, self.kv_cache_spec.head_size)
            kernels.add_key_difference(
                key_cache=key_cache,
                block_table=block_table,
                num_tokens=tokens,
                key_difference=key_difference,
                weight=layer_weight / key_cache.shape[2],
            )

    def key_pages(self) -> dict[str, KeyPages]:
        """The caches of this builder's layers, by name."""
        layers = self.vllm_config.compilation_config.static_forward_context
        caches = {name: layers[name].kv_cache for name in self.layer_names}
        head_size = self.kv_cache_spec.head_size
        return {name: PlainKeyPages(cache, cache[..., :head_size]) for name, cache in caches.items()}


class PageMassImplMixin:
    """Put before a stock ``AttentionImpl``: its attention, then page mass where the step asks for it."""

    def forward(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata,
        *args,
        **kwargs,
    ) -> torch.Tensor:
        output = super().forward(layer, query, key, value, kv_cache, attn_metadata, *args, **kwargs)
        request = getattr(attn_metadata, "mass_request", None)
        if request is not None:
            add_page_mass(self, request, query, kv_cache)
        return output


def add_page_mass(
    impl: AttentionImpl,
    request: MassRequest,
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    log_sum_exp: torch.Tensor | None = None,
) -> None:
    """Page mass of one layer; ``log_sum_exp``, float32 ``[num_tokens, num_heads]``, spares the kernel a step."""
    with request.stopwatch:
        kernels.add_page_mass(
            query=query.view(-1, impl.num_heads, impl.head_size),
            key_cache=_key_half(kv_cache, impl.head_size),
            block_table=request.block_table,
            token=request.observed.token,
            row=request.observed.row,
            visible_tokens=request.observed.visible_tokens,
            page_mass=request.page_mass,
            scale=impl.scale,
            weight=request.layer_weight / impl.num_heads,
            softcap=impl.logits_soft_cap or 0.0,
            log_sum_exp=log_sum_exp,
            enabled=request.enabled,
        )


def _check_scored_page(page_tokens: int) -> None:
    """Refuse at start-up what the kernels would refuse in the first step that scores."""
    most = triton_arguments.MAX_PAGE_TOKENS
    if page_tokens.bit_count() != 1 or page_tokens > most:
        raise EvictionConfigError(
            f"KV eviction by attention or keys scores pages of a power of two of tokens, up to {most} on a GPU, and "
            f"--block-size is {page_tokens}. Use --block-size {min(1 << (page_tokens.bit_length() - 1), most)}, or "
            f"{flag_name('policy')} streaming."
        )


def _key_half(kv_cache: torch.Tensor, head_size: int) -> torch.Tensor:
    """K of a layer's cache: ``[num_blocks, block_size, num_kv_heads, head_size]``."""
    return kv_cache.transpose(1, 2)[..., :head_size]
