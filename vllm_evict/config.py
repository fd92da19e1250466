"""Every knob of KV eviction, its limits, and the message when it is wrong.

One frozen pydantic model stands behind the command line, the JSON flag,
``VllmConfig.additional_config["kv_eviction"]`` and ``LLM(additional_config=...)``.

Nothing here imports torch or vLLM.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator

from vllm_evict.pages import PageBudget, pages_for
from vllm_evict.policies import POLICIES, EvictionPolicy, get_policy
from vllm_evict.scores.aggregate import SCORE_KINDS

CONFIG_KEY = "kv_eviction"
"""Key of ``VllmConfig.additional_config`` that holds the configuration."""

POLICY_NAMES = ("none", *POLICIES)
DEFAULT_BUDGET_TOKENS = 2048
DEFAULT_SINK_TOKENS = 4
DEFAULT_PREFILL_QUERIES = 64
DEFAULT_SCORE_EVERY = 8
MAX_TOKENS = 2**31 - 1
UNLIMITED = "unlimited"
"""As a budget: pages go only when the pool is short, and never below the floor."""

POSITIONS = ("absolute", "rebase")
"""Rotary positions: as in the text, whatever its length; or moved down whenever the model's limit is reached."""

OVERRIDES = ("none", "lower", "any")
"""What a single request may change: nothing; its budget downwards; anything."""

SCORE_KERNELS = ("separate", "fused")
"""How a decode step is scored on a GPU: by a kernel after vLLM's attention; by one kernel that does both."""

_CHOICES = {
    "policy": POLICY_NAMES,
    "score": SCORE_KINDS,
    "score_kernel": SCORE_KERNELS,
    "overrides": OVERRIDES,
    "positions": POSITIONS,
}

_Tokens = Annotated[int, Field(strict=True, ge=0, le=MAX_TOKENS)]


class EvictionConfigError(ValueError):
    """A setting of KV eviction is wrong. The message is one line for the user."""


def flag_name(field: str) -> str:
    """The command-line flag of a field: ``policy`` is ``--kv-eviction`` itself."""
    return "--kv-eviction" if field == "policy" else "--kv-eviction-" + field.replace("_", "-")


