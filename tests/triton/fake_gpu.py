"""vLLM on a machine without a GPU, believing that it has Triton: kernels run in Triton's interpreter, on CPU tensors.

`pretend()` must run before vllm is imported, and only in a process of its own: whoever imported vllm without it keeps
the CPU's kernels. Nothing of vLLM's or ours is replaced but what is asked about the machine:
that some Triton driver is active, what the device can do, which attention stands in the place of the CPU's.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from types import SimpleNamespace


def pretend() -> None:
    """Switch the interpreter on and have vLLM find it."""
    os.environ |= {
        "TRITON_INTERPRET": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "CUDA_VISIBLE_DEVICES": "",
        "TORCHDYNAMO_DISABLE": "1",  # it would compile for the driver that is not there
    }
    import torch
    import triton.backends

    driver = SimpleNamespace(is_active=lambda: True)
    triton.backends.backends["cpu"] = SimpleNamespace(driver=driver, compiler=None)
    torch.cuda.get_device_capability = lambda *args, **kwargs: (8, 0)


def use_backend(name: str) -> None:
    """Give layers the attention backend of this name wherever the CPU's own would be."""
    from vllm.v1.attention.backends import triton_attn
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    from vllm_evict.engine import support, worker

    support.has_gpu = lambda config: True
    # Few, large programs: vLLM would split a small batch 16 ways to fill a GPU.
    triton_attn.MIN_LAUNCH_GRID_SIZE_2D = 0
    register_backend(AttentionBackendEnum.CPU_ATTN, AttentionBackendEnum[name].get_path())
    worker.BACKENDS[AttentionBackendEnum.CPU_ATTN] = worker.BACKENDS[AttentionBackendEnum[name]]


def use_runner(version: str) -> None:
    """Have the next engine run vLLM's model runner ``"V1"`` or ``"V2"``."""
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = str(int(version == "V2"))


def use_async_scheduling(wanted: bool) -> None:
    """Let the next engine schedule ahead of its outputs, which vLLM rules out on CPUs."""

    def allow(vllm_config) -> None:
        vllm_config.scheduler_config.async_scheduling = wanted

    _after_check("async scheduling", allow)


def use_graphs(sizes: list[int]) -> None:
    """Let the next engine replay steps of up to that many decoding requests; none: no graphs. See `graphs`."""
    from vllm.config import CUDAGraphMode

    def allow(vllm_config) -> None:
        if sizes:
            compilation = vllm_config.compilation_config
            compilation.cudagraph_mode = CUDAGraphMode.FULL_DECODE_ONLY
            compilation.cudagraph_capture_sizes, compilation.max_cudagraph_capture_size = sizes, max(sizes)

    _after_check("CUDA graphs", allow)


_changes: dict[str, Callable[..., None]] = {}


def _after_check(name: str, change: Callable[..., None]) -> None:
    """Apply `change` to what the platform has made of a configuration, in place of an earlier change of that name."""
    from vllm.platforms import current_platform

    platform = type(current_platform)
    if not _changes:
        stock = platform.check_and_update_config

        def check_and_change(cls, vllm_config) -> None:
            stock(vllm_config)
            for apply in _changes.values():
                apply(vllm_config)

        platform.check_and_update_config = classmethod(check_and_change)
    _changes[name] = change
