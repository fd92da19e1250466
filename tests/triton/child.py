"""Runs engines under the interpreter: `python -m tests.triton.child SCENARIOS RUNS`, both pickled lists."""

from __future__ import annotations

import pickle
import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from tests.triton.fake_gpu import pretend, use_async_scheduling, use_backend, use_graphs, use_runner

RUNNERS = {
    "V1": ("V1", False, ()),
    "V2": ("V2", False, ()),
    "V2-async": ("V2", True, ()),
    "V1-graphs": ("V1", False, (1, 2, 4)),
    "V2-graphs": ("V2", False, (1, 2, 4)),
    "V2-async-graphs": ("V2", True, (1, 2, 4)),
}
"""By the name that tests show: which runner, whether it is asynchronous, the batches for which it has CUDA graphs."""


@dataclass(frozen=True)
class Scenario:
    """One engine and what is asked of it.

    Args:
        runner: `"V1"` or `"V2"`.
        backend: vLLM's name of the attention backend.
        asynchronous: whether steps are scheduled before the last one's output is read.
        graphs: sizes of batches; steps of that many decoding requests or fewer are replayed.
        engine: for `tests.engine.harness.Engine`, the model first.
        run: for its `run`.
    """

    runner: str
    backend: str
    asynchronous: bool = False
    graphs: tuple[int, ...] = ()
    engine: dict = field(default_factory=dict)
    run: dict = field(default_factory=dict)


def main(scenarios_path: str, runs_path: str) -> None:
    """Run them one after the other."""
    scenarios = pickle.loads(Path(scenarios_path).read_bytes())
    pretend()
    from tests.engine.harness import Engine
    from tests.triton import graphs

    graphs.install()
    calls = count_page_mass()
    runs = []
    for scenario in scenarios:
        use_runner(scenario.runner)
        use_backend(scenario.backend)
        use_async_scheduling(scenario.asynchronous)
        use_graphs(list(scenario.graphs))
        arguments = dict(scenario.engine)
        with Engine(arguments.pop("model"), **arguments) as engine:
            assert engine.llm.llm_engine.vllm_config.scheduler_config.async_scheduling == scenario.asynchronous
            modules = [base.__module__ for base in type(engine.worker.model_runner).__mro__]
            assert any(name.startswith("vllm.v1.worker.gpu.") for name in modules) == (scenario.runner == "V2"), modules
            if scenario.runner == "V2":
                graphs.warm_up(engine)
            calls.clear()
            captured = graphs.capture(engine) if scenario.graphs else {}
            captured_calls = dict(calls)
            assert {graph.num_tokens for graph in captured} == set(scenario.graphs)
            calls.clear()
            run = engine.run(**scenario.run)
            run.kernel_calls, run.captured_calls = dict(calls), captured_calls
            decoding = [s for s in run.steps if s.rows and {row.num_scheduled_tokens for row in s.rows.values()} == {1}]
            assert sum(graph.replays for graph in captured.values()) == (len(decoding) if captured else 0)
            runs.append(run)
    Path(runs_path).write_bytes(pickle.dumps(runs))


def count_page_mass() -> Counter[str]:
    """Calls of both ways to make page mass, from now on."""
    from vllm_evict.engine.attention import paged_gpu, triton_attn

    calls = Counter()

    def counted(function):
        def call(**kwargs) -> None:
            calls[function.__name__] += 1
            function(**kwargs)

        return call

    paged_gpu.kernels.add_page_mass = counted(paged_gpu.kernels.add_page_mass)
    triton_attn.decode_with_page_mass = counted(triton_attn.decode_with_page_mass)
    return calls


if __name__ == "__main__":
    main(*sys.argv[1:])
