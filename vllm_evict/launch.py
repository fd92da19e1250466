"""Build the `vllm serve` command with eviction and with defaults that fit this machine.

Every default stands before the caller's own options, and the last one wins in vLLM's command line,
so any of them can be overridden. Importing this module imports neither vLLM nor torch.
"""

import argparse
import importlib.metadata
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from vllm_evict.config import UNLIMITED
from vllm_evict.embedded_model import MODEL_NAME, embedded_model_path

# Room for about 46,000 tokens of the embedded model. vLLM's own default takes 92 % of the machine's
# memory, and does not start when another program holds more than the rest.
CPU_KV_CACHE = "2G"

# Up to here every core counts more than one left free for the scheduler, which is what vLLM's
# automatic binding does (64 in / 64 out on two cores: twice as fast with both). On larger machines
# the automatic binding knows more: NUMA nodes, and which cores share their units.
MAX_CPUS_BOUND_BY_US = 8

# More than one rank needs one list of CPUs for each, which vLLM's automatic binding makes.
_RANK_OPTIONS = (
    "--tensor-parallel-size",
    "-tp",
    "--pipeline-parallel-size",
    "-pp",
    "--data-parallel-size",
    "-dp",
)


def is_cpu_build() -> bool:
    """Whether the installed vLLM is the CPU build; vLLM itself decides in the same way."""
    return "cpu" in importlib.metadata.version("vllm")


def serve_command(
    *,
    model: str | None = None,
    policy: str = "h2o",
    budget_tokens: int | str | None = None,
    port: int = 8000,
    extra: Sequence[str] = (),
    cpu: bool | None = None,
) -> list[str]:
    """The command line of the server.

    Args:
        model: folder or name of the model; None takes the embedded one, preparing it if needed.
        policy: value of `--kv-eviction`.
        budget_tokens: resident tokens per request, or "unlimited"; None leaves it to the plugin's default.
        extra: further options of `vllm serve`, which override the defaults made here.
        cpu: whether to serve on the CPU; None looks at the installed vLLM.
    """
    # Beside this interpreter, so that it is the same environment whatever PATH says.
    command = [str(Path(sys.executable).with_name("vllm")), "serve"]
    if model is None:
        command += [str(embedded_model_path()), "--served-model-name", MODEL_NAME]
    else:
        command += [model]
    command += ["--host", "127.0.0.1", "--port", str(port), "--kv-eviction", policy]
    if budget_tokens is not None:
        command += ["--kv-eviction-budget", str(budget_tokens)]
    if is_cpu_build() if cpu is None else cpu:
        # Compiling takes about 50 s of every start and a C++ compiler, for 10 to 20 % more speed.
        command += ["--enforce-eager"]
        # The variable would win over the option, so whoever sets it means it.
        if not os.environ.get("VLLM_CPU_KVCACHE_SPACE"):
            command += ["--kv-cache-memory-bytes", CPU_KV_CACHE]
    return command + list(extra)


def serve_environment(*, extra: Sequence[str] = (), cpu: bool | None = None) -> dict[str, str]:
    """The variables to set for that command, beside those already set."""
    if not (is_cpu_build() if cpu is None else cpu):
        return {}
    several_ranks = any(option.split("=")[0] in _RANK_OPTIONS for option in extra)
    cpus = sorted(os.sched_getaffinity(0))
    if "VLLM_CPU_OMP_THREADS_BIND" in os.environ or several_ranks or len(cpus) > MAX_CPUS_BOUND_BY_US:
        return {}
    return {"VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cpus))}


def _budget(text: str) -> int | str:
    if text != UNLIMITED and not text.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r}: give a number of tokens, or {UNLIMITED}")
    return text if text == UNLIMITED else int(text)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = (
        "vllm-evict serve [--model MODEL] [--policy POLICY] [--budget TOKENS] [--port PORT] [-- OPTIONS OF vllm serve]"
    )
    parser.add_argument("--model", help="folder or name (default: the embedded model)")
    parser.add_argument("--policy", default="h2o", help="see --kv-eviction of `vllm serve`")
    parser.add_argument("--budget", type=_budget, metavar="TOKENS", help=f"resident per request, or {UNLIMITED}")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("extra", nargs="*", metavar="OPTION", help="options of `vllm serve`")


def run(args: argparse.Namespace) -> int:
    command = serve_command(
        model=args.model,
        policy=args.policy,
        budget_tokens=args.budget,
        port=args.port,
        extra=args.extra,
    )
    variables = serve_environment(extra=args.extra)
    shown = [f"{name}={value}" for name, value in variables.items()] + [shlex.join(command)]
    print(*shown, file=sys.stderr, flush=True)
    # Become the server, so that its signals and exit status are the caller's own.
    os.execve(command[0], command, os.environ | variables)
