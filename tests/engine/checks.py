"""What must hold of a `Run`: one function, one property. Each raises AssertionError with the place.

The first group compares with the oracle or with numbers counted by hand; the second compares parts of the product (the
scheduler's books, the worker's table, vLLM's pool) with each other.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

import torch

from tests.engine.harness import Pool, Row, Run
from tests.oracle.forward import masked_keys
from tests.oracle.keys import key_difference
from tests.oracle.mass import accumulated_mass, distant_mean, ema_mass, mean_mass
from tests.oracle.trace import TraceLine, evictions_of
from tests.oracle.visibility import visibility_mask

LOGIT_TOLERANCE = 1e-4
MASS_TOLERANCE = 2e-5  # per observed query: fp32 softmax, summed over heads and layers


@dataclass(frozen=True)
class Limits:
    """The settings in pages, counted from the documentation and not from the product."""

    budget_pages: int
    sink_pages: int
    recent_pages: int
    peak_pages: int

    @classmethod
    def of(cls, run: Run) -> Limits:
        pages = lambda tokens: math.ceil(tokens / run.page_tokens)  # noqa: E731
        budget, sink = run.eviction["budget"], run.eviction.get("sink", 4)
        recent = run.eviction.get("recent")
        if recent is None:
            wish = budget - sink if run.eviction["policy"] == "streaming" else budget // 2
            recent_pages = max(min(pages(wish), pages(budget) - pages(sink)), 1)
        else:
            recent_pages = max(pages(recent), 1)
        in_flight = pages(run.chunk_tokens * run.steps_in_flight)
        return cls(pages(budget), pages(sink), recent_pages, pages(budget) + in_flight + 1)


def _pages(tokens: int, run: Run) -> int:
    return -(-tokens // run.page_tokens)


# ---- against the oracle, or counted by hand ----


def logits(run: Run, tolerance: float = LOGIT_TOLERANCE) -> float:
    """Raw logits of every output token are those of the eager forward under the traced mask; returns the worst."""
    worst = 0.0
    for name, answer in run.answers.items():
        for index, epoch in _sampled(run, name).items():
            expected = run.reference(name, epoch).logits[len(answer.prompt) - 1 + index]
            error = (answer.logits[index] - expected[answer.logit_tokens[index]]).abs().max().item()
            assert error <= tolerance, f"{name}, output token {index} of epoch {epoch}: logits are {error:.2e} off"
            worst = max(worst, error)
    assert run.answers
    return worst


def greedy_tokens(run: Run) -> None:
    """Every output token is the oracle's first choice (or a tie with it)."""
    for name, answer in run.answers.items():
        for index, epoch in _sampled(run, name).items():
            expected = run.reference(name, epoch).logits[len(answer.prompt) - 1 + index]
            loss = (expected.max() - expected[answer.tokens[index]]).item()
            assert loss <= 2 * LOGIT_TOLERANCE, (
                f"{name}, output token {index}: {answer.tokens[index]}, the oracle says {int(expected.argmax())}"
            )


def _sampled(run: Run, name: str) -> dict[int, int]:
    """Output index -> epoch in which it was sampled; all of them."""
    answer = run.answers[name]
    sampled = {row.num_tokens - len(answer.prompt): row.epoch for row in run.rows(name) if row.samples}
    assert sorted(sampled) == list(range(len(answer.tokens))), f"{name}: sampled {sorted(sampled)}"
    return sampled


def positions(run: Run) -> None:
    """Per epoch, the model sees positions 0, 1, 2, ... without gap; after a prefix hit it starts behind the hit.

    After a rebase, the same less its offset.
    """
    for name in run.answers:
        for epoch in run.epochs(name):
            rows = run.rows_of_epoch(name, epoch)
            seen = [
                position + _offset(run, name, epoch, row.num_computed_tokens)
                for row in rows
                for position in row.positions
            ]
            first = rows[0].num_cached_tokens
            assert seen == list(range(first, first + len(seen))), f"{name}, epoch {epoch}: positions {seen}"
        last = len(run.answers[name].prompt) + len(run.answers[name].tokens) - 1
        assert seen[-1] == last - 1, f"{name}: last position {seen[-1]} of {last} computed tokens"


def _offset(run: Run, name: str, epoch: int, num_computed_tokens: int) -> int:
    """By how much rotary positions lag behind, in the step that begins with so many tokens."""
    rebases = run.rebases.get((name, epoch), [])
    return max((r.offset for r in rebases if r.num_computed_tokens <= num_computed_tokens), default=0)


