"""Runs engines on the CUDA backends: `python -m tests.triton.builders_child CASES EVIDENCE`, both pickled lists."""

from __future__ import annotations

import pickle
import sys
from copy import copy
from dataclasses import dataclass, field
from pathlib import Path

import torch

from tests.triton.fake_gpu import pretend, use_async_scheduling, use_backend, use_runner


@dataclass(frozen=True)
class Case:
    """One engine and what is asked of it.

    Args:
        name: of the case.
        backend: vLLM's name of the attention backend.
        runner: `"V1"` or `"V2"`.
        capability: of the device.
        engine: for `tests.engine.harness.Engine`, the model first.
        run: for its `run`.
    """

    name: str
    backend: str
    runner: str
    capability: tuple[int, int]
    engine: dict = field(default_factory=dict)
    run: dict = field(default_factory=dict)


@dataclass
class Evidence:
    """What a case showed.

    Args:
        run: the engine's record.
        steps: of each step, the ops' calls.
        buffers: addresses of our block table and lengths.
        captured: what a metadata object for graph capture refers to.
        dummy: the same of a batch without requests.
        support: CUDA graph support by policy: `(stock, ours, ours of wrapped specs, ours of another layer's spec)`.
    """

    run: object
    steps: list[list]
    buffers: dict[str, int]
    captured: dict
    dummy: dict
    support: dict[str, tuple[str, str, str, str]]


def main(cases_path: str, evidence_path: str) -> None:
    """Run them one after the other; of one that does not start, the message is kept."""
    cases = pickle.loads(Path(cases_path).read_bytes())
    pretend()
    from tests.triton import cuda_ops

    cuda_ops.install()
    cuda_ops.note_triton_attention()
    cuda_ops.note_page_mass()
    from tests.engine.harness import Engine
    from vllm_evict.config import EvictionConfigError

    Engine.read_metadata = staticmethod(cuda_ops.read_by_kernels)
    evidence = []
    for case in cases:
        cuda_ops.use_capability(case.capability)
        use_runner(case.runner)
        use_backend(case.backend)
        use_async_scheduling(False)
        try:
            evidence.append(_evidence(case))
        except EvictionConfigError as error:
            evidence.append(str(error))
    Path(evidence_path).write_bytes(pickle.dumps(evidence))


def _evidence(case: Case) -> Evidence:
    from tests.engine.harness import Engine
    from tests.triton import cuda_ops

    steps = []

    def next_step(_number: int) -> None:
        steps.append(list(cuda_ops.calls))
        cuda_ops.calls.clear()

    arguments = dict(case.engine)
    with Engine(arguments.pop("model"), **arguments) as engine:
        captured, dummy = nobodys_tensors(engine)
        support = graph_support(engine, case.backend)
        cuda_ops.calls.clear()
        run = engine.run(**case.run, before_step=next_step)
        next_step(-1)
        buffers = engine.worker.eviction.buffers
        addresses = {"block_table": buffers.block_table.data_ptr(), "seq_lens": buffers.physical_lens.data_ptr()}
    return Evidence(run, steps[1:], addresses, captured, dummy, support)


def _builder(engine):
    group = engine.runner.attn_groups[engine.manager.kv_cache_group_id][0]
    return group.get_metadata_builder(0)


def nobodys_tensors(engine, num_rows: int = 3) -> tuple[dict, dict]:
    """What metadata refer to when a graph of decoding requests is captured, and when it is replayed without any."""
    from vllm.v1.attention.backend import CommonAttentionMetadata

    starts = torch.arange(num_rows + 1, dtype=torch.int32)
    lengths = torch.ones(num_rows, dtype=torch.int32)
    common = CommonAttentionMetadata(
        query_start_loc=starts,
        query_start_loc_cpu=starts.clone(),
        seq_lens=lengths,
        seq_lens_cpu_upper_bound=lengths.clone(),
        num_reqs=num_rows,
        num_actual_tokens=num_rows,
        max_query_len=1,
        max_seq_len=64,
        block_table_tensor=torch.zeros(num_rows, 8, dtype=torch.int32),
        slot_mapping=torch.full((num_rows,), -1, dtype=torch.int64),
    )
    builder = _builder(engine)
    return _tensors_of(builder.build_for_cudagraph_capture(common)), _tensors_of(builder.build(0, common))


def _tensors_of(metadata) -> dict:
    from tests.triton import cuda_ops

    decode = getattr(metadata, "decode", None)
    if decode is None:
        tensors = {"block_table": metadata.block_table, "seq_lens": metadata.seq_lens}
    elif hasattr(decode, "wrapper"):  # reads a buffer of its builder
        tensors = {}
    else:
        tensors = {"block_table": decode.block_tables, "seq_lens": decode.seq_lens}
    return {name: cuda_ops.Given.of(tensor) for name, tensor in tensors.items()}


def graph_support(engine, backend: str) -> dict[str, tuple[str, str, str, str]]:
    """See `Evidence.support`."""
    from vllm.config import set_current_vllm_config
    from vllm.v1.attention.backends.registry import AttentionBackendEnum
    from vllm.v1.kv_cache_interface import FullAttentionSpec, UniformTypeKVCacheSpecs

    stock = AttentionBackendEnum[backend].get_class().get_builder_cls()
    ours, spec = type(_builder(engine)), _builder(engine).kv_cache_spec
    wrapped = UniformTypeKVCacheSpecs(block_size=spec.block_size, kv_cache_specs={"a": spec, "b": spec})
    plain = FullAttentionSpec(
        block_size=spec.block_size, num_kv_heads=spec.num_kv_heads, head_size=spec.head_size, dtype=spec.dtype
    )
    support = {}
    for policy in ("streaming", "keydiff", "h2o", "h2o-keydiff"):
        config = copy(engine.core.vllm_config)
        config.additional_config = {"kv_eviction": {"policy": policy, "budget": 64}}
        with set_current_vllm_config(config):
            support[policy] = (
                stock.get_cudagraph_support(config, spec).name,
                ours.get_cudagraph_support(config, spec).name,
                ours.get_cudagraph_support(config, wrapped).name,
                ours.get_cudagraph_support(config, plain).name,
            )
    return support


if __name__ == "__main__":
    from tests.triton import builders_child  # under its name: what it pickles is to be found by others

    builders_child.main(*sys.argv[1:])