class EvictionConfig(BaseModel):
    """Settings of KV eviction. Lengths are in tokens; they are rounded up to whole pages.

    Args:
        policy: which pages to keep. ``none`` leaves vLLM as it is.
        budget: tokens a request may keep resident, or ``unlimited``.
        floor: tokens that a request is left with when the pool is short: those over it give
            up pages before anybody is preempted. Default: the budget, so nobody does.
        sink: first tokens that are never evicted (attention sinks, StreamingLLM,
            arXiv 2309.17453).
        recent: newest tokens that are never evicted. Default: half of the budget
            where more than age chooses, the rest of the budget for streaming.
        score: how a page's attention mass becomes its H2O score (arXiv 2306.14048).
            See :mod:`vllm_evict.scores.aggregate`.
        prefill_queries: queries observed at the end of each prefill chunk, or
            ``all`` (exact, and slow on long chunks).
        score_every: a decode query is observed every this many tokens of its request.
        score_kernel: ``separate``: attention is scored by a kernel of its own, after vLLM's. ``fused``, with
            ``TRITON_ATTN`` only: decode steps that are scored run one kernel of ours for attention and scores.
        trace: file that gets one JSON line per eviction.
        seed: seed of the ``random`` policy.
        overrides: what a request may ask for itself (:mod:`vllm_evict.requests`): ``none``,
            ``lower`` (a smaller budget, and pins within it) or ``any``.
        positions: ``absolute``: a token keeps the position it was computed at. ``rebase``: before the next one
            would pass the length the model was made for, the pages held move down to consecutive positions,
            so a stream has no end.

    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    policy: str = "none"
    budget: _Tokens | Literal["unlimited"] = DEFAULT_BUDGET_TOKENS
    floor: _Tokens | None = None
    sink: _Tokens = DEFAULT_SINK_TOKENS
    recent: _Tokens | None = None
    score: str = "distant-mean"
    prefill_queries: _Tokens | Literal["all"] = DEFAULT_PREFILL_QUERIES
    score_every: Annotated[int, Field(strict=True, ge=1, le=MAX_TOKENS)] = DEFAULT_SCORE_EVERY
    score_kernel: str = "separate"
    trace: str | None = None
    seed: Annotated[int, Field(strict=True, ge=0, le=MAX_TOKENS)] = 0
    overrides: str = "lower"
    positions: str = "absolute"

    @field_validator(*_CHOICES)
    @classmethod
    def _known(cls, value: str, info: ValidationInfo) -> str:
        if value not in _CHOICES[info.field_name]:
            raise ValueError(_choose(_CHOICES[info.field_name]))
        return value

    @property
    def enabled(self) -> bool:
        """Whether anything is to be done at all."""
        return self.policy != "none"

    @property
    def evicts(self) -> bool:
        """Whether pages ever go (``keep-all`` keeps them)."""
        return self.enabled and POLICIES[self.policy].evicts

    @property
    def rebases(self) -> bool:
        """Whether positions are ever moved down."""
        return self.enabled and self.positions == "rebase"

    @property
    def bounded(self) -> bool:
        """Whether a request can always be brought down to ``least_tokens``."""
        return self.evicts and self.least_tokens is not None

    @property
    def least_tokens(self) -> int | None:
        """What a request is left with in the worst case: the floor, else the budget. None if nothing is evicted."""
        if self.floor is not None:
            return self.floor
        return None if self.budget == UNLIMITED else self.budget

    @property
    def recent_tokens(self) -> int:
        """The recent window in tokens, default filled in."""
        return self._recent_of(self.least_tokens if self.budget == UNLIMITED else self.budget)

    def _recent_of(self, budget: int | None) -> int:
        if self.recent is not None:
            return self.recent
        if budget is None:
            return 1
        if self.policy == "streaming":
            return max(budget - self.sink, 1)
        return max(budget // 2, 1)

    @property
    def distant_tokens(self) -> int:
        """How far behind a page a query must stand for ``distant-mean``: half the recent window."""
        return max(self.recent_tokens // 2, 1)

    def make_policy(self) -> EvictionPolicy:
        """The policy object, ready to plan."""
        return get_policy(self.policy, **({"seed": self.seed} if self.policy == "random" else {}))

    def page_budget(self, page_tokens: int, pinned_pages: tuple[int, ...] = ()) -> PageBudget:
        """The budget in whole pages of ``page_tokens`` tokens.

        Args:
            page_tokens: tokens in a page.
            pinned_pages: logical pages that are never evicted.

        Raises:
            EvictionConfigError: the budget cannot hold sinks, pins and recent window.

        """
        if self.evicts and self.least_tokens is None:
            raise EvictionConfigError(
                f"{flag_name('budget')} {UNLIMITED} without {flag_name('floor')} would evict nothing: "
                f"set {flag_name('floor')} to what a request keeps when the pool is short, or use "
                f"{flag_name('policy')} keep-all."
            )
        if not self.evicts or self.budget == UNLIMITED:
            # Who is never trimmed to a budget may still be trimmed to a floor, which has its own window.
            return PageBudget(page_tokens, None, pages_for(self.sink, page_tokens), 1, pinned_pages)
        return self._pages_of("budget", self.budget, page_tokens, pinned_pages)

    def page_floor(self, page_tokens: int, pinned_pages: tuple[int, ...] = ()) -> PageBudget | None:
        """What a request keeps when the pool is short, in whole pages; None if that is its budget.

        Raises:
            EvictionConfigError: the floor cannot hold sinks, pins and recent window, or is above the budget.

        """
        if not self.evicts or self.floor is None or self.floor == self.budget:
            return None
        if self.budget != UNLIMITED and self.floor > self.budget:
            raise EvictionConfigError(
                f"{flag_name('floor')} {self.floor} is above {flag_name('budget')} {self.budget}: it is what a request "
                f"keeps when the pool is short. Set {flag_name('floor')} to at most {self.budget}."
            )
        return self._pages_of("floor", self.floor, page_tokens, pinned_pages)

    def _pages_of(self, field: str, tokens: int, page_tokens: int, pinned_pages: tuple[int, ...]) -> PageBudget:
        sink_pages = pages_for(self.sink, page_tokens)
        budget_pages = pages_for(tokens, page_tokens)
        num_pinned = sum(page >= sink_pages for page in pinned_pages)
        least_tokens = (sink_pages + num_pinned + 1) * page_tokens
        least_window = self.recent if self.recent is not None and not pinned_pages else 0
        least_tokens = max(least_tokens, self.sink + least_window)
        if budget_pages < sink_pages + num_pinned + 1 or tokens < self.sink + least_window:
            recent = "" if self.recent is None else f", {flag_name('recent')} {self.recent}"
            instead = flag_name("sink") if self.recent is None else f"{flag_name('sink')} or {flag_name('recent')}"
            pins = f", the pinned spans {num_pinned}" if num_pinned else ""
            raise EvictionConfigError(
                f"{flag_name(field)} {tokens} is too small for {flag_name('sink')} {self.sink}{recent}: with "
                f"pages of {page_tokens} tokens the sinks take {sink_pages} page(s){pins}, and the page being written "
                f"one more. Set {flag_name(field)} to at least {least_tokens}, or lower {instead}."
            )
        # What fits in tokens fits: the window yields where rounding up, or pins, would burst the budget.
        room = budget_pages - sink_pages - num_pinned
        recent_pages = max(min(pages_for(self._recent_of(tokens), page_tokens), room), 1)
        return PageBudget(page_tokens, budget_pages, sink_pages, recent_pages, pinned_pages)


def parse_config(values: Any) -> EvictionConfig:
    """Build an :class:`EvictionConfig` from a mapping (or return one given).

    Raises:
        EvictionConfigError: one line naming the setting, the value and what is allowed.

    """
    if isinstance(values, EvictionConfig):
        return values
    if not isinstance(values, dict):
        raise EvictionConfigError(
            f"{CONFIG_KEY} must be a JSON object of settings "
            f"({', '.join(EvictionConfig.model_fields)}), got {values!r}."
        )
    try:
        return EvictionConfig(**values)
    except ValidationError as error:
        raise EvictionConfigError(_one_line(error)) from None


def parse_request(values: Any) -> EvictionConfig:
    """As :func:`parse_config`, for what a user asked for: settings without a policy would do nothing.

    Raises:
        EvictionConfigError: also if ``values`` has settings but names no policy.

    """
    config = parse_config(values)
    if isinstance(values, dict) and values and "policy" not in values:
        raise EvictionConfigError(
            f"{', '.join(map(flag_name, values))} without {flag_name('policy')} would do nothing: "
            f"set {flag_name('policy')}, {_choose(POLICY_NAMES)}."
        )
    return config


def _choose(names: tuple[str, ...]) -> str:
    return f"choose one of {', '.join(names)}"


def _one_line(error: ValidationError) -> str:
    """The first pydantic complaint, said with flag, value and range."""
    first = error.errors()[0]
    field = str(first["loc"][0]) if first["loc"] else CONFIG_KEY
    if first["type"] == "extra_forbidden":
        return f"unknown setting {field!r} in {CONFIG_KEY}; known settings: {', '.join(EvictionConfig.model_fields)}."
    if first["type"] == "value_error":
        allowed = str(first["ctx"]["error"])
    elif field in _CHOICES:
        allowed = _choose(_CHOICES[field])
    elif field == "trace":
        allowed = "give the path of a file"
    elif field == "prefill_queries":
        allowed = f"give a whole number of queries from 0 to {MAX_TOKENS}, or 'all'"
    elif field == "score_every":
        allowed = f"give a whole number of decode steps from 1 to {MAX_TOKENS}"
    elif field == "budget":
        allowed = f"give a whole number of tokens from 0 to {MAX_TOKENS}, or '{UNLIMITED}'"
    elif field == "seed":
        allowed = f"give a whole number from 0 to {MAX_TOKENS}"
    else:
        allowed = f"give a whole number of tokens from 0 to {MAX_TOKENS}"
    return f"{flag_name(field)} got {first['input']!r}: {allowed}."