def held_pages(run: Run) -> None:
    """Pages held = what was there, cut to the budget, and the pages that the step opens. No more, no fewer."""
    budget = Limits.of(run).budget_pages
    for number, step in enumerate(run.steps):
        for name, row in step.rows.items():
            before = _pages(row.num_computed_tokens, run)
            opened = _pages(row.num_computed_tokens + row.num_scheduled_tokens, run) - before
            held = sum(block is not None for block in row.table)
            expected = min(before, budget) + opened
            place = f"step {number}, {name}: holds {held} pages, should hold {expected}"
            if all(line.reason == "budget" for line in run.lines(name, row.epoch)):
                assert held == expected, place
            else:  # short of memory, a request gives more than it must
                assert opened <= held <= expected, place


def bounds(run: Run) -> int:
    """Nobody exceeds budget + chunks in flight + 1 pages, nor budget + 1 when decoding; returns the observed peak."""
    limits, peak, decodes = Limits.of(run), 0, Counter()
    for number, step in enumerate(run.steps):
        for name, row in step.rows.items():
            held = sum(block is not None for block in row.table)
            peak = max(peak, held)
            assert held <= limits.peak_pages, f"step {number}, {name}: {held} pages, bound {limits.peak_pages}"
            decodes[name] = decodes[name] + 1 if row.num_scheduled_tokens == 1 else 0
            if decodes[name] >= run.steps_in_flight:
                assert held <= limits.budget_pages + 1, f"step {number}, {name}: {held} pages while decoding"
    return peak


def unscheduled_are_trimmed(run: Run) -> int:
    """A live request that sits a step out is held to the budget all the same; returns how often one sat out."""
    budget, count = Limits.of(run).budget_pages, 0
    for number, step in enumerate(run.steps):
        for name, table in step.scheduled.tables.items():
            if name not in step.rows:
                count += 1
                held = sum(block is not None for block in table)
                assert held <= budget, f"step {number}: {name} is not scheduled and holds {held} pages"
    return count


def choices(run: Run) -> None:
    """The evicted pages are those that the policy's definition names, given the oracle's masses."""
    limits = Limits.of(run)
    assert any(run.trace.values())
    for name in run.answers:
        for line in run.lines(name):
            newest = (line.num_computed_tokens - 1) // run.page_tokens
            num_processed = line.num_computed_tokens // run.page_tokens
            candidates = [
                page
                for page in line.resident
                if page >= limits.sink_pages and page <= newest - limits.recent_pages and page < num_processed
            ]
            place = f"{name} at {line.num_computed_tokens} tokens: evicted {line.pages} of {line.resident}"
            assert set(line.pages) <= set(candidates), f"{place}, open were {candidates}"
            if line.reason == "budget":
                assert len(line.pages) == len(line.resident) - limits.budget_pages, place
            if run.eviction["policy"] == "streaming":
                assert list(line.pages) == candidates[: len(line.pages)], f"{place}, oldest are {candidates}"
            elif run.eviction["policy"] in _WORTH:
                scores = _WORTH[run.eviction["policy"]](run, name, line)
                value = {page: math.inf if math.isnan(scores[page]) else float(scores[page]) for page in candidates}
                kept = min((value[page] for page in candidates if page not in line.pages), default=math.inf)
                gone = max(value[page] for page in line.pages)
                assert gone <= kept + 1e-4 * abs(kept), f"{place}, scores {value}"


def masses(run: Run, tolerance: float = MASS_TOLERANCE) -> float:
    """The scores in the trace are those of the eager attention weights; returns the worst error per observed query."""
    worst, count = 0.0, 0
    for name in run.answers:
        for line in run.lines(name):
            expected = expected_scores(run, name, line)
            for page, score in line.score_of().items():
                place = (
                    f"{name} at {line.num_computed_tokens} tokens, page {page}: {score}, oracle {expected[page]:.6g}"
                )
                if expected[page].isnan():  # it has not been judged, or by an earlier owner of the page
                    assert math.isnan(score) or page < hit_pages(run, name, line.epoch), place
                    continue
                queries = line.num_computed_tokens if run.eviction.get("score") == "sum" else 1
                error = abs(score - expected[page].item()) / queries
                assert error <= tolerance, place  # NaN fails too
                worst, count = max(worst, error), count + 1
    assert count, "no eviction with scores"
    return worst


