"""CUDA graphs without CUDA: a capture writes down every kernel launch, a replay launches the same again.

Like the real thing, a replay knows nothing of Python: sizes, strides, flags and addresses are those of the capture,
and what tensors hold is read anew. So it shows what a full graph gets wrong: a tensor that a step makes afresh, a
number that was baked in, a read of a value by the host (an error here as there). What it does not show is streams,
memory pools and speed.
"""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Graph:
    """Stands for ``torch.cuda.CUDAGraph``."""

    def __init__(self) -> None:
        self.launches = []
        self.replays = 0
        self.before_replay = lambda: None

    def replay(self) -> None:
        self.before_replay()
        self.replays += 1
        for launch in self.launches:
            launch()


class _Recorder(TorchDispatchMode):
    """Runs everything and notes it in the graph."""

    current: _Recorder | None = None

    def __init__(self, graph: Graph) -> None:
        super().__init__()
        self.graph = graph

    def __enter__(self):
        _Recorder.current = self
        return super().__enter__()

    def __exit__(self, *exception):
        _Recorder.current = None
        return super().__exit__(*exception)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        assert function.namespace != "vllm", f"{function}: what it does inside would not be seen"
        if function.overloadpacket in (torch.ops.aten._local_scalar_dense, torch.ops.aten.equal):
            raise RuntimeError("the host waits for the device, which no stream can do while it is captured")
        result = function(*args, **kwargs)
        if "empty" not in function.name():
            self.graph.launches.append(lambda: _again(function, args, kwargs, result))
        return result


def _again(function, args, kwargs, result) -> None:
    """Launch once more, into the memory that held the results of the capture."""
    for old, new in zip(tree_leaves(result), tree_leaves(function(*args, **kwargs)), strict=True):
        if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():  # else a view, or changed in place
            old.copy_(new)


@contextmanager
def _capture(graph: Graph, *args, **kwargs):
    with _Recorder(graph):
        yield


def _record_kernels() -> None:
    """Kernels of Triton's interpreter are launches, too."""
    from triton.runtime.interpreter import GridExecutor

    launch = GridExecutor.__call__

    def launch_and_record(self, *args, **kwargs):
        recorder = _Recorder.current
        if recorder is None:
            return launch(self, *args, **kwargs)
        recorder.graph.launches.append(lambda: launch(self, *args, **kwargs))
        with torch.utils._python_dispatch._disable_current_modes():
            return launch(self, *args, **kwargs)

    GridExecutor.__call__ = launch_and_record


def install() -> None:
    """Let vLLM's model runners capture and replay on this machine; once in a process, after `pretend()`."""
    from vllm.compilation import cuda_graph
    from vllm.platforms import current_platform
    from vllm.v1.worker.gpu import cudagraph_utils

    _record_kernels()
    torch.cuda.CUDAGraph, torch.cuda.graph = Graph, _capture
    type(current_platform).graph_pool_handle = classmethod(lambda cls: (0, 0))
    for module in (cuda_graph, cudagraph_utils):
        module.capture_pool = lambda pool, config: nullcontext(pool)
        module.current_stream = lambda: SimpleNamespace()
    cudagraph_utils.graph_capture = lambda device: nullcontext()
    cuda_graph.weak_ref_tensors = lambda tensors: tensors


def capture(engine) -> dict:
    """Capture an engine's graphs as its worker would after the start, and have replays watched as forward passes are.

    Returns the graphs by vLLM's descriptor of them.
    """
    from vllm.forward_context import get_forward_context

    runner, graphs = engine.runner, []
    for layer in engine.core.vllm_config.compilation_config.static_forward_context.values():
        layer.use_direct_call = True  # its kernels are launches like others, not hidden in an operator of vLLM's

    def note(module, args, kwargs) -> None:
        if _Recorder.current is not None:
            graph, metadata, positions = (
                _Recorder.current.graph,
                get_forward_context().attn_metadata,
                kwargs["positions"],
            )
            graph.before_replay = lambda: before_replay(metadata, positions)
            graphs.append(graph)

    def before_replay(metadata, positions) -> None:
        num_requests = engine.watch_forward(metadata, positions)
        for layer_metadata in metadata.values():
            assert not layer_metadata.seq_lens[num_requests:].any(), "rows of no request would be attended"

    hook = runner.model.register_forward_pre_hook(note, with_kwargs=True)
    captured = _capture_v2(runner) if hasattr(runner, "cudagraph_manager") else _capture_v1(runner)
    hook.remove()
    assert set(graphs) == set(captured.values())
    return captured


def warm_up(engine) -> None:
    """As a GPU's worker does before it captures with the V2 model runner: steps of requests that only vLLM knows."""
    from vllm.v1.worker.cpu_worker import CPUWorker
    from vllm.v1.worker.gpu.warmup import run_mixed_prefill_decode_warmup

    def steps(worker) -> bool:
        return run_mixed_prefill_decode_warmup(worker.model_runner, worker.execute_model, worker.sample_tokens, 5)

    with mock.patch.object(CPUWorker, "compile_or_warm_up_model", steps):
        assert engine.worker.compile_or_warm_up_model()


def _capture_v2(runner) -> dict:
    runner.cudagraph_manager.capture(
        runner.model,
        runner.model_state,
        runner.input_buffers,
        runner.intermediate_tensors,
        runner.block_tables,
        runner.attn_groups,
        runner.kv_cache_config,
    )
    return runner.cudagraph_manager.graphs


def _capture_v1(runner) -> dict:
    from vllm.compilation.cuda_graph import CUDAGraphWrapper
    from vllm.compilation.monitor import set_cudagraph_capturing_enabled
    from vllm.config import CUDAGraphMode

    # The CPU's runner does without; a GPU's wraps its model when it is loaded.
    runner.model = CUDAGraphWrapper(runner.model, runner.vllm_config, runtime_mode=CUDAGraphMode.FULL)
    set_cudagraph_capturing_enabled(True)
    for mode, descriptors in runner.cudagraph_dispatcher.get_capture_descs():
        runner._capture_cudagraphs(descriptors, mode)
    set_cudagraph_capturing_enabled(False)
    return {key: entry.cudagraph for key, entry in runner.model.concrete_cudagraph_entries.items()}
