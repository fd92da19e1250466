"""What a single request asks for itself, inside what the operator allows (``--kv-eviction-overrides``).

An OpenAI client sends it as ``extra_body={"vllm_xargs": {...}}``:

==================  =====================================================================
kv_eviction         policy, or ``none``. Only one that needs no more than the server measures.
kv_eviction_budget  tokens, or ``unlimited``
kv_eviction_pin     spans of prompt tokens that are never evicted, ``"0-120,300-310"``, both ends included
==================  =====================================================================

Nothing here imports torch or vLLM.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vllm_evict.config import UNLIMITED, EvictionConfig, EvictionConfigError, flag_name, parse_config
from vllm_evict.pages import PageBudget, pages_for, peak_pages
from vllm_evict.policies import POLICIES, EvictionPolicy

POLICY_KEY = "kv_eviction"
BUDGET_KEY = "kv_eviction_budget"
PIN_KEY = "kv_eviction_pin"
KEYS = (POLICY_KEY, BUDGET_KEY, PIN_KEY)


@dataclass(frozen=True)
class RequestEviction:
    """How one request is evicted.

    Args:
        name: of the policy, ``none`` included.
        policy: the object that plans; None for ``none``.
        budget: in pages.
        floor: what the request keeps when the pool is short; None if that is its budget.

    """

    name: str
    policy: EvictionPolicy | None
    budget: PageBudget
    floor: PageBudget | None

    @property
    def signals(self) -> tuple[str, ...]:
        """What must be measured for it."""
        return self.policy.signals if self.policy is not None else ()

    def most_pages(self, num_tokens: int, max_in_flight_tokens: int) -> int:
        """Pages that the request needs at once to reach ``num_tokens`` tokens, prefill included."""
        all_pages = pages_for(num_tokens, self.budget.page_tokens)
        least_pages = (self.floor or self.budget).budget_pages
        if least_pages is None:
            return all_pages
        return min(all_pages, peak_pages(least_pages, max_in_flight_tokens, self.budget.page_tokens))


def server_eviction(config: EvictionConfig, page_tokens: int) -> RequestEviction:
    """How a request is evicted that asks for nothing.

    Raises:
        EvictionConfigError: the settings do not fit the page size.

    """
    return _eviction(config, page_tokens, ())


def asks_for_something(xargs: Mapping[str, Any] | None) -> bool:
    """Whether ``SamplingParams.extra_args`` has any key of ours, known or not."""
    return bool(xargs) and any(key.startswith(POLICY_KEY) for key in xargs)


def request_eviction(
    config: EvictionConfig, xargs: Mapping[str, Any], page_tokens: int, num_prompt_tokens: int
) -> RequestEviction:
    """How a request is evicted that asks for something in ``xargs``.

    Raises:
        EvictionConfigError: it asks for what does not exist, does not fit or is not allowed.

    """
    asked = {key: value for key, value in xargs.items() if key.startswith(POLICY_KEY)}
    unknown = sorted(asked.keys() - set(KEYS))
    if unknown:
        raise EvictionConfigError(f"unknown vllm_xargs key {unknown[0]!r}: choose of {', '.join(KEYS)}.")
    if config.overrides == "none":
        raise _refused(config, next(iter(asked)), "nothing")
    changed: dict[str, Any] = {}
    if POLICY_KEY in asked:
        changed["policy"] = _policy(config, asked[POLICY_KEY])
    if BUDGET_KEY in asked:
        changed["budget"] = _budget(config, asked[BUDGET_KEY])
        if changed["budget"] == UNLIMITED and config.floor is None:  # then nothing of it is ever evicted
            changed |= {"policy": "none", "budget": config.budget}
        if config.floor is not None and changed["budget"] != UNLIMITED and changed["budget"] <= config.floor:
            changed["floor"] = None
        if config.recent is not None and changed["budget"] != UNLIMITED:  # the server's window yields
            changed["recent"] = min(config.recent, max(changed["budget"] - config.sink, 0))
    pinned = _pins(asked[PIN_KEY], page_tokens, num_prompt_tokens) if PIN_KEY in asked else ()
    try:
        wanted = parse_config({**config.model_dump(), **changed})
        if config.rebases and not (wanted.evicts and wanted.budget != UNLIMITED and wanted.budget <= config.budget):
            raise EvictionConfigError(
                f"this server runs with {flag_name('positions')} rebase, and more than {config.budget} tokens might "
                f"not fit into the model's positions. Set {flag_name('budget')} to at most {config.budget}."
            )
        return _eviction(wanted, page_tokens, pinned)
    except EvictionConfigError as error:
        # What the client can set is called otherwise than what the operator set.
        raise EvictionConfigError(f"vllm_xargs: {error}".replace(flag_name("budget"), BUDGET_KEY)) from None


def _eviction(config: EvictionConfig, page_tokens: int, pinned: tuple[int, ...]) -> RequestEviction:
    if not config.enabled:
        return RequestEviction("none", None, PageBudget(page_tokens, None, 0, 1), None)
    budget = config.page_budget(page_tokens, pinned)
    return RequestEviction(config.policy, config.make_policy(), budget, config.page_floor(page_tokens, pinned))


def _refused(config: EvictionConfig, key: str, allowed: str) -> EvictionConfigError:
    return EvictionConfigError(
        f"vllm_xargs {key}: this server runs with {flag_name('overrides')} {config.overrides}, which lets a request "
        f"change {allowed}. Drop {key}."
    )


def _policy(config: EvictionConfig, name: Any) -> str:
    if name == config.policy:
        return name
    if config.overrides != "any":
        raise _refused(config, POLICY_KEY, f"its budget downwards, not the policy {config.policy}")
    measured = set(POLICIES[config.policy].signals)
    usable = [other for other, policy in POLICIES.items() if set(policy.signals) <= measured]
    if name not in ("none", *usable):
        raise EvictionConfigError(
            f"vllm_xargs {POLICY_KEY} got {name!r}: choose one of none, {', '.join(usable)} (what a server with "
            f"{flag_name('policy')} {config.policy} measures enough for)."
        )
    return name


def _budget(config: EvictionConfig, value: Any) -> int | str:
    if isinstance(value, str) and value.isdecimal():
        value = int(value)
    whole = isinstance(value, int) and not isinstance(value, bool) and value >= 0
    if not whole and value != UNLIMITED:
        raise EvictionConfigError(f"vllm_xargs {BUDGET_KEY} got {value!r}: give a whole number of tokens.")
    if config.overrides != "any" and config.budget != UNLIMITED and (value == UNLIMITED or value > config.budget):
        raise _refused(config, BUDGET_KEY, f"its budget downwards, to at most {config.budget} tokens, not to {value}")
    return value


def _pins(text: Any, page_tokens: int, num_prompt_tokens: int) -> tuple[int, ...]:
    """The pages of spans like ``"0-120,300-310"``."""
    pages: set[int] = set()
    for span in str(text).split(","):
        first, dash, last = span.strip().partition("-")
        if not (dash and first.isdecimal() and last.isdecimal() and int(first) <= int(last)):
            raise EvictionConfigError(
                f"vllm_xargs {PIN_KEY} got {text!r}: give spans of prompt tokens, first-last, as in '0-120,300-310'."
            )
        if int(last) >= num_prompt_tokens:
            raise EvictionConfigError(
                f"vllm_xargs {PIN_KEY} got {text!r}: the prompt has {num_prompt_tokens} tokens, so the last that can "
                f"be pinned is {num_prompt_tokens - 1}."
            )
        pages.update(range(int(first) // page_tokens, int(last) // page_tokens + 1))
    return tuple(sorted(pages))