def key_differences(run: Run, tolerance: float = 1e-5) -> float:
    """The key differences in the trace are those of the eager model's keys; returns the worst error.

    With steps in flight, of the keys as they were in the last step whose output had been read.
    """
    worst, count = 0.0, 0
    for name in run.answers:
        for line in run.lines(name):
            # Unknown, or what its last owner reported.
            came = [page for page in line.resident if came_with_a_hit(run, name, line, page)]
            scores = {page: score for page, score in line.score_of("keys").items() if page not in came}
            errors = []
            for num_tokens, resident in _states_read(run, name, line):
                expected = expected_keys(run, name, line, num_tokens, resident)
                errors.append(max((abs(score - expected[page]) for page, score in scores.items()), default=0.0))
            error = min(errors)
            assert error <= tolerance, f"{name} at {line.num_computed_tokens} tokens: {scores}, off by {errors}"
            worst, count = max(worst, error), count + len(scores)
    assert count, "no eviction with key differences"
    return worst


def _states_read(run: Run, name: str, line: TraceLine) -> list[tuple[int, tuple[int, ...]]]:
    """Of which states (tokens computed, pages held) the scores of a line may tell: its own, or some steps earlier."""
    states = [(line.num_computed_tokens, line.resident)]
    for row in run.rows_of_epoch(name, line.epoch)[::-1]:
        num_tokens = row.num_computed_tokens + row.num_scheduled_tokens
        if num_tokens < line.num_computed_tokens and len(states) < run.steps_in_flight:
            states.append((num_tokens, tuple(page for page, block in enumerate(row.table) if block is not None)))
    return states


def expected_keys(
    run: Run,
    name: str,
    line: TraceLine,
    num_tokens: int | None = None,
    resident: tuple[int, ...] | None = None,
) -> dict[int, float]:
    """Per resident page, from the eager model's keys; of another state than the line's, if one is given."""
    num_tokens, resident = num_tokens or line.num_computed_tokens, resident or line.resident
    tokens = (run.answers[name].prompt + run.answers[name].tokens)[:num_tokens]
    before = [e for e in evictions_of(run.lines(name), line.epoch) if e.num_computed_tokens < num_tokens]
    keys = masked_keys(run.oracle, tokens, visibility_mask(len(tokens), run.page_tokens, before))
    return key_difference(keys, run.page_tokens, resident=resident, num_tokens=num_tokens)


def judged_keys(run: Run, name: str, line: TraceLine) -> dict[int, float]:
    """The same; of pages that came with a hit a moment ago, what is known of them."""
    expected = expected_keys(run, name, line)
    return {
        page: score if came_with_a_hit(run, name, line, page) else expected[page]
        for page, score in line.score_of("keys").items()
    }


def rank_sums(run: Run, name: str, line: TraceLine) -> dict[int, float]:
    """Per resident page, its place by attention plus its place by keys, of the traced scores (checked by others)."""
    attention, keys = line.score_of("attention"), line.score_of("keys")
    judged = [page for page in line.resident if not math.isnan(attention[page] + keys[page])]
    place = lambda score, page: sum(score[other] < score[page] for other in judged)  # noqa: E731
    sums = {page: float(place(attention, page) + place(keys, page)) for page in judged}
    return dict.fromkeys(line.resident, math.nan) | sums


def came_with_a_hit(run: Run, name: str, line: TraceLine, page: int) -> bool:
    """Whether the request has just got the page from the prefix cache and computed nothing yet."""
    at_start = line.num_computed_tokens == run.rows_of_epoch(name, line.epoch)[0].num_computed_tokens
    return at_start and page < hit_pages(run, name, line.epoch)


def hit_pages(run: Run, name: str, epoch: int) -> int:
    """How many pages came from the prefix cache when that life of the request began."""
    return run.rows_of_epoch(name, epoch)[0].num_cached_tokens // run.page_tokens


def judged_scores(run: Run, name: str, line: TraceLine) -> torch.Tensor:
    """As `expected_scores`; of a prefix hit that the request has not judged itself, what an earlier owner said."""
    expected = expected_scores(run, name, line).clone()
    for page, score in line.score_of().items():
        if expected[page].isnan() and page < hit_pages(run, name, line.epoch):
            expected[page] = score
    return expected


