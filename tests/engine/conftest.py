"""Engines run inside the test process, on one thread, without torch.compile: set-up and undo."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    # No binding and one thread: these models are tiny, and threads that spin on shared cores cost a factor of ten.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "VLLM_LOGGING_LEVEL": "INFO",  # some tests read the log
}


@pytest.fixture(scope="package", autouse=True)
def engine_environment():
    """For this package only: other tests start servers, which inherit the environment."""
    import torch
    from vllm.config.logging import LoggingConfig
    from vllm.logger import configure_logging_if_needed

    before = {name: os.environ.get(name) for name in _ENVIRONMENT}
    threads = torch.get_num_threads()
    os.environ.update(_ENVIRONMENT)
    torch.set_num_threads(1)
    torch.compiler.set_stance("force_eager")  # vLLM's sampler compiles even under enforce_eager
    # As the first engine of a process does, who drops the handlers that a test may have added before.
    configure_logging_if_needed(LoggingConfig())
    yield
    torch.compiler.set_stance("default")
    torch.set_num_threads(threads)
    for name, value in before.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


@pytest.fixture(scope="package")
def models(tmp_path_factory):
    """`models(name, **arguments)`: the folder of a tiny or planted model, built once."""
    from tests.models.plant import plant
    from tests.models.tiny import MODELS

    built: dict[tuple, Path] = {}

    def get(name: str, **arguments) -> Path:
        key = (name, *sorted(arguments.items()))
        if key not in built:
            build = plant if name == "plant" else MODELS[name]
            built[key] = build(tmp_path_factory.mktemp(name), **arguments)
        return built[key]

    return get


@pytest.fixture(scope="package")
def engine(models, tmp_path_factory):
    """`engine(model="tiny", **arguments)`: a running `Engine`, with a trace; use it in a `with`."""
    from tests.engine.harness import Engine

    folder = tmp_path_factory.mktemp("traces")
    count = iter(range(10_000))

    def start(model: str | Path = "tiny", **arguments) -> Engine:
        path = models(model) if isinstance(model, str) else model
        trace = folder / f"{next(count)}.jsonl" if arguments.get("eviction") is not None else None
        return Engine(path, trace=trace, **arguments)

    return start
