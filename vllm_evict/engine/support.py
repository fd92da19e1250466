"""What KV eviction does not go together with, and what to do instead.

The one table behind the refusals at start-up (and the documentation of them).
Everything not listed here is meant to work.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from vllm import envs
from vllm.config import VllmConfig
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from vllm_evict.config import CONFIG_KEY, EvictionConfig, EvictionConfigError, flag_name
from vllm_evict.policies import POLICIES

TESTED_VLLM = ("0.32",)
"""Minor versions of vLLM whose internals were read and tested."""

WATCH_ATTENTION = tuple(name for name, policy in POLICIES.items() if "attention" in policy.signals)
"""Policies that look at what tokens attend to."""


@dataclass(frozen=True)
class Refusal:
    """A feature that is refused beside eviction.

    Args:
        feature: its name as a user knows it.
        applies: whether this configuration asks for it (in ``LAYER_REFUSALS``: whether this layer has it, under these
            settings).
        why: what would go wrong.
        instead: what to do.
        policies: policies that are refused; empty = all.

    """

    feature: str
    applies: Callable[..., bool]
    why: str
    instead: str
    policies: tuple[str, ...] = ()


def _text_config(config: VllmConfig):
    return config.model_config.hf_text_config


def _has_window_layers(config: VllmConfig) -> bool:
    layer_types = getattr(_text_config(config), "layer_types", None) or ()
    return "sliding_attention" in layer_types or config.model_config.get_sliding_window() is not None


def _has_switching_rotary(config: VllmConfig) -> bool:
    text_config = _text_config(config)
    parameters = getattr(text_config, "rope_parameters", None) or {}
    return parameters.get("rope_type") == "longrope" or hasattr(text_config, "dual_chunk_attention_config")


def has_gpu(config: VllmConfig) -> bool:
    """Whether vLLM computes on a GPU."""
    return config.device_config.device_type != "cpu"


def _setting(config: VllmConfig, field: str) -> object:
    return (config.additional_config or {}).get(CONFIG_KEY, {}).get(field)


def _rebases(config: VllmConfig) -> bool:
    return _setting(config, "positions") == "rebase"


def _longer_than_the_model(config: VllmConfig) -> bool:
    # Without the variable vLLM itself refuses such a length.
    model = config.model_config
    return (
        not _rebases(config)
        and envs.VLLM_ALLOW_LONG_MAX_MODEL_LEN
        and model.max_model_len > model.get_and_verify_max_len(None)
    )


REFUSALS: tuple[Refusal, ...] = (
    Refusal(
        "a KV connector (--kv-transfer-config, --kv-offloading-size)",
        lambda c: c.kv_transfer_config is not None,
        "it stores pages outside vLLM's step order and would keep evicted ones",
        "drop the connector",
    ),
    Refusal(
        "speculative decoding (--speculative-config)",
        lambda c: c.speculative_config is not None,
        "rejected drafts move the end of a request back behind pages already gone",
        "drop --speculative-config",
    ),
    Refusal(
        "multi-head latent attention (MLA)",
        lambda c: c.model_config.use_mla,
        "its latent pages have a layout and backends of their own",
        "serve this model without eviction",
    ),
    Refusal(
        "state-space or linear-attention layers",
        lambda c: c.model_config.is_hybrid or c.model_config.has_inner_state,
        "their state cannot be evicted by page",
        "serve this model without eviction",
    ),
    Refusal(
        "a model without attention or a KV cache",
        lambda c: c.model_config.is_attention_free,
        "there is nothing to evict",
        "serve this model without eviction",
    ),
    Refusal(
        "an encoder-decoder model",
        lambda c: c.model_config.is_encoder_decoder,
        "cross-attention pages do not grow and are all needed",
        "serve this model without eviction",
    ),
    Refusal(
        "a pooling or embedding model",
        lambda c: c.model_config.runner_type != "generate",
        "it keeps no cache between steps",
        "serve this model without eviction",
    ),
    Refusal(
        "a diffusion language model",
        lambda c: c.model_config.is_diffusion,
        "it rewrites tokens that a page already counted as processed",
        "serve this model without eviction",
    ),
    Refusal(
        "M-RoPE (multi-axis rotary positions)",
        lambda c: c.model_config.uses_mrope,
        "it is not tested with holes yet",
        "serve this model without eviction",
    ),
    Refusal(
        "ALiBi",
        lambda c: c.model_config.uses_alibi,
        "its bias is a distance between tokens, which holes would shorten",
        "serve this model without eviction",
    ),
    Refusal(
        "reference sliding-window attention (R-SWA) or chunked local attention",
        lambda c: (
            c.model_config.rswa_window is not None or getattr(_text_config(c), "attention_chunk_size", None) is not None
        ),
        "its mask counts token distances, which holes would shorten",
        "serve this model without eviction",
    ),
    Refusal(
        "attention that looks ahead within images (prefix-LM)",
        lambda c: c.model_config.is_mm_prefix_lm,
        "its mask names absolute positions, which holes would shift",
        "serve the text alone with --language-model-only",
    ),
    Refusal(
        "a --max-model-len longer than the model was made for (VLLM_ALLOW_LONG_MAX_MODEL_LEN)",
        _longer_than_the_model,
        "tokens keep their positions when pages go, so eviction does not stretch a model",
        "lower --max-model-len, or use --kv-eviction-positions rebase",
    ),
    Refusal(
        "windows under --kv-eviction-positions rebase",
        lambda c: _rebases(c) and _has_window_layers(c),
        "the keys in their windows would have to move too, which is not done yet",
        "use --kv-eviction-positions absolute",
    ),
    Refusal(
        "LongRoPE or dual chunk attention under --kv-eviction-positions rebase",
        lambda c: _rebases(c) and _has_switching_rotary(c),
        "frequencies switch with the length, so a key cannot be moved",
        "use --kv-eviction-positions absolute",
    ),
    Refusal(
        "sliding-window layers without the hybrid KV cache manager",
        lambda c: bool(c.scheduler_config.disable_hybrid_kv_cache_manager) and _has_window_layers(c),
        "windowed and full layers then share pages, and a hole would shift the window",
        "drop --disable-hybrid-kv-cache-manager",
    ),
    Refusal(
        "--kv-eviction-overrides any beside windows",
        lambda c: _setting(c, "overrides") == "any" and _has_window_layers(c),
        "whether a request without eviction fits beside its windows is not known before it hangs",
        "use --kv-eviction-overrides lower",
    ),
    Refusal(
        "a quantised KV cache (--kv-cache-dtype fp8 and others)",
        lambda c: c.cache_config.cache_dtype not in ("auto", "bfloat16", "float16", "float32"),
        "reading attention mass from quantised keys is not tested yet",
        "use --kv-cache-dtype auto",
    ),
    Refusal(
        "KV cache events (--kv-events-config)",
        lambda c: c.kv_events_config is not None and c.kv_events_config.enable_kv_cache_events,
        "events of evicted pages are not tested yet",
        "drop --kv-events-config",
    ),
    Refusal(
        "context parallelism (DCP, PCP)",
        lambda c: (
            c.parallel_config.decode_context_parallel_size > 1 or c.parallel_config.prefill_context_parallel_size > 1
        ),
        "a page is then spread over ranks",
        "set both sizes to 1",
    ),
    Refusal(
        "a pipeline under torchrun (--distributed-executor-backend external_launcher, --pipeline-parallel-size)",
        lambda c: (
            c.parallel_config.distributed_executor_backend == "external_launcher"
            and c.parallel_config.pipeline_parallel_size > 1
        ),
        "every stage then has a scheduler of its own, and only the last stage's would get scores",
        "drop --distributed-executor-backend, or use --kv-eviction streaming",
        policies=tuple(name for name, policy in POLICIES.items() if policy.signals),
    ),
    Refusal(
        "Ray's compiled graphs (--distributed-executor-backend ray, VLLM_USE_RAY_V2_EXECUTOR_BACKEND=0)",
        lambda c: (
            c.parallel_config.distributed_executor_backend == "ray"
            and not getattr(envs, "VLLM_USE_RAY_V2_EXECUTOR_BACKEND", True)  # gone in vLLM 0.33, with that executor
        ),
        "they call the model runner past the worker, which would not hear of pages that are gone",
        "unset the variable, or use --distributed-executor-backend mp",
    ),
    Refusal(
        f"the kernel of {flag_name('score_kernel')} fused",
        lambda c: _setting(c, "score_kernel") == "fused",
        "it makes scores of attention, which this policy does not look at",
        f"use {flag_name('policy')} h2o or h2o-keydiff, or {flag_name('score_kernel')} separate",
        policies=tuple(name for name in POLICIES if name not in WATCH_ATTENTION),
    ),
    Refusal(
        f"{flag_name('score_kernel')} fused without a GPU",
        lambda c: _setting(c, "score_kernel") == "fused" and not has_gpu(c),
        "it takes the place of vLLM's Triton attention, which needs one",
        f"use {flag_name('score_kernel')} separate",
        policies=WATCH_ATTENTION,
    ),
    Refusal(
        f"{flag_name('score_kernel')} fused in batch-invariant mode (VLLM_BATCH_INVARIANT=1)",
        lambda c: _setting(c, "score_kernel") == "fused" and envs.VLLM_BATCH_INVARIANT,
        "it divides a request's keys by the size of the batch, so that sums are rounded differently",
        f"use {flag_name('score_kernel')} separate",
        policies=WATCH_ATTENTION,
    ),
    Refusal(
        f"{flag_name('score_kernel')} fused without --attention-backend TRITON_ATTN",
        lambda c: (
            _setting(c, "score_kernel") == "fused"
            and has_gpu(c)
            and c.attention_config.backend is not AttentionBackendEnum.TRITON_ATTN
        ),
        "it takes the place of that backend's decode attention",
        f"add it, or use {flag_name('score_kernel')} separate",
        policies=WATCH_ATTENTION,
    ),
    Refusal(
        "micro-batching (--enable-dbo, --ubatch-size)",
        lambda c: c.parallel_config.use_ubatching,
        "metadata is built per half batch, which is not tested yet",
        "drop --enable-dbo and --ubatch-size",
    ),
    Refusal(
        "fast prefill for KV sharing (--kv-sharing-fast-prefill)",
        lambda c: c.cache_config.kv_sharing_fast_prefill,
        "it skips prompt tokens whose attention must be seen",
        "drop --kv-sharing-fast-prefill",
    ),
    Refusal(
        "a scheduler of your own (--scheduler-cls)",
        lambda c: c.scheduler_config.scheduler_cls is not None,
        "eviction brings its own subclass of vLLM's schedulers",
        "drop --scheduler-cls",
    ),
)

EVICTING_BACKENDS = ("CPU_ATTN", "FLASH_ATTN", "FLASHINFER", "TRITON_ATTN", "XFORMERS")
"""Names of the attention backends that read resident pages."""


def _builder_has(layer, name: str) -> bool:
    return getattr(layer.get_attn_backend().get_builder_cls(), name, False)


LAYER_REFUSALS: tuple[Refusal, ...] = (
    Refusal(
        f"an attention backend other than {', '.join(EVICTING_BACKENDS)}",
        lambda layer, config: not _builder_has(layer, "reads_resident_pages"),
        "its kernels would look for pages that are gone",
        "choose one of these with --attention-backend",
    ),
    Refusal(
        "ALiBi in an attention layer",
        lambda layer, config: getattr(layer.impl, "alibi_slopes", None) is not None,
        "its bias is a distance between tokens, which holes would shorten",
        "serve this model without eviction",
    ),
    Refusal(
        "learned attention sinks",
        lambda layer, config: getattr(layer.impl, "sinks", None) is not None,
        "what queries give to such a sink is missing from the attention that pages are scored by",
        "use --kv-eviction streaming",
        policies=WATCH_ATTENTION,
    ),
    Refusal(
        f"{flag_name('score_kernel')} fused in a layer that TRITON_ATTN does not serve",
        lambda layer, config: config.score_kernel == "fused" and not _builder_has(layer, "fuses_page_mass"),
        "it takes the place of that backend's decode attention",
        f"use {flag_name('score_kernel')} separate",
        policies=WATCH_ATTENTION,
    ),
)
"""What a model's config does not tell; seen in its full-attention layers before the first token."""