def expected_scores(run: Run, name: str, line: TraceLine) -> torch.Tensor:
    """float64 `[pages]` from eager attention weights and the documented rule of which queries are observed."""
    kind = run.eviction.get("score", "distant-mean")
    mass = run.reference(name, line.epoch).page_mass.clone()
    observed = observed_queries(run, name, line.epoch, line.num_computed_tokens)
    unobserved = torch.ones(len(mass), dtype=torch.bool)
    unobserved[observed] = False
    mass[unobserved] = torch.nan
    num_tokens = line.num_computed_tokens
    if kind == "distant-mean":
        budget = run.eviction["budget"]
        recent = run.eviction.get("recent") or max(budget // 2, 1)
        return distant_mean(mass, run.page_tokens, num_tokens, max(recent // 2, 1))
    if kind == "ema":
        return ema_mass(mass, run.page_tokens, num_tokens, half_life_queries=64)
    mean = mean_mass(mass, run.page_tokens, num_tokens)
    if kind == "mean":
        return mean
    assert kind == "sum"
    first_query = run.rows_of_epoch(name, line.epoch)[0].num_computed_tokens
    if len(observed) == num_tokens - first_query:
        return torch.where(mean.isnan(), mean, accumulated_mass(mass, num_tokens))
    # Of a sample: the mean, times the number of queries that could see the page.
    first_token = torch.arange(mass.shape[1]) * run.page_tokens
    return mean * (num_tokens - first_token.clamp(min=first_query))


_WORTH = {"h2o": judged_scores, "keydiff": judged_keys, "h2o-keydiff": rank_sums}
"""Of each policy that needs signals, what a page is worth; higher = keep, NaN = too young."""


def observed_queries(run: Run, name: str, epoch: int, num_tokens: int) -> list[int]:
    """Positions whose attention was looked at: the last N of each chunk, every k-th decoded token."""
    last_of_chunk, every = run.eviction.get("prefill_queries", 64), run.eviction.get("score_every", 8)
    observed = []
    for row in run.rows(name):
        first, stop = row.num_computed_tokens, row.num_computed_tokens + row.num_scheduled_tokens
        if row.epoch != epoch or stop > num_tokens:
            continue
        if row.num_scheduled_tokens == 1:
            observed += [first] if stop % every == 0 else []
        else:
            observed += range(first if last_of_chunk == "all" else max(first, stop - last_of_chunk), stop)
    return observed


def rotary_positions(run: Run, limit_tokens: int) -> int:
    """No rotary position reaches the limit, and pages move only when one would; returns how often they did."""
    for number, step in enumerate(run.steps):
        for name, row in step.rows.items():
            assert max(row.positions) < limit_tokens, f"step {number}, {name}: position {max(row.positions)}"
    mine = {key: rebases for key, rebases in run.rebases.items() if key[0] in run.answers}
    for (name, epoch), rebases in mine.items():
        for before, rebase in zip([0, *(r.offset for r in rebases)], rebases, strict=False):
            [row] = [r for r in run.rows_of_epoch(name, epoch) if r.num_computed_tokens == rebase.num_computed_tokens]
            assert row.num_computed_tokens + row.num_scheduled_tokens - before > limit_tokens, f"{name}: {rebase}"
    return sum(map(len, mine.values()))


def hashed_pages_stand_where_they_were(run: Run) -> None:
    """What a prefix look-up may find has the positions it was computed at."""
    for number, step in enumerate(run.steps):
        for name, row in step.rows.items():
            for rebase in run.rebases.get((name, row.epoch), []):
                if rebase.num_computed_tokens > row.num_computed_tokens:
                    continue
                for place, page in enumerate(rebase.resident):
                    assert place == page or row.table[page] not in step.settled.hashed, (
                        f"step {number}, {name}: page {page} has moved and is hashed"
                    )


def hashed_pages_are_exact(run: Run) -> None:
    """What a prefix look-up may find was computed before its request's first hole."""
    for number, step in enumerate(run.steps):
        for name, row in step.rows.items():
            lines = run.lines(name, row.epoch)
            if not lines:
                continue
            first_hole_at = lines[0].num_computed_tokens
            for page, block in enumerate(row.table):
                if block in step.scheduled.hashed:
                    assert (page + 1) * run.page_tokens <= first_hole_at, (
                        f"step {number}, {name}: page {page} is hashed; the first hole came at {first_hole_at} tokens"
                    )


# ---- the product's parts against each other ----


def pool(run: Run) -> None:
    """O-POOL, at both moments of every step."""
    for number, step in enumerate(run.steps):
        for moment, state in (("scheduled", step.scheduled), ("settled", step.settled)):
            pool_state(state, f"step {number}, {moment}")


def pool_state(state: Pool, place: str = "") -> None:
    """free + held + 1 null = total; a reference count is the number of tables naming the block."""
    named = Counter(block for table in state.tables.values() for block in table if block is not None)
    free = set(state.free)
    assert len(free) == len(state.free), f"{place}: a block is in the free queue twice"
    assert state.null not in free and state.null not in named, f"{place}: the null block is in use"
    assert not free & set(named), f"{place}: blocks {sorted(free & set(named))} are free and in a table"
    assert len(free) + len(named) + 1 == state.num_blocks, (
        f"{place}: {len(free)} free + {len(named)} held + 1 null is not {state.num_blocks}"
    )
    wrong = {b: (n, named[b]) for b, n in state.ref_counts.items() if n != named[b]}
    assert not wrong, f"{place}: block: (reference count, tables naming it) {wrong}"


def slots(run: Run) -> None:
    """Each token is written to the block of its logical page, which is nobody's null."""
    for number, step in enumerate(run.steps):
        for name, row in step.rows.items():
            for token, slot in enumerate(row.slots):
                position = row.num_computed_tokens + token
                page, offset = divmod(position, run.page_tokens)
                block = row.table[page]
                assert block is not None and slot == block * run.page_tokens + offset, (
                    f"step {number}, {name}: position {position} goes to slot {slot}, its page is block {block}"
                )


def attended(run: Run) -> None:
    """The kernel reads exactly the request's resident blocks, in order, and all their tokens."""
    for number, step in enumerate(run.steps):
        for name, row in step.rows.items():
            assert row.attended == _resident(row), (
                f"step {number}, {name}: reads blocks {row.attended}, holds {row.table}"
            )
            num_holes = row.table.count(None)
            expected = row.num_computed_tokens + row.num_scheduled_tokens - num_holes * run.page_tokens
            assert row.physical_tokens == expected, (
                f"step {number}, {name}: reads {row.physical_tokens} tokens, {expected} are resident"
            )


def _resident(row: Row) -> tuple[int, ...]:
    return tuple(block for block in row.table if block is not None)


def written_once(run: Run) -> None:
    """Between two hand-outs of a block no slot is written twice, and the null block never."""
    written: dict[int, set[int]] = {}
    for number, step in enumerate(run.steps):
        for block in step.allocated:
            written[block] = set()
        for name, row in step.rows.items():
            for slot in row.slots:
                block = slot // run.page_tokens
                assert block != step.scheduled.null, f"step {number}, {name}: writes the null block"
                taken = written.setdefault(block, set())
                assert slot not in taken, f"step {number}, {name}: slot {slot} of block {block} was written before"
                taken.add(slot)


def trace_is_the_tables(run: Run) -> None:
    """The holes in every table are the pages that the trace says were evicted by then."""
    for number, step in enumerate(run.steps):
        for name, row in step.rows.items():
            evicted = {
                page
                for line in run.lines(name, row.epoch)
                if line.num_computed_tokens <= row.num_computed_tokens
                for page in line.pages
            }
            holes = {page for page, block in enumerate(row.table) if block is None}
            assert holes == evicted, f"step {number}, {name}: holes {sorted(holes)}, trace {sorted(evicted)}"


def same_answers(one: Run, two: Run) -> None:
    """Two engines said and evicted the same."""
    assert {name: answer.tokens for name, answer in one.answers.items()} == {
        name: answer.tokens for name, answer in two.answers.items()
    }
    assert {name: [line.pages for line in lines] for name, lines in one.trace.items()} == {
        name: [line.pages for line in lines] for name, lines in two.trace.items()
    }


ALWAYS = (
    logits,
    greedy_tokens,
    positions,
    held_pages,
    bounds,
    choices,
    hashed_pages_are_exact,
    pool,
    slots,
    attended,
    written_once,
    trace_is_the_tables,
)
"""Hold of every run with evictions (`masses` needs a policy that keeps scores)."""

QUIET = tuple(check for check in ALWAYS if check is not choices)
"""Hold of every run."""
SYNCHRONOUS = (held_pages, choices)
"""For engines whose scores are those of the step before the decision."""
