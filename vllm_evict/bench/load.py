"""The loads of the throughput benchmark, and what one run of a load gives. Imports neither vLLM nor torch."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from vllm_evict.pages import pages_for

PAGE_TOKENS = 32
POLICIES = ("off", "streaming", "h2o")


@dataclass(frozen=True)
class Scenario:
    """One load on one pool.

    Args:
        name: how it is called in results.
        input_tokens: prompt length, of which the first `prefix_tokens` are the same for all.
        output_tokens: answer length.
        budget_tokens: of streaming and h2o.
        full_requests: how many requests without eviction the pool holds.
        requests: requests per run.
        concurrency: requests the client keeps open.
        rounds: runs of each policy, interleaved.
        prefix_tokens: see `input_tokens`.

    """

    name: str
    input_tokens: int
    output_tokens: int
    budget_tokens: int
    full_requests: float
    requests: int
    concurrency: int
    rounds: int
    prefix_tokens: int = 0

    @property
    def usable_pages(self) -> int:
        """Pages of the pool without the null block."""
        return round(self.full_requests * pages_for(self.input_tokens + self.output_tokens, PAGE_TOKENS))

    @property
    def pool_share(self) -> float:
        """The pool as a part of what all open requests need without eviction."""
        return self.full_requests / self.concurrency

    @property
    def shape(self) -> str:
        """The load without the pool, in words."""
        shared = f" ({self.prefix_tokens} shared)" if self.prefix_tokens else ""
        return f"{self.input_tokens}{shared} in / {self.output_tokens} out"


@dataclass(frozen=True)
class Sample:
    """The server's own metrics, `seconds` after the run began."""

    seconds: float
    running: int
    waiting: int
    preemptions: int
    pool_usage: float


@dataclass(frozen=True)
class Measurement:
    """One run of the client."""

    policy: str
    round: int
    output_tokens_per_second: float
    ms_per_output_token: float
    ms_to_first_token: float
    preemptions: int
    samples: tuple[Sample, ...]


@dataclass(frozen=True)
class ScenarioResult:
    """All runs of a scenario.

    Args:
        facts: see `report.machine_facts`.
        different_victims: share of h2o's decisions in which streaming would have evicted other pages of the same
            state; None where h2o decided nothing.

    """

    facts: dict[str, str]
    scenario: Scenario
    measurements: tuple[Measurement, ...]
    different_victims: float | None

    def runs(self, policy: str) -> list[Measurement]:
        """In order of rounds."""
        return sorted((m for m in self.measurements if m.policy == policy), key=lambda m: m.round)

    def values(self, policy: str, value: Callable[[Measurement], float]) -> list[float]:
        return [value(m) for m in self.runs(policy)]

    def ratio(self, policy: str) -> float:
        """Output tokens/s over those of no eviction."""
        ours, off = (self.values(name, lambda m: m.output_tokens_per_second) for name in (policy, "off"))
        return paired_ratio(ours, off)


def quick_scenarios(requests: int, rounds: int) -> list[Scenario]:
    """The H2O paper's 20 % budget in a short and in a roomy pool, and a load where h2o has a choice."""
    few = max(requests // 3, 1)
    return [
        Scenario("short_pool", 128, 512, 128, 4, requests, requests, rounds),
        Scenario("roomy", 128, 512, 128, requests, requests, requests, rounds),
        Scenario("choosing", 256, 768, 256, 4, few, few, (rounds + 1) // 2),
    ]


def full_scenarios(requests: int, rounds: int) -> list[Scenario]:
    """The quick ones, pool sizes down to 15 % of need, fewer open requests, and other shapes of work."""
    pools = [
        Scenario(f"pool_{share}", 128, 512, 128, requests * share / 100, requests, requests, rounds)
        for share in (15, 33, 60)
    ]
    few = max(requests // 6, 1)
    shapes = [
        Scenario("few_open", 128, 512, 128, 4, 2 * few, few, rounds),
        Scenario("long_prompt", 1024, 64, 256, 4, requests, requests, rounds),
        Scenario("mixed", 512, 256, 256, 4, requests, requests, rounds),
        Scenario("shared_prefix", 512, 256, 256, 4, requests, requests, rounds, prefix_tokens=448),
    ]
    return quick_scenarios(requests, rounds) + pools + shapes


def paired_ratio(ours: Sequence[float], others: Sequence[float]) -> float:
    """Median over rounds of ours / others: each is compared with its neighbour in time, so a drift cancels out."""
    return statistics.median(a / b for a, b in zip(ours, others, strict=True))


def spread(values: Sequence[float], digits: int = 0) -> str:
    """`median [min, max]`."""
    middle, low, high = (f"{value:.{digits}f}" for value in (statistics.median(values), min(values), max(values)))
    return f"{middle} [{low}, {high}]"
