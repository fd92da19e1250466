"""The bench with positions that rebase: the worker's slots know the rotary position that their keys have."""

from __future__ import annotations

from tests.bookkeeping.harness import PAGE_TOKENS, Bench
from vllm_evict.engine.rebase import PositionKeeper
from vllm_evict.engine.resident import ResidentTable


class RebasingBench(Bench):
    """Checks after every forward that what is read stands in order below the limit, the newest token at its place, and
    that what the prefix cache offers stands where it was computed.

    Args:
        limit_tokens: of the model; default: the least that the settings need.
        options: see `Bench`.

    """

    def __init__(self, stock, *, limit_tokens: int | None = None, settings: dict | None = None, **options):
        super().__init__(
            stock, settings={"positions": "rebase", **(settings or {})}, **{"max_model_len": 256} | options
        )
        largest_budget = max(self.budget.budget_pages * PAGE_TOKENS, 16)  # some tests let requests ask for 16
        self.limit_tokens = limit_tokens or largest_budget + self.config.max_in_flight_tokens
        self.manager._positions = PositionKeeper(self.limit_tokens, PAGE_TOKENS, self.pool)
        self.table = _MovingTable(self)
        self.rotary = [[-1] * PAGE_TOKENS for _ in self.pool.blocks]
        self.written_at = [[-1] * PAGE_TOKENS for _ in self.pool.blocks]
        self.num_rebases = self.num_copies = 0

    def _forward(self, request_id: str, num_tokens: int) -> None:
        request = self.table[request_id]
        block_of = dict(zip(request.pages.tolist(), request.block_ids.tolist(), strict=True))
        first = request.num_computed_tokens
        for position in range(first, first + num_tokens):
            page, slot = divmod(position, PAGE_TOKENS)
            self.written_at[block_of[page]][slot] = position
            self.rotary[block_of[page]][slot] = position - request.offset_pages * PAGE_TOKENS
        super()._forward(request_id, num_tokens)
        last = -1
        for page, block_id in block_of.items():
            for slot in range(min(PAGE_TOKENS, first + num_tokens - page * PAGE_TOKENS)):
                rotary = self.rotary[block_id][slot]
                assert last < rotary < self.limit_tokens and rotary % PAGE_TOKENS == slot, (request_id, page, slot)
                last = rotary
        assert last == first + num_tokens - 1 - request.offset_pages * PAGE_TOKENS

    def _check_prefix_cache(self) -> None:
        super()._check_prefix_cache()
        for block in self.pool.blocks if hasattr(self, "rotary") else ():
            if block.block_hash is not None:
                assert self.rotary[block.block_id] == self.written_at[block.block_id], "a page on offer has moved"


class _MovingTable(ResidentTable):
    def __init__(self, bench: RebasingBench) -> None:
        super().__init__(bench.manager.kv_cache_group_id)
        self.bench = bench

    def apply(self, output, update):
        bench = self.bench
        moves = super().apply(output, update)
        for move in moves:
            bench.num_rebases += 1
            for source, copy in zip(move.sources.tolist(), move.copies.tolist(), strict=True):
                bench.num_copies += 1
                for memory in (bench._kv, bench.rotary, bench.written_at):
                    memory[copy] = list(memory[source])
            for block_id, pages_down in zip(move.block_ids.tolist(), move.pages_down.tolist(), strict=True):
                assert pages_down > 0, "keys never move up"
                bench.rotary[block_id] = [rotary - pages_down * PAGE_TOKENS for rotary in bench.rotary[block_id]]
        return moves