def check_vllm_version(version: str) -> None:
    """Refuse a vLLM whose internals nobody has checked.

    Raises:
        EvictionConfigError: ``version`` is not one of the tested ones.

    """
    if ".".join(version.split(".")[:2]) not in TESTED_VLLM:
        raise EvictionConfigError(
            f"KV eviction was tested with vLLM {', '.join(v + '.*' for v in TESTED_VLLM)} and this "
            f"is vLLM {version}. Install a tested vLLM, or drop {flag_name('policy')}."
        )


def refused(vllm_config: VllmConfig, config: EvictionConfig) -> list[Refusal]:
    """Everything in ``vllm_config`` that does not go together with ``config``."""
    return [
        refusal
        for refusal in REFUSALS
        if (not refusal.policies or config.policy in refusal.policies) and refusal.applies(vllm_config)
    ]


def check_supported(vllm_config: VllmConfig, config: EvictionConfig) -> None:
    """Refuse what does not go together.

    Raises:
        EvictionConfigError: the first unsupported combination, both sides named.

    """
    for refusal in refused(vllm_config, config):
        raise _error(refusal, config)


def check_layers(layers: Iterable[object], config: EvictionConfig) -> None:
    """The same of a loaded model's layers, those with a window left out: they are not evicted.

    Raises:
        EvictionConfigError: as `check_supported`.

    """
    for layer in layers:
        if not hasattr(layer, "impl") or getattr(layer, "sliding_window", None) is not None:
            continue
        for refusal in LAYER_REFUSALS:
            if (not refusal.policies or config.policy in refusal.policies) and refusal.applies(layer, config):
                raise _error(refusal, config)


def _error(refusal: Refusal, config: EvictionConfig) -> EvictionConfigError:
    return EvictionConfigError(
        f"{flag_name('policy')} {config.policy} does not work with {refusal.feature}: "
        f"{refusal.why}. Way out: {refusal.instead}, or drop {flag_name('policy')}."
    )
