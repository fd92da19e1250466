"""xFormers' kernel as the XFORMERS backend would launch it, compiled for a GPU that is not there."""

from __future__ import annotations

import re
import subprocess
import tempfile
from types import SimpleNamespace
from unittest import mock

import torch

_TYPES = {torch.bfloat16: "*bf16", torch.float32: "*fp32", torch.float64: "*fp64", torch.int32: "*i32"}


class _LaunchError(Exception):
    """Carries the arguments of a launch instead of launching."""


class _Recorder:
    def __getitem__(self, grid):
        def launch(**arguments):
            raise _LaunchError(arguments)

        return launch


def launched_with(
    *, capability: tuple[int, int], head_size: int, queries_per_slice: int, heads_per_kv_head: int
) -> dict:
    """The arguments that reach the kernel: 8 rows of 4096 tokens, 8 KV heads, bf16, pages of 64, log-sum-exp wanted."""
    from vllm_evict.engine.attention import xformers_impl as impl

    rows, kv_heads, page, pages = 8, 8, 64, 64
    builder = SimpleNamespace(device=torch.device("cpu"), page_tokens=page, window_tokens=None)
    mask = impl.XFormersMetadataBuilder._mask(
        builder,
        SimpleNamespace(num_rows=rows, queries_per_slice=queries_per_slice),
        torch.ones(rows, dtype=torch.int32),
        torch.zeros(rows, pages, dtype=torch.int32),
    )
    heads = kv_heads * heads_per_kv_head
    call = impl.XFormersCall(torch.zeros(rows * queries_per_slice, dtype=torch.int64), None, None, mask)
    layer = impl.XFormersImpl(heads, head_size, 0.1, kv_heads, None, None, "auto")
    query = torch.zeros(1, heads, head_size, dtype=torch.bfloat16)
    cache = torch.zeros(1, page, kv_heads, 2 * head_size, dtype=torch.bfloat16)
    with (
        mock.patch.object(torch.cuda, "get_device_capability", lambda *args, **kwargs: capability),
        mock.patch.object(impl.triton_splitk.FwOp, "get_kernel", classmethod(lambda cls: _Recorder())),
    ):
        try:
            layer._attend(call, query, *cache.split(head_size, dim=-1), query, torch.zeros(1, heads))
        except _LaunchError as launch:
            return launch.args[0] | {"BOUNDS_CHECKS_N": True}
    raise AssertionError("nothing was launched")


def compiled(arguments: dict, capability: tuple[int, int]) -> tuple[int, int]:
    """Bytes of shared memory of a program and of stack (registers spilled) of a thread."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.knobs import nvidia
    from xformers.ops.fmha._triton.splitk_kernels import _get_splitk_kernel

    kernel = _get_splitk_kernel(1).fn
    options = {name: arguments[name] for name in ("num_warps", "num_stages")}
    signature, constants, attributes = {}, {}, {}
    for index, parameter in enumerate(kernel.params):
        value = arguments.get(parameter.name)
        if parameter.is_constexpr or value is None or (isinstance(value, int) and value == 1):
            signature[parameter.name], constants[(index,)] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[parameter.name] = _TYPES[value.dtype]
        else:
            signature[parameter.name] = "fp32" if isinstance(value, float) else "i32"
        if signature[parameter.name] in (*_TYPES.values(), "i32") and (
            isinstance(value, torch.Tensor) or value % 16 == 0
        ):
            attributes[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    target = GPUTarget("cuda", 10 * capability[0] + capability[1], 32)
    program = triton.compile(source, target=target, options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(program.asm["cubin"])
        file.flush()
        usage = subprocess.run([nvidia.cuobjdump.path, "-res-usage", file.name], capture_output=True, text=True)
    (stack_bytes,) = re.findall(r"STACK:(\d+)", usage.stdout)
    return program.metadata.shared, int(stack_bytes)
