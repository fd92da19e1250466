"""The `vllm-evict` command.

A subcommand is a module with `add_arguments(parser)` and `run(args) -> exit status`; to add one,
add a line to COMMANDS. Only the module of the command in use is imported.
"""

import argparse
import importlib
import sys
from collections.abc import Sequence

from vllm_evict import __version__

# name: (module, help)
COMMANDS: dict[str, tuple[str, str]] = {
    "serve": ("vllm_evict.launch", "run `vllm serve` with eviction and defaults for this machine"),
    "model": ("vllm_evict.embedded_model", "prepare the embedded model and print its folder"),
    "plan": ("vllm_evict.planning.command", "how many requests fit, without and with eviction, and what to set"),
    "policies": ("vllm_evict.policies.command", "list the policies"),
    "doctor": ("vllm_evict.doctor", "check this environment, and whether a model and flags would be accepted"),
    "bench": ("vllm_evict.bench.command", "measure what eviction costs and brings"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (default: the process's own) and return its exit status."""
    argv = sys.argv[1:] if argv is None else list(argv)
    parser = argparse.ArgumentParser(prog="vllm-evict", description="KV cache eviction for vLLM")
    parser.add_argument("--version", action="version", version=f"vllm-evict {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (module_name, summary) in COMMANDS.items():
        command = commands.add_parser(name, help=summary, description=summary)
        if argv[:1] == [name]:
            module = importlib.import_module(module_name)
            module.add_arguments(command)
            command.set_defaults(run=module.run)
    args = parser.parse_args(argv)
    return args.run(args)


if __name__ == "__main__":
    sys.exit(main())
