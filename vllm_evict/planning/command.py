"""`vllm-evict plan`: how many requests fit, without and with eviction, and what to set."""

from __future__ import annotations

import argparse
import json
import re
import sys

from vllm_evict.config import DEFAULT_BUDGET_TOKENS, DEFAULT_SINK_TOKENS, EvictionConfigError, parse_config
from vllm_evict.planning.memory import Serving
from vllm_evict.planning.model import DTYPE_BYTES, KV_DTYPE_BYTES, PlanError, kv_dtype_of, shape_of
from vllm_evict.planning.report import Memory, make_plan, to_json, to_text
from vllm_evict.planning.source import config_path, read_config, weight_bytes
from vllm_evict.policies import POLICIES

# vLLM 0.32: --gpu-memory-utilization.
DEFAULT_MEMORY_SHARE = 0.92
# vLLM measures activations and CUDA graphs when it starts; before that there is only a guess.
DEFAULT_OVERHEAD = "2GiB"
# vLLM 0.32's defaults for `vllm serve`: --block-size (on a CPU ours), --max-num-batched-tokens (on a GPU of 70 GiB and
# more), and steps in flight (asynchronous scheduling is on for GPUs and off for CPUs).
DEVICE_DEFAULTS = {"gpu": (16, 8192, 2), "cpu": (32, 2048, 1)}

_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


def byte_size(text: str) -> int:
    """`80GiB` (or `80G`) is 80 * 2**30 bytes, `80GB` is 80 * 10**9."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)(B?)", text.strip(), re.IGNORECASE)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r}: give a size such as 80GiB, 640MiB or 85899345920")
    number, unit, binary, byte = match.groups()
    if not unit and not byte and float(number) < 1024:
        raise argparse.ArgumentTypeError(f"{text!r} is a number of bytes; give a size such as 80GiB or 640MiB")
    unit = unit.upper() + ("B" if unit and byte and not binary else "")
    return int(float(number) * _UNITS[unit])


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: give a whole number from 1")
    return int(text)


def _share(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"{text!r}: give a number above 0 and up to 1")
    return value


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("model", metavar="CONFIG_OR_MODEL", help="config.json, folder, or name of a model; only its config is needed")
    memory = parser.add_mutually_exclusive_group(required=True)
    memory.add_argument("--memory", type=byte_size, metavar="SIZE", help="of one device, such as 80GiB")
    memory.add_argument("--kv-memory", type=byte_size, metavar="SIZE", help="given to the KV cache alone")
    add("--context", type=_positive, metavar="TOKENS", help="longest request (default: what the model was made for)")
    add("--batch", type=_positive, default=1, metavar="N", help="requests wanted at once (default: 1)")
    add("--policy", action="append", choices=[name for name, policy in POLICIES.items() if policy.evicts],
        help="repeatable (default: each of them)")  # fmt: skip
    add("--budget", type=_positive, default=DEFAULT_BUDGET_TOKENS, metavar="TOKENS",
        help=f"--kv-eviction-budget (default: {DEFAULT_BUDGET_TOKENS})")  # fmt: skip
    add("--sink", type=int, default=DEFAULT_SINK_TOKENS, metavar="TOKENS", help="--kv-eviction-sink")
    add("--recent", type=int, metavar="TOKENS", help="--kv-eviction-recent")
    add("--page", type=_positive, metavar="TOKENS", help="--block-size (default: 16 on a GPU, 32 on a CPU)")
    add("--dtype", choices=DTYPE_BYTES, help="(default: the config's; float32 counts as bfloat16, as in vLLM)")
    add("--kv-dtype", choices=("auto", *KV_DTYPE_BYTES), default="auto", help="--kv-cache-dtype (default: auto)")
    add("--max-num-batched-tokens", type=_positive, metavar="TOKENS", help="(default: 8192 on a GPU, 2048 on a CPU)")
    add(
        "--steps-in-flight",
        type=_positive,
        metavar="N",
        help="(default: 2 on a GPU, which schedules ahead; 1 on a CPU)",
    )
    add("--tensor-parallel-size", "-tp", type=_positive, default=1, metavar="N", help="devices that share the model")
    add("--device", choices=DEVICE_DEFAULTS, default="gpu", help="whose defaults to take (default: gpu)")
    add("--memory-share", type=_share, default=DEFAULT_MEMORY_SHARE, metavar="SHARE",
        help=f"--gpu-memory-utilization (default: {DEFAULT_MEMORY_SHARE})")  # fmt: skip
    add("--overhead", type=byte_size, default=DEFAULT_OVERHEAD, metavar="SIZE",
        help=f"activations and CUDA graphs, a guess (default: {DEFAULT_OVERHEAD})")  # fmt: skip
    add("--weights", type=byte_size, metavar="SIZE", help="of the weights (default: their files, or counted)")
    add("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    try:
        plan = _plan(args)
    except (PlanError, EvictionConfigError) as error:
        print(f"vllm-evict plan: error: {error}", file=sys.stderr)
        return 1
    print(json.dumps(to_json(plan), indent=2) if args.json else to_text(plan))
    return 0


def _plan(args: argparse.Namespace):
    path = config_path(args.model)
    config = read_config(path)
    shape = shape_of(config, args.dtype)
    page_tokens, max_num_batched_tokens, steps_in_flight = DEVICE_DEFAULTS[args.device]
    context_tokens = args.context or shape.max_tokens
    if context_tokens is None:
        raise PlanError("the config does not say how long a request may be; set --context.")
    serving = Serving(
        context_tokens=context_tokens,
        page_tokens=args.page or page_tokens,
        max_num_batched_tokens=args.max_num_batched_tokens or max_num_batched_tokens,
        steps_in_flight=args.steps_in_flight or steps_in_flight,
        kv_dtype=kv_dtype_of(config, shape, args.kv_dtype),
        num_ranks=args.tensor_parallel_size,
    )
    settings = {"budget": args.budget, "sink": args.sink, "recent": args.recent}
    policies = args.policy or [name for name, policy in POLICIES.items() if policy.evicts]
    return make_plan(
        model=args.model,
        shape=shape,
        serving=serving,
        memory=_memory(args, path, shape.dtype),
        batch=args.batch,
        configs=[parse_config({"policy": policy, **settings}) for policy in policies],
    )


def _memory(args: argparse.Namespace, path, dtype: str) -> Memory:
    if args.weights is not None:
        weights, known = args.weights, "as given"
    else:
        weights, known = weight_bytes(path, dtype)
    if args.tensor_parallel_size > 1:
        weights, known = weights // args.tensor_parallel_size, f"{known}; a share of {args.tensor_parallel_size}"
    if args.kv_memory is not None:
        return Memory(weights, known, args.kv_memory, "as given for the cache alone")
    cache = int(args.memory * args.memory_share) - weights - args.overhead
    gib = 2**30
    said = (
        f"{args.memory / gib:.2f} GiB x {args.memory_share} less weights and {args.overhead / gib:.2f} GiB for "
        "activations (a guess)"
    )
    if cache <= 0:
        raise PlanError(f"{said} leaves nothing for the cache; the weights take {weights / gib:.2f} GiB.")
    return Memory(weights, known, cache, said)
