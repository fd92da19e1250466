"""What this machine's vLLM would do with a model and flags: the part of `vllm-evict doctor` that needs vLLM."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import vllm
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.engine.arg_utils import AsyncEngineArgs, EngineArgs
from vllm.entrypoints.cli.serve import make_arg_parser
from vllm.platforms import current_platform
from vllm.usage.usage_lib import UsageContext
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.attention.selector import get_attn_backend

from vllm_evict.config import CONFIG_KEY, EvictionConfigError, flag_name
from vllm_evict.engine.configure import config_of, enable
from vllm_evict.engine.engine_args import EvictionEngineArgs
from vllm_evict.engine.support import check_vllm_version, refused

DEFAULT_POLICY = "h2o"
"""Checked where there is no flag of eviction; what `vllm-evict serve` uses."""


class Finding(NamedTuple):
    """One line of the report.

    Args:
        name: what was looked at.
        good: False is a fault; None is for information only.
        detail: what was found.

    """

    name: str
    good: bool | None
    detail: str


def check_version() -> Finding:
    """Whether this vLLM is one whose internals were read and tested."""
    try:
        check_vllm_version(vllm.__version__)
    except EvictionConfigError as error:
        return Finding("vLLM version", False, str(error))
    return Finding("vLLM version", True, f"{vllm.__version__} is a tested one")


def check_flags() -> Finding:
    """Whether vLLM's command line knows our flags, that is, whether the plugin has come to work in this process."""
    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
    if flag_name("policy") not in parser._option_string_actions:
        return Finding("flags", False, f"vLLM's command line does not know {flag_name('policy')}")
    by = "by wrapping EngineArgs" if hasattr(EngineArgs.create_engine_config, "__wrapped__") else "through vLLM's hook"
    return Finding("flags", True, f"{flag_name('policy')} is known to vLLM's command line, {by}")


def machine() -> list[Finding]:
    """Platform, worker and model runner, whatever the model."""
    config = VllmConfig()
    return [Finding("platform", None, current_platform.get_device_name()), _runner(config)]


def check_model(model: str, options: Sequence[str]) -> list[Finding]:
    """What `vllm serve MODEL OPTIONS` would make of this machine, and everything that eviction would refuse of it."""
    try:
        with _command_line_errors():
            engine_args = _engine_args(model, options)
            settings = engine_args.additional_config[CONFIG_KEY]
            plain = _plain_config(engine_args)
    except (Exception, SystemExit) as error:  # whatever vLLM makes of it, the user gets to read it
        return [Finding("vllm serve", False, f"would refuse {model}: {_gist(error)}")]
    plain.additional_config = {**plain.additional_config, CONFIG_KEY: settings}
    findings = [_runner(plain), _backend(plain)]
    config = config_of(plain)
    if not config.enabled:
        return [*findings, Finding("eviction", None, f"{flag_name('policy')} none: vLLM is left as it is")]
    faults = [
        Finding("refused", False, f"{refusal.feature}: {refusal.why}. Way out: {refusal.instead}.")
        for refusal in refused(plain, config)
    ]
    try:
        config.page_budget(plain.cache_config.block_size)
        if not faults:
            enable(plain)
    except EvictionConfigError as error:
        faults.append(Finding("refused", False, str(error)))
    if faults:
        return findings + faults
    return [*findings, Finding("eviction", True, f"{flag_name('policy')} {config.policy} would start; {_how(plain)}")]


def _engine_args(model: str, options: Sequence[str]) -> AsyncEngineArgs:
    args = make_arg_parser(FlexibleArgumentParser()).parse_args([model, *options])
    args.model = model
    engine_args = AsyncEngineArgs.from_cli_args(args)
    additional_config = engine_args.additional_config or {}
    settings = additional_config.get(CONFIG_KEY) or {"policy": DEFAULT_POLICY}
    engine_args.additional_config = {**additional_config, CONFIG_KEY: settings}
    return engine_args


def _plain_config(engine_args: AsyncEngineArgs) -> VllmConfig:
    """The config without eviction, whose first refusal would hide the others."""
    EvictionEngineArgs().before_engine_config(engine_args)  # the page size that eviction asks for
    with_settings = engine_args.additional_config
    engine_args.additional_config = {key: value for key, value in with_settings.items() if key != CONFIG_KEY}
    return engine_args.create_engine_config(UsageContext.OPENAI_API_SERVER)


def _runner(config: VllmConfig) -> Finding:
    runner = "V2" if config.use_v2_model_runner else "V1"
    scheduling = "asynchronous" if config.scheduler_config.async_scheduling else "synchronous"
    worker = config.parallel_config.worker_cls
    return Finding("runner", None, f"{runner} model runner, {scheduling} scheduling, {worker}")


def _backend(config: VllmConfig) -> Finding:
    model = config.model_config
    try:
        with set_current_vllm_config(config):
            backend = get_attn_backend(
                model.get_head_size(), model.dtype, config.cache_config.cache_dtype, use_mla=model.use_mla
            )
    except (ImportError, ValueError) as error:
        return Finding("attention backend", False, f"none: {_gist(error)}")
    return Finding("attention backend", None, f"{backend.get_name()} ({backend.__module__}.{backend.__name__})")


def _how(config: VllmConfig) -> str:
    return (
        f"pages of {config.cache_config.block_size} tokens, {config.max_in_flight_tokens:,} tokens in flight, "
        f"{config.parallel_config.worker_cls}"
    )


@contextlib.contextmanager
def _command_line_errors() -> Iterator[None]:
    """A wrong command line, which prints and exits, raises what it printed instead."""
    printed = io.StringIO()
    try:
        with contextlib.redirect_stderr(printed):
            yield
    except SystemExit:
        raise ValueError(printed.getvalue().strip() or "wrong command line") from None


def _gist(error: BaseException) -> str:
    """The line of a message that says it: argparse and pydantic both end with it, pydantic with a link after it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    lines = [line for line in lines if not line.startswith("For further information visit")]
    return lines[-1] if lines else type(error).__name__
