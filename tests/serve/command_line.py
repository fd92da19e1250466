"""Many `vllm serve` command lines for the price of one import of vLLM.

The child process imports vLLM once and forks for each command line. The fork runs vLLM's own `main()` up to the point
where the engine would start (and weights load), or builds a small engine. `CommandLines` is the side of the tests.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

# A command line takes about a second on a quiet machine.
ONE_SECONDS = 120


@dataclass(frozen=True)
class Outcome:
    """What became of a command line.

    Args:
        status: exit status; 0 where vLLM went on to start the engine.
        output: stdout and stderr.
        facts: what the engine would have started with; None if it did not come to that.

    """

    status: int
    output: str
    facts: dict[str, Any] | None

    @property
    def last_line(self) -> str:
        return self.output.strip().splitlines()[-1]


class CommandLines:
    """The child process. Use it in a `with`."""

    def __enter__(self) -> CommandLines:
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        return self

    def __exit__(self, *_) -> None:
        self._process.communicate()  # closes stdin, which ends it

    def serve(self, *argv: str, environment: Mapping[str, str] | None = None, version: str | None = None) -> Outcome:
        """Run `vllm serve ARGV`.

        Args:
            argv: its arguments.
            environment: variables to set.
            version: what vLLM shall call itself.

        """
        return self._ask(job="serve", argv=argv, environment=dict(environment or {}), version=version)

    def engine(self, environment: Mapping[str, str] | None = None, **arguments: Any) -> Outcome:
        """Build an in-process engine, `LLM(**arguments)`, and let it complete a fixed prompt."""
        return self._ask(job="engine", arguments=arguments, environment=dict(environment or {}))

    def _ask(self, **request: Any) -> Outcome:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return Outcome(**json.loads(self._process.stdout.readline()))


# ---- the child ----


def _main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever an import prints must not get among the answers
    import vllm.entrypoints.cli.main
    import vllm.entrypoints.cli.serve  # noqa: F401

    for line in sys.stdin:
        answers.write(json.dumps(_in_fork(json.loads(line))) + "\n")
        answers.flush()


def _in_fork(request: dict[str, Any]) -> dict[str, Any]:
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as facts:
        pid = os.fork()
        if pid == 0:
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
            os._exit(_guarded(request, facts))
        status = _wait(pid)
        output.seek(0)
        facts.seek(0)
        return {"status": status, "output": output.read(), "facts": json.loads(facts.read() or "null")}


def _wait(pid: int) -> int:
    end = time.monotonic() + ONE_SECONDS
    while True:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > end:
            os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)


def _guarded(request: dict[str, Any], facts) -> int:
    """The job's exit status, as the interpreter would make it of an exception."""
    import traceback

    try:
        os.environ.update(request["environment"])
        _JOBS[request["job"]](request, facts)
        code = 0
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    facts.flush()
    return code


def _serve(request: dict[str, Any], facts) -> None:
    import vllm
    from vllm.entrypoints.cli.main import main
    from vllm.v1.engine.async_llm import AsyncLLM

    def from_vllm_config(vllm_config, *args, **kwargs):
        told = {
            "block_size": vllm_config.cache_config.block_size,
            "worker_cls": vllm_config.parallel_config.worker_cls,
            "scheduler_cls": vllm_config.scheduler_config.scheduler_cls,
            "additional_config": vllm_config.additional_config,
            "hash": vllm_config.compute_hash(),
            "config": str(vllm_config),
        }
        facts.write(json.dumps(told))
        raise SystemExit(0)

    AsyncLLM.from_vllm_config = from_vllm_config
    if request["version"] is not None:
        vllm.__version__ = request["version"]
    sys.argv = ["vllm", "serve", *request["argv"]]
    main()


def _engine(request: dict[str, Any], facts) -> None:
    from vllm import LLM, SamplingParams

    llm = LLM(**request["arguments"])
    prompt = {"prompt_token_ids": list(range(7, 107))}
    (output,) = llm.generate(prompt, SamplingParams(temperature=0, max_tokens=32, detokenize=False), use_tqdm=False)
    config = llm.llm_engine.vllm_config
    told = {
        "tokens": list(output.outputs[0].token_ids),
        "block_size": config.cache_config.block_size,
        "num_gpu_blocks": config.cache_config.num_gpu_blocks,
        "plugin_modules": sorted(name for name in sys.modules if name.startswith("vllm_evict.")),
    }
    facts.write(json.dumps(told))


_JOBS = {"serve": _serve, "engine": _engine}

if __name__ == "__main__":
    _main()
