"""From a finished ``VllmConfig`` to one whose scheduler and workers evict."""

from __future__ import annotations

import vllm
from vllm.config import VllmConfig

from vllm_evict.config import CONFIG_KEY, EvictionConfig, EvictionConfigError, flag_name, parse_request
from vllm_evict.engine.log import logger
from vllm_evict.engine.sizing import check_positions
from vllm_evict.engine.support import check_supported, check_vllm_version
from vllm_evict.engine.trace import check_writable

CPU_BLOCK_TOKENS = 32
"""Page size on CPU unless the user sets one: the finest its attention kernel takes (vLLM: 128)."""

_GPU_WORKER = "vllm.v1.worker.gpu_worker.Worker"
_WORKERS = {
    "vllm.v1.worker.cpu_worker.CPUWorker": "vllm_evict.engine.worker.EvictionCPUWorker",
    _GPU_WORKER: "vllm_evict.engine.worker.EvictionGPUWorker",
}


def requested_config(additional_config: object) -> EvictionConfig:
    """The eviction settings inside ``VllmConfig.additional_config``; off if there are none.

    Raises:
        EvictionConfigError: they are wrong.

    """
    if not isinstance(additional_config, dict) or CONFIG_KEY not in additional_config:
        return EvictionConfig()
    return parse_request(additional_config[CONFIG_KEY])


def config_of(vllm_config: VllmConfig) -> EvictionConfig:
    """The eviction settings that ``vllm_config`` carries."""
    return requested_config(vllm_config.additional_config)


def enable(vllm_config: VllmConfig) -> None:
    """Check everything that can be known before weights load, then switch eviction on.

    Raises:
        EvictionConfigError: settings, vLLM version, model or a feature do not fit.

    """
    config = config_of(vllm_config)
    check_vllm_version(vllm.__version__)
    check_supported(vllm_config, config)
    config.page_budget(vllm_config.cache_config.block_size)
    config.page_floor(vllm_config.cache_config.block_size)
    check_positions(config, vllm_config, vllm_config.cache_config.block_size)
    if config.trace is not None:
        check_writable(config.trace)
    if config.sink == 0:
        logger.warning("%s 0: without attention sinks most models lose the thread once pages go", flag_name("sink"))
    worker_cls = vllm_config.parallel_config.worker_cls
    if worker_cls not in _WORKERS:
        raise EvictionConfigError(
            f"KV eviction has no worker for {worker_cls!r}; supported: {', '.join(_WORKERS)}. "
            "Run it on a CPU or an NVIDIA GPU, or drop --kv-eviction."
        )
    if worker_cls == _GPU_WORKER:
        logger.warning(
            "KV eviction on GPUs has been tested with Triton's interpreter and an eager reference, on no GPU yet: "
            "run deploy/gpu-check/serve_check.py on this machine first"
        )
    vllm_config.parallel_config.worker_cls = _WORKERS[worker_cls]
    scheduler = "AsyncEvictionScheduler" if vllm_config.scheduler_config.async_scheduling else "EvictionScheduler"
    vllm_config.scheduler_config.scheduler_cls = f"vllm_evict.engine.scheduler.{scheduler}"
