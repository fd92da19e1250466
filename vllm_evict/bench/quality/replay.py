"""One text through one model under several ways of keeping its cache, all as rows of one batch.

Every row holds the same number of tokens, each its own: a row's keys lie in *slots*, and a new token takes the slot of
an evicted one. (Attention does not care for the order of keys, which carry their own rotation.) Until the budget is
reached nothing is evicted and all rows are alike, so they are one.

Which pages go is the product's own doing: `EvictionConfig`, `PageMass`, the policies' `plan`, and the references of
page mass and key difference. Only attention is Hugging Face's model here.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, PreTrainedModel
from transformers.cache_utils import Cache

from vllm_evict.config import EvictionConfig
from vllm_evict.pages import PageView
from vllm_evict.policies import EvictionPolicy
from vllm_evict.scores.aggregate import PageMass
from vllm_evict.scores.reference import key_difference_reference

ATTENTION = "vllm_evict_replay"
"""Name of the attention function below, for `from_pretrained(attn_implementation=...)`."""


@dataclass(frozen=True)
class Method:
    """A way of keeping a cache.

    Args:
        name: as it stands in results.
        config: settings of the product.
        page_tokens: tokens in a page.
        policy: in place of the one that `config` names (to try one that is not shipped).

    """

    name: str
    config: EvictionConfig
    page_tokens: int
    policy: EvictionPolicy | None = None

    @property
    def signals(self) -> tuple[str, ...]:
        return (self.policy or self.config.make_policy()).signals


class Row:
    """What one method holds of the text."""

    def __init__(self, method: Method) -> None:
        config = method.config
        self.method, self.page_tokens = method, method.page_tokens
        self.policy = method.policy or config.make_policy()
        self.budget = config.page_budget(method.page_tokens)
        self.pages = np.empty(0, dtype=np.int32)
        self.mass = (
            PageMass(config.score, method.page_tokens, config.distant_tokens)
            if "attention" in self.policy.signals
            else None
        )

    def append(self, num_tokens: int) -> None:
        """Open the pages that `num_tokens` tokens of text reach."""
        num_pages = -(-num_tokens // self.page_tokens)
        first = int(self.pages[-1]) + 1 if len(self.pages) else 0
        if num_pages > first:
            self.pages = np.append(self.pages, np.arange(first, num_pages, dtype=np.int32))
            if self.mass is not None:
                self.mass.append(num_pages - first)

    def evict(self, num_tokens: int, keys: np.ndarray | None) -> np.ndarray:
        """Drop the pages that the product would drop now, and return them. `keys`: key difference, if needed."""
        signals = {}
        if self.mass is not None:
            signals["attention"] = self.mass.scores(self.pages, num_tokens)
        if keys is not None:
            signals["keys"] = keys
        gone = np.array(self.policy.plan(PageView(self.pages, num_tokens, num_tokens, signals), self.budget).pages)
        kept = ~np.isin(self.pages, gone)
        self.pages = self.pages[kept]
        if self.mass is not None:
            self.mass.keep(kept)
        return gone

    @property
    def excess_pages(self) -> int:
        return self.budget.excess_pages(len(self.pages))


class Slots(Cache):
    """Keys and values of all rows in slots; the step's tokens go where `new_slots` says."""

    def __init__(self, num_slots: int) -> None:
        super().__init__(layers=[])
        self.num_slots = num_slots
        self.new_slots = torch.empty(0)  # long [rows, new tokens]
        self.keys: list[torch.Tensor] = []  # per layer [rows, kv heads, slots, head size], as values
        self.values: list[torch.Tensor] = []

    def update(self, key_states, value_states, layer_idx, *args, **kwargs):
        """Both `[rows, kv heads, new tokens, head size]`; returns all slots."""
        if layer_idx == len(self.keys):
            rows, heads, _, size = key_states.shape
            self.keys.append(key_states.new_zeros(rows, heads, self.num_slots, size))
            self.values.append(value_states.new_zeros(rows, heads, self.num_slots, size))
        at = self.new_slots[:, None, :, None].expand_as(key_states)
        self.keys[layer_idx].scatter_(2, at, key_states)
        self.values[layer_idx].scatter_(2, at, value_states)
        return self.keys[layer_idx], self.values[layer_idx]

    def split(self, rows: int) -> None:
        """One row becomes `rows` alike."""
        self.keys = [keys.expand(rows, -1, -1, -1).clone() for keys in self.keys]
        self.values = [values.expand(rows, -1, -1, -1).clone() for values in self.values]


def attend(module, query, key, value, attention_mask, scaling, dropout=0.0, replay=None, **kwargs):
    """Attention of a Hugging Face model that tells `replay` where the rows it watches look.

    query [rows, heads, new tokens, head size], key and value [rows, kv heads, slots, head size], attention_mask
    additive [rows, 1, new tokens, slots].
    """
    watched = replay.num_watched
    outputs = []
    if watched:
        # Query head h reads KV head h // (heads per KV head).
        grouped = query[:watched].unflatten(1, (key.shape[1], -1)).flatten(2, 3)  # [rows, kv heads, heads * new, size]
        logits = (grouped @ key[:watched].transpose(-1, -2)).float() * scaling
        logits = logits.unflatten(2, (-1, query.shape[2])) + attention_mask[:watched, :, None]
        weights = logits.softmax(dim=-1)  # [rows, kv heads, heads per KV head, new, slots]
        replay.slot_mass += weights.mean(dim=(1, 2))
        seen = weights.to(value.dtype).flatten(2, 3) @ value[:watched]
        outputs.append(seen.unflatten(2, (-1, query.shape[2])).flatten(1, 2))
    if watched < len(query):
        outputs.append(
            scaled_dot_product_attention(
                query[watched:],
                key[watched:],
                value[watched:],
                attn_mask=attention_mask[watched:].to(query.dtype),
                scale=scaling,
                enable_gqa=True,
            )
        )
    return torch.cat(outputs).transpose(1, 2).contiguous(), None


