"""`vllm-evict policies`: the policies, one line each, as their files say it."""

import argparse
import inspect

from vllm_evict.policies import POLICIES, EvictionPolicy


def idea(policy: type[EvictionPolicy]) -> str:
    """The first line of the file that holds `policy`."""
    text = inspect.getdoc(inspect.getmodule(policy))
    assert text, f"{policy.__module__} has no docstring"
    return text.splitlines()[0]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = "To add one: README.md, 'Add a policy'."


def run(args: argparse.Namespace) -> int:
    width = max(map(len, POLICIES))
    for name, policy in POLICIES.items():
        print(
            f"{name:<{width}}  {idea(policy)}"
            + (f" Measures {' and '.join(policy.signals)}." if policy.signals else "")
        )
    return 0
