"""The KV cache spec of an evicting layer: full attention with a bounded number of pages."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Self

from vllm.config import VllmConfig, get_current_vllm_config
from vllm.v1.kv_cache_interface import AttentionSpec, FullAttentionSpec, replace_as
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry, register_kv_cache_spec

from vllm_evict.config import EvictionConfig
from vllm_evict.engine.block_manager import EvictingBlockManager
from vllm_evict.engine.configure import config_of
from vllm_evict.pages import pages_for, peak_pages

# vLLM's registry fills itself only while it is empty: a look-up first, so that
# registering ours does not hide vLLM's own specs.
KVCacheSpecRegistry.get_manager_class(FullAttentionSpec)  # type: ignore[arg-type]


# Registered on import, because the engine core first meets the class when it
# unpickles the workers' specs.
@register_kv_cache_spec(EvictingBlockManager, uniform_type_base_spec=FullAttentionSpec)
@dataclass(frozen=True, kw_only=True)
class EvictingAttentionSpec(FullAttentionSpec):
    """Full attention whose requests need at most ``max_pages`` pages at once.

    Args:
        budget_tokens: what a request can always be brought down to, its budget or its
            floor; None = nothing is evicted.
        max_in_flight_tokens: ``VllmConfig.max_in_flight_tokens``.
        max_request_tokens: ``max_model_len``.

    """

    budget_tokens: int | None = None
    max_in_flight_tokens: int = 0
    max_request_tokens: int = 0

    @classmethod
    def from_full_attention(
        cls, spec: FullAttentionSpec, config: EvictionConfig, vllm_config: VllmConfig
    ) -> EvictingAttentionSpec:
        """The same layer layout, with the bounds of ``config``."""
        return replace_as(
            spec,
            cls,
            budget_tokens=config.least_tokens if config.bounded else None,
            max_in_flight_tokens=vllm_config.max_in_flight_tokens,
            max_request_tokens=vllm_config.model_config.max_model_len,
        )

    @property
    def max_pages(self) -> int:
        """Most pages one request needs at once, prefill included (see ``pages.peak_pages``)."""
        full_pages = pages_for(self.max_request_tokens, self.block_size)
        if self.budget_tokens is None:
            return full_pages
        budget_pages = pages_for(self.budget_tokens, self.block_size)
        return min(full_pages, peak_pages(budget_pages, self.max_in_flight_tokens, self.block_size))

    def max_memory_usage_bytes(self, vllm_config: VllmConfig) -> int:
        """Start-up sizing: what one request of ``max_model_len`` tokens may need at once."""
        # vLLM may have lowered max_model_len since the spec was made (auto-fit).
        max_request_tokens = vllm_config.model_config.max_model_len
        return replace(self, max_request_tokens=max_request_tokens).max_pages * self.page_size_bytes

    @classmethod
    def merge(cls, specs: list[Self]) -> Self:
        """Merge layers of one group, keeping our fields (``FullAttentionSpec.merge`` drops them)."""
        merged = super().merge(specs)
        own = [f.name for f in fields(cls) if f.name not in FullAttentionSpec.__dataclass_fields__]
        assert all(getattr(spec, name) == getattr(specs[0], name) for spec in specs for name in own)
        return replace(merged, **{name: getattr(specs[0], name) for name in own})


def evicting_spec(spec: AttentionSpec) -> AttentionSpec:
    """``spec`` as a backend's ``customize_spec`` returns it: full attention evicts, windows keep their own rule.

    The settings are those of the current config.
    """
    if type(spec) is not FullAttentionSpec or spec.sliding_window is not None:
        return spec
    vllm_config = get_current_vllm_config()
    return EvictingAttentionSpec.from_full_attention(spec, config_of(vllm_config), vllm_config)