AttentionInterface.register(ATTENTION, attend)


class Replay:
    """Reads text under `methods`, which must have one budget in tokens, in chunks.

    A deep copy goes on from where it was made (and shares the model).

    Args:
        model: loaded with `attn_implementation=ATTENTION`.
        methods: one row each.
        chunk_tokens: tokens per step; a multiple of every page size, so that rows stay equally long.

    """

    def __init__(self, model: PreTrainedModel, methods: Sequence[Method], chunk_tokens: int) -> None:
        assert len({method.config.budget for method in methods}) == 1
        assert all(chunk_tokens % method.page_tokens == 0 for method in methods)
        self.model, self.chunk_tokens, self.num_tokens = model, chunk_tokens, 0
        order = sorted(methods, key=lambda method: "attention" not in method.signals)
        self.rows = [Row(method) for method in order]
        self.num_attention_rows = sum(row.mass is not None for row in self.rows)
        num_slots = methods[0].config.budget + chunk_tokens
        self.cache = Slots(num_slots)
        # [rows, slots] the token in each slot, -1 = free. One row until the first eviction.
        self.slot_token = np.full((1, num_slots), -1)

    @property
    def num_watched(self) -> int:
        """Rows, the first ones, whose attention is looked at."""
        return min(self.num_attention_rows, len(self.slot_token))

    def __deepcopy__(self, memo: dict) -> Replay:
        memo[id(self.model)] = self.model
        twin = copy.copy(self)
        twin.rows, twin.cache, twin.slot_token = copy.deepcopy((self.rows, self.cache, self.slot_token), memo)
        return twin

    def read(self, tokens: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
        """Per chunk of long [num_tokens] its first index, and float [rows, chunk, hidden], in the order of `rows`.

        One row for all while nothing has been evicted. All chunks but the last of all texts are whole.
        """
        for start in range(0, len(tokens), self.chunk_tokens):
            chunk = tokens[start : start + self.chunk_tokens]
            self._evict()
            yield start, self._forward(chunk)
            self._observe(len(chunk))
            self.num_tokens += len(chunk)

    def _forward(self, chunk: torch.Tensor) -> torch.Tensor:
        count = len(self.slot_token)
        free = np.stack([np.flatnonzero(tokens < 0)[: len(chunk)] for tokens in self.slot_token])  # [rows, chunk]
        positions = np.arange(self.num_tokens, self.num_tokens + len(chunk))
        np.put_along_axis(self.slot_token, free, np.broadcast_to(positions, free.shape), axis=1)
        self.cache.new_slots = torch.from_numpy(free)
        held = torch.from_numpy(self.slot_token)[:, None, None, :]
        visible = (held >= 0) & (held <= torch.from_numpy(positions)[:, None])  # [rows, 1, chunk, slots]
        mask = torch.zeros(visible.shape).masked_fill(~visible, torch.finfo(torch.float32).min)
        self.slot_mass = torch.zeros(self.num_watched, len(chunk), self.cache.num_slots)
        return self.model.base_model(
            input_ids=chunk.expand(count, -1),
            attention_mask=mask,
            position_ids=torch.from_numpy(positions).expand(count, -1),
            past_key_values=self.cache,
            use_cache=True,
            replay=self,
        ).last_hidden_state

    def _observe(self, num_new: int) -> None:
        mass = (self.slot_mass / len(self.cache.keys)).numpy()
        positions = np.arange(self.num_tokens, self.num_tokens + num_new)
        for index, row in enumerate(self.rows):
            row.append(self.num_tokens + num_new)
            if row.mass is not None:
                at = min(index, len(mass) - 1)
                of_tokens = mass[at][:, self._held(at)]  # [new tokens, held tokens]
                starts = np.arange(0, of_tokens.shape[1], row.page_tokens)
                row.mass.observe(row.pages, positions, np.add.reduceat(of_tokens, starts, axis=1))

    def _evict(self) -> None:
        excess = {row.excess_pages * row.page_tokens for row in self.rows}
        if excess == {0}:
            return
        assert len(excess) == 1, "rows must stay equally long"
        if len(self.slot_token) == 1:
            self.slot_token = np.repeat(self.slot_token, len(self.rows), axis=0)
            self.cache.split(len(self.rows))
        for index, row in enumerate(self.rows):
            keys = self._key_difference(index, row) if "keys" in row.policy.signals else None
            gone = row.evict(self.num_tokens, keys)
            tokens = self.slot_token[index]
            tokens[np.isin(tokens // row.page_tokens, gone) & (tokens >= 0)] = -1

    def _held(self, index: int) -> np.ndarray:
        """The slots of the tokens that a row holds, in the order of the text."""
        tokens = self.slot_token[index]
        order = np.argsort(tokens, kind="stable")
        return order[tokens[order] >= 0]

    def _key_difference(self, index: int, row: Row) -> np.ndarray:
        """float64 [pages] of one row, mean over layers and KV heads."""
        slots = torch.from_numpy(self._held(index))
        num_pages = len(row.pages)
        result = torch.zeros(1, num_pages)
        for keys in self.cache.keys:
            held = keys[index][:, slots]  # [kv heads, tokens, head size]
            blocks = held.unflatten(1, (num_pages, row.page_tokens)).transpose(0, 1)
            key_difference_reference(
                key_cache=blocks,
                block_table=torch.arange(num_pages)[None],
                num_tokens=torch.tensor([len(slots)]),
                key_difference=result,
                weight=1 / (len(held) * len(self.cache.keys)),
            )
        return result[0].double().numpy()
