"""What eviction does when ``EngineArgs`` are declared, parsed and turned into a ``VllmConfig``.

``compat`` brings these four calls about: through vLLM's own hook where vLLM has it, else by wrapping.
"""

from __future__ import annotations

import argparse
from contextlib import nullcontext
from typing import TYPE_CHECKING

from vllm.platforms import current_platform

from vllm_evict.engine import compat
from vllm_evict.engine.cli_flags import add_flags, merge_settings, one_line_errors, settings_from_args
from vllm_evict.engine.configure import CPU_BLOCK_TOKENS, enable, requested_config

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.engine.arg_utils import EngineArgs

_FROM_CLI = "_vllm_evict_from_cli"


class EvictionEngineArgs:
    """The four moments. A wrong setting is one line and exit code 2 on the command line, an exception elsewhere."""

    def add_cli_args(self, parser: argparse.ArgumentParser) -> None:
        """Declare the ``--kv-eviction*`` flags."""
        add_flags(parser)

    def from_cli_args(self, engine_args: EngineArgs, args: argparse.Namespace) -> None:
        """Put the flags' values into ``additional_config``."""
        with one_line_errors():
            settings = settings_from_args(args)
            engine_args.additional_config = merge_settings(engine_args.additional_config, settings)
        # Further API servers are processes that start from ``args``, before this plugin is loaded there.
        args.additional_config = engine_args.additional_config
        setattr(engine_args, _FROM_CLI, True)

    def before_engine_config(self, engine_args: EngineArgs) -> None:
        """A finer page on CPUs than vLLM's default, unless the user chose one; any length where positions rebase."""
        with _errors(engine_args):
            config = requested_config(engine_args.additional_config)
        if config.rebases:
            compat.allow_longer_than_the_model(engine_args)
        if config.enabled and engine_args.block_size is None and current_platform.is_cpu():
            engine_args.block_size = CPU_BLOCK_TOKENS

    def after_engine_config(self, engine_args: EngineArgs, vllm_config: VllmConfig) -> None:
        """Switch eviction on in the finished config."""
        with _errors(engine_args):
            if not requested_config(engine_args.additional_config).enabled:
                return
            enable(vllm_config)
        _hook_front_end(engine_args)


def _hook_front_end(engine_args: EngineArgs) -> None:
    """Whoever has made the config is the front end of its engine, or shares the process with it."""
    from vllm_evict.engine.front_end import StreamReport, check_request
    from vllm_evict.engine.metrics import metrics_of, take_report

    compat.hook_requests(check_request)
    compat.hook_stats(metrics_of, take_report)
    if getattr(engine_args, _FROM_CLI, False) or engine_args._api_process_count > 1:
        compat.hook_streams(StreamReport)


def _errors(engine_args: EngineArgs):
    return one_line_errors() if getattr(engine_args, _FROM_CLI, False) else nullcontext()
