"""The ``--kv-eviction*`` flags of ``vllm serve`` and ``vllm bench``, and their way into the config.

Adding flags is the one thing vLLM has no hook for; ``compat`` wraps the three
methods of ``EngineArgs`` and calls the functions here.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from vllm_evict.config import (
    CONFIG_KEY,
    DEFAULT_BUDGET_TOKENS,
    DEFAULT_PREFILL_QUERIES,
    DEFAULT_SCORE_EVERY,
    DEFAULT_SINK_TOKENS,
    MAX_TOKENS,
    OVERRIDES,
    POLICY_NAMES,
    POSITIONS,
    SCORE_KERNELS,
    UNLIMITED,
    EvictionConfigError,
    flag_name,
    parse_config,
)
from vllm_evict.scores.aggregate import SCORE_KINDS

_DEST_PREFIX = "kv_eviction_"
_FLAG_FIELDS = (
    "policy",
    "budget",
    "floor",
    "sink",
    "recent",
    "score",
    "prefill_queries",
    "score_every",
    "score_kernel",
    "trace",
    "seed",
    "overrides",
    "positions",
)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the group "KV eviction". Idempotent."""
    if any(action.dest == _DEST_PREFIX + "policy" for action in parser._actions):
        return
    group = parser.add_argument_group(
        "KV eviction",
        "Keep each request's KV cache within a budget by evicting whole pages (vllm-evict).",
    )

    def add(field: str, **kwargs: Any) -> None:
        # No default: absent flags must not override --kv-eviction-config.
        group.add_argument(flag_name(field), dest=_DEST_PREFIX + field, default=None, **kwargs)

    add(
        "policy",
        choices=POLICY_NAMES,
        help="Which pages to keep: streaming (first tokens and recent window), and besides both of these "
        "h2o (pages that later tokens attend to), keydiff (pages of odd keys) or h2o-keydiff (both); "
        "random and keep-all (controls); none (default: the plugin is inert).",
    )
    add(
        "budget",
        type=_whole_number(0, "tokens", word=UNLIMITED),
        metavar=f"TOKENS|{UNLIMITED}",
        help=f"Tokens a request may keep resident (default: {DEFAULT_BUDGET_TOKENS}; {UNLIMITED}: pages go only when "
        "the pool is short, down to the floor).",
    )
    add(
        "floor",
        type=_whole_number(0, "tokens"),
        metavar="TOKENS",
        help="When the pool is short, requests with more than this give up pages before one is preempted "
        "(default: the budget, so none does).",
    )
    add(
        "sink",
        type=_whole_number(0, "tokens"),
        metavar="TOKENS",
        help=f"First tokens that are never evicted (default: {DEFAULT_SINK_TOKENS}).",
    )
    add(
        "recent",
        type=_whole_number(0, "tokens"),
        metavar="TOKENS",
        help="Newest tokens that are never evicted (default: half of the budget; for streaming "
        "the rest of the budget).",
    )
    add(
        "score",
        choices=SCORE_KINDS,
        help="h2o, h2o-keydiff: how attention becomes a page's score (default: distant-mean; sum is the paper's).",
    )
    add(
        "prefill_queries",
        type=_whole_number(0, "queries", word="all"),
        metavar="N|all",
        help="h2o, h2o-keydiff: queries observed at the end of each prefill chunk "
        f"(default: {DEFAULT_PREFILL_QUERIES}; all is exact and slow).",
    )
    add(
        "score_every",
        type=_whole_number(1, "decode steps"),
        metavar="N",
        help=f"h2o, h2o-keydiff: observe every N-th decoded token (default: {DEFAULT_SCORE_EVERY}).",
    )
    add(
        "score_kernel",
        choices=SCORE_KERNELS,
        help="h2o, h2o-keydiff: separate (default): a kernel after vLLM's attention. fused: one kernel for both in "
        "decode steps that are scored, with --attention-backend TRITON_ATTN; timed on no GPU yet.",
    )
    add("trace", metavar="FILE", help="Append one JSON line per eviction to FILE.")
    add(
        "overrides",
        choices=OVERRIDES,
        help="What a request may change for itself by vllm_xargs: nothing, a lower budget and pins (default), or any.",
    )
    add(
        "positions",
        choices=POSITIONS,
        help="absolute (default): tokens keep the positions they were computed at. rebase: the pages held move down "
        "whenever the model's limit is reached, so that streams have no end; --max-model-len may then exceed it.",
    )
    add("seed", type=_whole_number(0), metavar="N", help="random: seed of the choice (default: 0).")
    group.add_argument(
        "--kv-eviction-config",
        dest=_DEST_PREFIX + "config",
        default=None,
        type=_json_object,
        metavar="JSON",
        help="The same settings as one JSON object; single flags win over it.",
    )


def settings_from_args(args: argparse.Namespace) -> dict[str, Any] | None:
    """The settings given on the command line, checked; None if there are none.

    Raises:
        EvictionConfigError: they are wrong.

    """
    settings = dict(getattr(args, _DEST_PREFIX + "config", None) or {})
    for field in _FLAG_FIELDS:
        value = getattr(args, _DEST_PREFIX + field, None)
        if value is not None:
            settings[field] = value
    if not settings:
        return None
    parse_config(settings)
    return settings


@contextmanager
def one_line_errors() -> Iterator[None]:
    """On the command line a wrong setting ends the program as a wrong flag does: one line, exit code 2."""
    try:
        yield
    except EvictionConfigError as error:
        print(f"vllm: error: {error}", file=sys.stderr)
        raise SystemExit(2) from None


def merge_settings(additional_config: Any, settings: dict[str, Any] | None) -> Any:
    """``additional_config`` with the command line's settings put over its own.

    Raises:
        EvictionConfigError: its own are no JSON object.

    """
    if settings is None:
        return additional_config
    merged = dict(additional_config or {})
    given = merged.get(CONFIG_KEY, {})
    if not isinstance(given, dict):
        raise EvictionConfigError(f"{CONFIG_KEY} in --additional-config got {given!r}: give a JSON object of settings.")
    merged[CONFIG_KEY] = {**given, **settings}
    return merged


def _whole_number(least: int, unit: str = "", word: str | None = None):
    """An argparse type: a whole number in ``[least, MAX_TOKENS]``, or ``word``."""

    def convert(text: str) -> int | str:
        if word is not None and text == word:
            return text
        try:
            value = int(text)
        except ValueError:
            value = None
        if value is None or not least <= value <= MAX_TOKENS:
            of_unit = f" of {unit}" if unit else ""
            wanted = f"give a whole number{of_unit} from {least} to {MAX_TOKENS}"
            raise argparse.ArgumentTypeError(f"{text!r}: {wanted}" + (f" or {word!r}" if word is not None else ""))
        return value

    return convert


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise argparse.ArgumentTypeError(f"{text!r}: not JSON ({error})") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r}: give a JSON object")
    return value
