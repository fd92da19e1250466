"""The plan as data, and the data as a table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vllm_evict.config import EvictionConfig, flag_name
from vllm_evict.planning.memory import CacheLayout, Fit, RequestPages, Serving, fit, largest_budget_tokens
from vllm_evict.planning.model import ModelShape

GIB = 2**30

# What the engine refuses whatever the policy, and the plan can see. `vllm-evict doctor` knows the whole list.
REFUSED_LATENT = "eviction refuses MLA: the rows with a budget are what it would be"
REFUSED_KV_DTYPE = "eviction refuses a quantised cache: the rows with a budget are what it would be"
NOTHING_TO_EVICT = "every layer has a sliding window already: there is nothing to evict"


@dataclass(frozen=True)
class Memory:
    """Bytes of one device.

    Args:
        weights: of the loaded weights, one rank's share.
        weights_known: how that is known.
        cache: left for the KV cache.
        said: how `cache` came about, for the reader.

    """

    weights: int
    weights_known: str
    cache: int
    said: str


@dataclass(frozen=True)
class Row:
    """One policy: `pages` a request holds, and how many requests fit."""

    policy: str
    pages: RequestPages
    fit: Fit


@dataclass(frozen=True)
class Plan:
    """Everything `vllm-evict plan` says."""

    model: str
    shape: ModelShape
    serving: Serving
    batch: int
    budget_tokens: int
    memory: Memory
    layer_token_bytes: int
    token_bytes: int
    page_bytes: int
    num_pages: int
    rows: tuple[Row, ...]
    notes: tuple[str, ...]
    advice: str

    def batch_bytes(self, row: Row) -> int:
        """What the batch takes in the pool while it decodes."""
        return self.batch * row.pages.decoding * self.page_bytes


def make_plan(
    *,
    model: str,
    shape: ModelShape,
    serving: Serving,
    memory: Memory,
    batch: int,
    configs: Sequence[EvictionConfig],
) -> Plan:
    """Compute the full cache and each of `configs`.

    Raises:
        EvictionConfigError: a budget cannot hold its sinks and recent window.

    """
    layout = CacheLayout(shape, serving)
    num_pages = max(memory.cache, 0) // layout.page_bytes

    def row(config: EvictionConfig, name: str) -> Row:
        pages = layout.request_pages(config)
        return Row(name, pages, fit(pages, num_pages))

    evicting = configs if shape.num_full_layers else ()
    rows = (row(EvictionConfig(), "full cache"), *(row(config, config.policy) for config in evicting))
    notes = []
    if not evicting:
        notes.append(NOTHING_TO_EVICT)
    if shape.latent:
        notes.append(REFUSED_LATENT)
    if serving.kv_dtype.startswith("fp8"):
        notes.append(REFUSED_KV_DTYPE)
    if shape.max_tokens is not None and serving.context_tokens > shape.max_tokens:
        notes.append(
            f"the model was made for {shape.max_tokens:,} positions; eviction does not stretch it to "
            f"{serving.context_tokens:,}"
        )
    return Plan(
        model=model,
        shape=shape,
        serving=serving,
        batch=batch,
        budget_tokens=configs[0].budget,
        memory=memory,
        layer_token_bytes=layout.layer_token_bytes,
        token_bytes=layout.token_bytes,
        page_bytes=layout.page_bytes,
        num_pages=num_pages,
        rows=rows,
        notes=tuple(notes),
        advice=_advice(layout, rows, configs[0].policy, batch, num_pages),
    )


def _advice(layout: CacheLayout, rows: Sequence[Row], policy: str, batch: int, num_pages: int) -> str:
    """What to set so that `batch` requests fit at once."""
    serving = layout.serving
    if rows[0].fit.num_requests >= batch:
        return f"nothing: {batch} request(s) of {serving.context_tokens:,} tokens fit without eviction"
    budget = largest_budget_tokens(layout, policy, batch, num_pages) if layout.num_full_tables else None
    if budget is None:
        return (
            f"no budget makes {batch} request(s) fit: lower --max-num-batched-tokens (a prompt's chunk is held whole "
            "until its step is done), --max-model-len or the batch, or give more memory"
        )
    return (
        f"{flag_name('policy')} {policy} {flag_name('budget')} {budget} --block-size {serving.page_tokens} "
        f"--max-num-batched-tokens {serving.max_num_batched_tokens} --max-model-len {serving.context_tokens}\n"
        f"(the largest budget at which {batch} fit: eviction loses what it evicts, so evict no more than you must)"
    )


def to_json(plan: Plan) -> dict:
    """The plan for a program. Bytes are those of one device."""
    return {
        "model": plan.model,
        "attention": plan.shape.attention,
        "shape": plan.shape.__dict__,
        "serving": {**plan.serving.__dict__, "max_in_flight_tokens": plan.serving.max_in_flight_tokens},
        "batch": plan.batch,
        "budget_tokens": plan.budget_tokens,
        "weights_bytes": plan.memory.weights,
        "weights_known": plan.memory.weights_known,
        "cache_bytes": plan.memory.cache,
        "token_bytes": plan.token_bytes,
        "layer_token_bytes": plan.layer_token_bytes,
        "page_bytes": plan.page_bytes,
        "num_pages": plan.num_pages,
        "policies": [
            {
                "policy": row.policy,
                "request_pages_decoding": row.pages.decoding,
                "request_pages_prefilling": row.pages.prefilling,
                "request_bytes_decoding": row.pages.decoding * plan.page_bytes,
                "request_bytes_prefilling": row.pages.prefilling * plan.page_bytes,
                "batch_bytes": plan.batch_bytes(row),
                "requests_that_fit": row.fit.num_requests,
                "vllm_concurrency": round(row.fit.vllm_concurrency, 2),
            }
            for row in plan.rows
        ],
        "notes": list(plan.notes),
        "advice": plan.advice,
    }


def to_text(plan: Plan) -> str:
    """The plan for a reader."""
    shape, serving, full = plan.shape, plan.serving, plan.rows[0]
    batch_bytes = plan.batch_bytes(full)
    times = f", {batch_bytes / plan.memory.weights:.1f} times the weights" if plan.memory.weights else ""
    lines = [
        f"model    {plan.model}: {shape.model_type}, {_layers(shape)}, {_heads(shape)}, {shape.dtype}",
        f"weights  {_gib(plan.memory.weights)} ({plan.memory.weights_known})",
        f"cache    {plan.token_bytes / 1024:,.2f} KiB per token ({plan.layer_token_bytes:,} bytes in each layer, "
        f"{serving.kv_dtype}){_window_words(shape)}",
        f"         {plan.batch} request(s) of {serving.context_tokens:,} tokens: {_gib(batch_bytes)}{times}",
        f"memory   {plan.memory.said}",
        f"         {_gib(plan.memory.cache)} for the cache: {plan.num_pages:,} pages of {serving.page_tokens} tokens, "
        f"{plan.page_bytes / 2**20:,.3f} MiB each",
        *([f"per rank of {serving.num_ranks}"] if serving.num_ranks > 1 else []),
        "",
        *_table(plan),
        "",
        *(f"note     {note}" for note in plan.notes),
        *(f"{'to set' if i == 0 else '':<9}{line}" for i, line in enumerate(plan.advice.splitlines())),
    ]
    return "\n".join(lines)


def _table(plan: Plan) -> list[str]:
    head = [
        ("", "pages of a request", "", "bytes of", f"bytes of {plan.batch}", "requests", "vLLM's log:"),
        (f"budget {plan.budget_tokens:,}", "decoding", "in prompt", "a request", "requests", "that fit", "concurrency"),
    ]
    body = [
        (
            row.policy,
            f"{row.pages.decoding:,}",
            f"{row.pages.prefilling:,}",
            _gib(row.pages.decoding * plan.page_bytes),
            _gib(plan.batch_bytes(row)),
            f"{row.fit.num_requests:,}",
            f"{row.fit.vllm_concurrency:.2f}x",
        )
        for row in plan.rows
    ]
    widths = [max(len(cells[i]) for cells in (head[1], *body)) for i in range(len(head[1]))]
    widths[-3:] = [max(width, len(cell)) for width, cell in zip(widths[-3:], head[0][-3:], strict=True)]

    def line(cells: Sequence[str]) -> str:
        padded = [f"{cells[0]:<{widths[0]}}"] + [f"{c:>{w}}" for c, w in zip(cells[1:], widths[1:], strict=True)]
        return "  ".join(padded).rstrip()

    # The words over the two columns of pages stand over both.
    pages_width = widths[1] + 2 + widths[2]
    top = [f"{'':<{widths[0]}}", f"{head[0][1]:>{pages_width}}"]
    top += [f"{c:>{w}}" for c, w in zip(head[0][3:], widths[3:], strict=True)]
    return ["  ".join(top).rstrip(), line(head[1]), *(line(cells) for cells in body)]


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.2f} GiB"


def _layers(shape: ModelShape) -> str:
    if not shape.num_window_layers:
        return f"{shape.num_layers} layers"
    return f"{shape.num_full_layers} full layers and {shape.num_window_layers} of {shape.window_tokens:,} tokens"


def _heads(shape: ModelShape) -> str:
    if shape.latent:
        return f"MLA with {shape.num_heads} heads on one latent of {shape.head_size}"
    return f"{shape.attention} with {shape.num_heads} query and {shape.num_kv_heads} KV heads of {shape.head_size}"


def _window_words(shape: ModelShape) -> str:
    if not shape.num_window_layers:
        return ""
    return f"; beyond {shape.window_tokens:,} tokens only {shape.num_full_layers} layers grow"
