"""Every place where vLLM lacks a hook and is wrapped instead. Keep it short."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

from vllm.engine.arg_utils import EngineArgs
from vllm.platforms import current_platform
from vllm.v1.attention import selector
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

_MARK = "_vllm_evict_hooked"
_FROM_CLI = "_vllm_evict_from_cli"


def hook_engine_args() -> None:
    """Flags on the command line, and eviction on in the config they lead to. Idempotent.

    Remove when vLLM lets a plugin add arguments and finish a ``VllmConfig``
    (patches/ holds the change proposed for that).
    """
    if getattr(EngineArgs, _MARK, False):
        return
    setattr(EngineArgs, _MARK, True)
    add_cli_args = EngineArgs.add_cli_args
    from_cli_args = EngineArgs.from_cli_args.__func__
    create_engine_config = EngineArgs.create_engine_config

    @functools.wraps(add_cli_args)
    def add_cli_args_with_flags(parser):
        from vllm_evict.engine.cli_flags import add_flags

        parser = add_cli_args(parser)
        add_flags(parser)
        return parser

    @functools.wraps(from_cli_args)
    def from_cli_args_with_settings(cls, args: argparse.Namespace):
        from vllm_evict.engine.cli_flags import merge_settings, one_line_errors, settings_from_args

        with one_line_errors():
            settings = settings_from_args(args)
        engine_args = from_cli_args(cls, args)
        engine_args.additional_config = merge_settings(engine_args.additional_config, settings)
        setattr(engine_args, _FROM_CLI, True)
        return engine_args

    @functools.wraps(create_engine_config)
    def create_engine_config_with_eviction(self, *args, **kwargs):
        from vllm_evict.engine.cli_flags import one_line_errors
        from vllm_evict.engine.configure import CPU_BLOCK_TOKENS, enable, requested_config

        with one_line_errors() if getattr(self, _FROM_CLI, False) else nullcontext():
            if not requested_config(self.additional_config).enabled:
                return create_engine_config(self, *args, **kwargs)
            if self.block_size is None and current_platform.is_cpu():
                self.block_size = CPU_BLOCK_TOKENS
            vllm_config = create_engine_config(self, *args, **kwargs)
            enable(vllm_config)
            return vllm_config

    EngineArgs.add_cli_args = staticmethod(add_cli_args_with_flags)
    EngineArgs.from_cli_args = classmethod(from_cli_args_with_settings)
    EngineArgs.create_engine_config = create_engine_config_with_eviction


@contextmanager
def attention_backends(overrides: dict[AttentionBackendEnum, str]) -> Iterator[None]:
    """Within the block, layers that choose a backend in ``overrides`` get ours.

    The override goes through vLLM's registry. The cache of choices is cleared on
    both sides, so that an engine without eviction in the same process is not
    given ours. Remove when the registry's overrides can be set per engine.
    """
    for backend, class_path in overrides.items():
        register_backend(backend, class_path)
    selector._cached_get_attn_backend.cache_clear()
    try:
        yield
    finally:
        for backend in overrides:
            backend.clear_override()
        selector._cached_get_attn_backend.cache_clear()
