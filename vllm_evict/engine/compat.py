"""Every place where vLLM lacks a hook and is wrapped instead. Keep it short.

Imported in every vLLM process, so what only a front end needs is imported where it is hooked.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from vllm.config import ModelConfig, VllmConfig
from vllm.engine import arg_utils
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.attention import selector
from vllm.v1.attention.backends import registry
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
from vllm.v1.core.single_type_kv_cache_manager import SingleTypeKVCacheManager

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_coordinator import KVCacheCoordinator
    from vllm.v1.request import Request

    from vllm_evict.engine.front_end import StreamReport
    from vllm_evict.engine.metrics import EvictionMetrics

_MARK = "_vllm_evict_hooked"
_XFORMERS = "XFORMERS"


def hook_engine_args() -> None:
    """Flags on the command line, and eviction on in the config they lead to. Idempotent.

    Through vLLM's own hook where it has one, which is what patches/engine-args-plugin.patch proposes; else by
    wrapping three methods. Remove the wrapping when every supported vLLM has the hook.
    """
    if getattr(EngineArgs, _MARK, False):
        return
    setattr(EngineArgs, _MARK, True)
    if hasattr(arg_utils, "register_engine_args_plugin"):
        from vllm_evict.engine.engine_args import EvictionEngineArgs

        arg_utils.register_engine_args_plugin(EvictionEngineArgs())
    else:
        _wrap_engine_args()


def _wrap_engine_args() -> None:
    add_cli_args = EngineArgs.add_cli_args
    from_cli_args = EngineArgs.from_cli_args.__func__
    create_engine_config = EngineArgs.create_engine_config

    def plugin():
        from vllm_evict.engine.engine_args import EvictionEngineArgs

        return EvictionEngineArgs()

    @functools.wraps(add_cli_args)
    def add_cli_args_with_flags(parser):
        parser = add_cli_args(parser)
        plugin().add_cli_args(parser)
        return parser

    @functools.wraps(from_cli_args)
    def from_cli_args_with_settings(cls, args):
        engine_args = from_cli_args(cls, args)
        plugin().from_cli_args(engine_args, args)
        return engine_args

    @functools.wraps(create_engine_config)
    def create_engine_config_with_eviction(self, *args, **kwargs):
        plugin().before_engine_config(self)
        vllm_config = create_engine_config(self, *args, **kwargs)
        plugin().after_engine_config(self, vllm_config)
        return vllm_config

    EngineArgs.add_cli_args = staticmethod(add_cli_args_with_flags)
    EngineArgs.from_cli_args = classmethod(from_cli_args_with_settings)
    EngineArgs.create_engine_config = create_engine_config_with_eviction


def xformers_backend() -> AttentionBackendEnum:
    """``--attention-backend XFORMERS``, which vLLM has dropped. Idempotent.

    vLLM can add a member to its enumeration, but would pickle it by value, and a worker unpickles its config before
    it loads the plugins that add the member: so it is pickled as a call of this function, unless vLLM copes, which
    is what patches/added-attention-backends.patch proposes. Remove that when every supported vLLM does.
    """
    if _XFORMERS not in AttentionBackendEnum.__members__:
        register_backend(_XFORMERS, "vllm_evict.engine.attention.xformers.XFormersBackend")
        if not hasattr(registry, "registered_attention_backend"):
            AttentionBackendEnum[_XFORMERS].__reduce_ex__ = lambda protocol: (xformers_backend, ())
    return AttentionBackendEnum[_XFORMERS]


def allow_longer_than_the_model(engine_args: EngineArgs) -> None:
    """Let ``max_model_len`` of this engine exceed the length its model was made for, without an environment variable.

    Through vLLM's own setting where it has one, which is what patches/long-max-model-len.patch proposes; else the
    config is made with the model's own length and given the longer one afterwards. Remove that when every supported
    vLLM has the setting.
    """
    if hasattr(engine_args, "allow_long_max_model_len"):
        engine_args.allow_long_max_model_len = True
        return
    create_model_config = engine_args.create_model_config

    @functools.wraps(create_model_config)
    def create_with_any_length() -> ModelConfig:
        wanted = engine_args.max_model_len
        if wanted is None or wanted <= 0:  # the model's own, or as much as fits in memory
            return create_model_config()
        engine_args.max_model_len = None
        try:
            model_config = create_model_config()
        finally:
            engine_args.max_model_len = wanted
        model_config.original_max_model_len = model_config.max_model_len = wanted
        return model_config

    engine_args.create_model_config = create_with_any_length


@contextmanager
def attention_backends(overrides: dict[AttentionBackendEnum, str], vllm_config: VllmConfig) -> Iterator[None]:
    """Within the block, layers of the engine of ``vllm_config`` that choose a backend in ``overrides`` get ours.

    Through the engine's own config where vLLM can, which is what patches/attention-backend-per-engine.patch proposes;
    else the override goes through vLLM's registry, and the cache of choices is cleared on both sides, so that an
    engine without eviction in the same process is not given ours. Remove that when every supported vLLM has the field.
    """
    attention_config = vllm_config.attention_config
    if hasattr(attention_config, "backend_classes"):
        attention_config.backend_classes |= {backend.name: path for backend, path in overrides.items()}
        yield
        return
    for backend, class_path in overrides.items():
        register_backend(backend, class_path)
    selector._cached_get_attn_backend.cache_clear()
    try:
        yield
    finally:
        for backend in overrides:
            backend.clear_override()
        selector._cached_get_attn_backend.cache_clear()


def limit_prefix_cache(coordinator: KVCacheCoordinator, num_exact_tokens: Callable[[str, int], int]) -> None:
    """Hash of a request's pages, in every group, only what ``num_exact_tokens(request id, tokens)`` allows.

    A block manager decides for its own group only, and window layers beside evicting ones have vLLM's. Where vLLM
    asks all managers, which is what patches/prefix-cache-limit.patch proposes, nothing is wrapped. Remove the
    wrapping when every supported vLLM does.
    """
    if hasattr(SingleTypeKVCacheManager, "num_exact_tokens"):
        return
    cache_blocks = coordinator.cache_blocks

    def cache_blocks_up_to_limit(request: Request, num_computed_tokens: int) -> None:
        cache_blocks(request, num_exact_tokens(request.request_id, num_computed_tokens))

    coordinator.cache_blocks = cache_blocks_up_to_limit


def hook_requests(check: Callable[[VllmConfig, object, int], None]) -> None:
    """Have ``check`` look at every request before the engine sees it; what it raises becomes HTTP 400. Idempotent.

    It is given the config, the sampling parameters and the number of prompt tokens, and may see a request twice: a
    stream has sent its status before vLLM processes the input, so the API server's requests are looked at earlier.

    Through vLLM's own hook where it has one, which is what patches/request-checks.patch proposes. Remove the
    wrapping when every supported vLLM has it.
    """
    from vllm.utils import length_from_prompt_token_ids_or_embeds
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.input_processor import InputProcessor

    if hasattr(InputProcessor, "request_checks"):
        if check not in InputProcessor.request_checks:
            InputProcessor.request_checks.append(check)
        return
    process_inputs = InputProcessor.process_inputs
    if hasattr(process_inputs, _MARK):
        return

    @functools.wraps(process_inputs)
    def process_and_check(self, *args, **kwargs):
        request = process_inputs(self, *args, **kwargs)
        num_tokens = length_from_prompt_token_ids_or_embeds(request.prompt_token_ids, request.prompt_embeds)
        check(self.vllm_config, request.sampling_params, num_tokens)
        return request

    setattr(process_and_check, _MARK, True)
    InputProcessor.process_inputs = process_and_check

    generate = AsyncLLM.generate

    @functools.wraps(generate)
    def check_and_generate(self, prompt, sampling_params, *args, **kwargs):
        token_ids = prompt.get("prompt_token_ids") if isinstance(prompt, dict) else None
        if token_ids is not None:
            check(self.vllm_config, sampling_params, len(token_ids))
        return generate(self, prompt, sampling_params, *args, **kwargs)

    AsyncLLM.generate = check_and_generate


def hook_stats(
    metrics_of: Callable[[VllmConfig], EvictionMetrics | None], take_report: Callable[[object], dict[str, Any] | None]
) -> None:
    """Hand our part of the scheduler's statistics to our metrics, before vLLM's loggers see the rest. Idempotent.

    vLLM's plugins for statistics load in ``AsyncLLM`` only and switch statistics on for everybody. Through a hook of
    the manager where it has one, which is what patches/plugin-stats.patch proposes. Remove the wrapping when every
    supported vLLM has it.
    """
    from vllm.v1.metrics.loggers import StatLoggerManager

    if hasattr(StatLoggerManager, "plugin_stats"):
        StatLoggerManager.plugin_stats[_MARK] = (metrics_of, take_report)
        return
    init, record = StatLoggerManager.__init__, StatLoggerManager.record
    if hasattr(record, _MARK):
        return

    @functools.wraps(init)
    def init_with_metrics(self, vllm_config, *args, **kwargs):
        init(self, vllm_config, *args, **kwargs)
        self.kv_eviction_metrics = metrics_of(vllm_config)

    @functools.wraps(record)
    def record_with_metrics(self, scheduler_stats, iteration_stats, mm_cache_stats=None, engine_idx=None):
        report = take_report(scheduler_stats)
        if report is not None and self.kv_eviction_metrics is not None:
            self.kv_eviction_metrics.record(report, engine_idx or 0)
        record(self, scheduler_stats, iteration_stats, mm_cache_stats, engine_idx)

    setattr(record_with_metrics, _MARK, True)
    StatLoggerManager.__init__ = init_with_metrics
    StatLoggerManager.record = record_with_metrics


def hook_streams(make_report: Callable[[], StreamReport]) -> None:
    """Put ``kv_transfer_params`` on the final usage chunk of a stream, as vLLM does on answers that are not streamed.

    Done by vLLM itself with patches/stream-transfer-params.patch. Idempotent. Remove when every supported vLLM does.
    """
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionStreamResponse
    from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
    from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion

    if "kv_transfer_params" in ChatCompletionStreamResponse.model_fields:
        return
    for serving, name in (
        (OpenAIServingChat, "chat_completion_stream_generator"),
        (OpenAIServingCompletion, "completion_stream_generator"),
    ):
        generate = getattr(serving, name)
        if not hasattr(generate, _MARK):
            setattr(serving, name, _with_report(generate, make_report))


def _with_report(generate, make_report: Callable[[], StreamReport]):
    signature = inspect.signature(generate)

    @functools.wraps(generate)
    async def generate_with_report(*args, **kwargs):
        report = make_report()
        bound = signature.bind(*args, **kwargs)
        bound.arguments["result_generator"] = report.watch(bound.arguments["result_generator"])
        async for event in generate(*bound.args, **bound.kwargs):
            yield report.complete(event)

    setattr(generate_with_report, _MARK, True)
    return generate_with_report
