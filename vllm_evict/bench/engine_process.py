"""An engine in a process of its own that does nothing until it is asked: lets several be measured in turn.

All engines of a benchmark are up at once, and idle ones wait on a pipe, so rounds can be interleaved and
compared as ratios although the machine is noisy.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any


@dataclass(frozen=True)
class DecodeTiming:
    """Steps in which every request of the batch produced one token."""

    num_steps: int
    seconds: float
    num_tokens: int

    @property
    def tokens_per_second(self) -> float:
        return self.num_tokens / self.seconds


class EngineProcess:
    """A vLLM engine with the given eviction settings, in a child process.

    Args:
        model: folder of the model.
        eviction: settings as in `additional_config["kv_eviction"]`; None = the plugin's flag is absent.
        engine_args: further keyword arguments of `vllm.LLM`.

    """

    def __init__(self, model: str, eviction: dict[str, Any] | None, **engine_args: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, child_pipe = context.Pipe()
        self._process = context.Process(target=_child, args=(child_pipe, model, eviction, engine_args), daemon=True)
        self._process.start()
        child_pipe.close()
        self._receive()

    def decode(self, prompts: list[list[int]], num_new_tokens: int) -> DecodeTiming:
        """Run `prompts` as one batch and time its full decode steps."""
        self._pipe.send(("decode", prompts, num_new_tokens))
        return self._receive()

    def prefill(self, prompts: list[list[int]]) -> None:
        """Run `prompts` for one output token each."""
        self._pipe.send(("decode", prompts, 1))
        self._receive()

    def close(self) -> None:
        """Stop the process."""
        self._pipe.send(None)
        self._process.join(30)
        if self._process.is_alive():
            self._process.kill()

    def _receive(self) -> Any:
        try:
            answer = self._pipe.recv()
        except EOFError:
            raise RuntimeError("the engine's process ended; its messages stand above") from None
        if isinstance(answer, Exception):
            raise answer
        return answer


def _child(pipe: Connection, model: str, eviction: dict[str, Any] | None, engine_args: dict[str, Any]) -> None:
    # In-process, so that a step is timed and not the way to another process.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("OMP_NUM_THREADS", str(len(os.sched_getaffinity(0))))
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    try:
        from vllm import LLM

        llm = LLM(
            model,
            additional_config={} if eviction is None else {"kv_eviction": eviction},
            distributed_executor_backend="uni",
            enforce_eager=True,
            **engine_args,
        )
        pipe.send("ready")
        while (command := pipe.recv()) is not None:
            _, prompts, num_new_tokens = command
            pipe.send(_decode(llm.llm_engine, prompts, num_new_tokens))
    except EOFError:
        return
    except Exception as error:
        pipe.send(RuntimeError(f"{type(error).__name__}: {error}"))


def _decode(engine: Any, prompts: list[list[int]], num_new_tokens: int) -> DecodeTiming:
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0.0, max_tokens=num_new_tokens, ignore_eos=True, detokenize=False)
    for i, prompt in enumerate(prompts):
        engine.add_request(str(i), {"prompt_token_ids": prompt}, sampling)
    num_steps, seconds = 0, 0.0
    decoding = False
    while engine.has_unfinished_requests():
        start = time.perf_counter()
        outputs = engine.step()
        elapsed = time.perf_counter() - start
        full = len(outputs) == len(prompts)
        if full and decoding:  # the first full step still holds the end of the prefill
            num_steps += 1
            seconds += elapsed
        decoding = full
    return DecodeTiming(num_steps, seconds, num_steps * len(prompts))
