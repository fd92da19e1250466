"""Metadata and forward pass of ``--attention-backend XFORMERS``.

The kernel is xFormers' split-K attention (``fmha.triton_splitk``), the one of its operators that reads any paged
cache and returns the log-sum-exp. Under a causal mask it wants equally many queries in every row, 16 at most. So a
step becomes two calls: requests with one query, a row each; and the rest, cut into slices (see `slices`) that each
see their request up to the slice's end. In a layer with a sliding window every query is a row of its own, because
the kernel's window begins at one place for all queries of a row.

Row counts and table widths are rounded up to powers of two: the kernel is compiled anew for every pair.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.attention.backend import (
    AttentionImpl,
    AttentionLayer,
    AttentionMetadata,
    AttentionMetadataBuilder,
    AttentionType,
    CommonAttentionMetadata,
)
from vllm.v1.attention.ops.triton_reshape_and_cache_flash import triton_reshape_and_cache_flash
from vllm.v1.kv_cache_interface import AttentionSpec, SlidingWindowSpec
from xformers.ops.fmha import Inputs, triton_splitk
from xformers.ops.fmha import attn_bias as bias

from vllm_evict.engine.attention.paged_gpu import PagedGPUBuilderMixin, add_page_mass
from vllm_evict.engine.attention.slices import QuerySlices, cut_queries, power_of_two

QUERIES_PER_SLICE = 16
"""The most queries in a row that xFormers allows under a causal mask."""

_NOBODY = np.iinfo(np.int32).max  # tokens after a padding row: more than anybody has, so it sees none
_PROGRAMS = 256
"""Kernel programs that keep a GPU busy, about two per multiprocessor of an H100: with fewer rows the keys are split."""
_SPLIT_TOKENS = 128
"""The fewest keys in a split, as in xFormers' own rule. That rule does not bound the scratch space; this one does."""


@dataclass
class XFormersCall:
    """One call of the kernel.

    Args:
        source, place, query: of `QuerySlices`, on the device.
        mask: who sees which pages, as xFormers wants it.

    """

    source: torch.Tensor
    place: torch.Tensor
    query: torch.Tensor
    mask: bias.AttentionBias


@dataclass
class XFormersMetadata(AttentionMetadata):
    """A step's calls, which are the same in all layers; and the step as vLLM gave it, as other backends keep it."""

    calls: list[XFormersCall]
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    slot_mapping: torch.Tensor


class XFormersMetadataBuilder(AttentionMetadataBuilder[XFormersMetadata]):
    """Cuts a step's queries into calls."""

    def __init__(self, kv_cache_spec: AttentionSpec, layer_names: list[str], vllm_config, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.page_tokens = kv_cache_spec.block_size
        self.window_tokens = kv_cache_spec.sliding_window if isinstance(kv_cache_spec, SlidingWindowSpec) else None
        if self.window_tokens is None and getattr(kv_cache_spec, "sliding_window", None) is not None:
            raise ValueError(
                "--attention-backend XFORMERS does not work with sliding-window layers that share pages with other "
                "layers. Way out: drop --disable-hybrid-kv-cache-manager, or use another backend."
            )

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> XFormersMetadata:
        query_start = common_attn_metadata.query_start_loc_cpu.numpy()
        num_queries = np.diff(query_start)
        whole_rows = num_queries > 0 if self.window_tokens else num_queries == 1
        calls = []
        for chosen, queries_per_slice in ((whole_rows, 1), ((num_queries > 0) & ~whole_rows, QUERIES_PER_SLICE)):
            requests = np.flatnonzero(chosen)
            if len(requests):
                slices = cut_queries(
                    query_start=query_start,
                    requests=requests,
                    queries_per_slice=queries_per_slice,
                    padding_tokens=_NOBODY,
                )
                calls.append(self._call(slices, common_attn_metadata))
        return XFormersMetadata(
            calls,
            query_start_loc=common_attn_metadata.query_start_loc,
            seq_lens=common_attn_metadata.seq_lens,
            block_table=common_attn_metadata.block_table_tensor,
            slot_mapping=common_attn_metadata.slot_mapping,
        )

    def _call(self, slices: QuerySlices, common: CommonAttentionMetadata) -> XFormersCall:
        parts = (slices.source, slices.request, slices.tokens_after, slices.place, slices.query)
        packed = async_tensor_h2d(np.concatenate(parts), device=self.device)
        source, request, tokens_after, place, query = packed.split([len(part) for part in parts])

        seq_lens = (common.seq_lens[request] - tokens_after).clamp(min=0).to(torch.int32)  # [rows]
        pages = -(-common.max_seq_len // self.page_tokens)
        width = power_of_two(pages)
        block_table = common.block_table_tensor[:, :width]
        table = block_table.new_zeros(slices.num_rows, width)
        table[:, : block_table.shape[1]] = block_table[request]
        return XFormersCall(source, place, query, self._mask(slices, seq_lens, table))

    def _mask(self, slices: QuerySlices, seq_lens: torch.Tensor, table: torch.Tensor) -> bias.AttentionBias:
        """Lengths stay on the device; of the lists that xFormers keeps beside them its kernel reads none.

        seq_lens: int32 ``[rows]`` tokens that a row's last query may see.
        table: int32 ``[rows, pages]``.
        """
        rows, per_slice = slices.num_rows, slices.queries_per_slice
        queries = bias._SeqLenInfo(
            seqstart=torch.arange(0, (rows + 1) * per_slice, per_slice, dtype=torch.int32, device=self.device),
            max_seqlen=per_slice,
            min_seqlen=per_slice,
            seqstart_py=range(0, (rows + 1) * per_slice, per_slice),
        )
        capacity = table.shape[1] * self.page_tokens
        if self.window_tokens:
            first = torch.nn.functional.pad((seq_lens - self.window_tokens).clamp(min=0), (0, 1))
            keys = bias._GappySeqInfo(
                seqstart=first,
                max_seqlen=capacity,
                min_seqlen=0,
                seqstart_py=[0] * (rows + 1),
                seqlen=seq_lens,  # with pages this is where a row's keys end, not how many there are
                seqlen_py=[capacity] * rows,
            )
            return bias.PagedBlockDiagonalCausalWithOffsetGappyKeysMask(queries, keys, table, self.page_tokens)
        keys = bias._PaddedSeqLenInfo(
            seqstart=torch.arange(0, (rows + 1) * capacity, capacity, dtype=torch.int32, device=self.device),
            max_seqlen=capacity,
            min_seqlen=0,
            seqstart_py=range(0, (rows + 1) * capacity, capacity),
            seqlen=seq_lens,
            seqlen_py=[capacity] * rows,
            padding=capacity,
        )
        return bias.PagedBlockDiagonalCausalWithOffsetPaddedKeysMask(queries, keys, table, self.page_tokens)


class XFormersImpl(AttentionImpl[XFormersMetadata]):
    """Attention of one layer."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: list[float] | None,
        sliding_window: int | None,
        kv_cache_dtype: str,
        logits_soft_cap: float | None = None,
        attn_type: AttentionType = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
    ) -> None:
        for feature, wanted in (
            ("ALiBi", alibi_slopes is not None),
            ("a soft cap on attention logits", bool(logits_soft_cap)),
            (f"{attn_type} attention", attn_type != AttentionType.DECODER),
        ):
            if wanted:
                # A refusal, not a gap: vLLM's own backends answer with this exception.
                raise NotImplementedError(
                    f"--attention-backend XFORMERS does not work with {feature}, which xFormers' kernel cannot "
                    "compute over pages. Way out: use another backend."
                )
        self.num_heads = num_heads
        self.head_size = head_size
        self.scale = float(scale)
        self.num_kv_heads = num_kv_heads
        self.logits_soft_cap = None
        self.kv_cache_dtype = kv_cache_dtype
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name

    def do_kv_cache_update(
        self,
        layer: AttentionLayer,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """Write this step's keys and values, ``[num_tokens, num_kv_heads, head_size]`` each, into the cache."""
        key_cache, value_cache = self._halves(kv_cache)
        triton_reshape_and_cache_flash(
            key, value, key_cache, value_cache, slot_mapping, self.kv_cache_dtype, layer._k_scale, layer._v_scale
        )

    def forward(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: XFormersMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend.

        query, output: [num_tokens, num_heads, head_size]
        kv_cache:      [num_blocks, num_kv_heads, block_size, 2 * head_size], tokens outermost in memory
        """
        assert output_scale is None and output_block_scale is None, "vLLM fuses what the backend has not offered"
        if attn_metadata is None:  # profiling
            return output.fill_(0)
        self.attend(query, kv_cache, attn_metadata, output)
        return output

    def attend(
        self,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: XFormersMetadata,
        output: torch.Tensor,
        log_sum_exp: torch.Tensor | None = None,
    ) -> None:
        """All of a step's calls, into ``output`` and, if given, ``log_sum_exp`` (natural, ``[tokens, num_heads]``)."""
        key_cache, value_cache = self._halves(kv_cache)
        for call in attn_metadata.calls:
            self._attend(call, query, key_cache, value_cache, output, log_sum_exp)

    def _halves(self, kv_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V ``[num_blocks, block_size, num_kv_heads, head_size]``, views."""
        return kv_cache.transpose(1, 2).split(self.head_size, dim=-1)

    def _attend(
        self,
        call: XFormersCall,
        query: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        output: torch.Tensor,
        log_sum_exp: torch.Tensor | None,
    ) -> None:
        heads_per_kv_head = self.num_heads // self.num_kv_heads
        rows = call.mask.block_tables.shape[0]
        per_slice = call.mask.q_seqinfo.max_seqlen
        inputs = Inputs(
            query=query[call.source].view(1, -1, self.num_kv_heads, heads_per_kv_head, self.head_size),
            key=_one_row(key_cache, heads_per_kv_head),
            value=_one_row(value_cache, heads_per_kv_head),
            attn_bias=call.mask,
            scale=self.scale,
        )
        operator = _operator(
            page_tokens=call.mask.page_size,
            programs=rows * self.num_kv_heads,
            key_tokens=call.mask.block_tables.shape[1] * call.mask.page_size,
            query_rows=per_slice * heads_per_kv_head,
            head_size=self.head_size,
        )
        # Not through memory_efficient_attention(): its checks, made anew for every layer and step, were made at
        # start-up, and one of them wants xFormers' C++ library, which this kernel does not use.
        attended, context = operator.apply(inputs, needs_gradient=log_sum_exp is not None)
        output.view(query.shape)[call.query] = attended.view(-1, *query.shape[1:])[call.place]
        if log_sum_exp is not None:
            by_place = context.lse.reshape(self.num_heads, -1).T  # [places, num_heads]
            log_sum_exp[call.query] = by_place[call.place].to(log_sum_exp.dtype)


class EvictionXFormersMetadataBuilder(PagedGPUBuilderMixin, XFormersMetadataBuilder):
    """The same from resident pages."""


class EvictionXFormersImpl(XFormersImpl):
    """The same, then page mass where the step asks for it."""

    def forward(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: XFormersMetadata | None,
        output: torch.Tensor,
        *args,
        **kwargs,
    ) -> torch.Tensor:
        request = getattr(attn_metadata, "mass_request", None)
        if request is None:
            return super().forward(layer, query, key, value, kv_cache, attn_metadata, output, *args, **kwargs)
        log_sum_exp = query.new_empty(query.shape[:2], dtype=torch.float32)
        self.attend(query, kv_cache, attn_metadata, output, log_sum_exp)
        add_page_mass(self, request, query, kv_cache, log_sum_exp)
        return output


def _one_row(cache: torch.Tensor, heads_per_kv_head: int) -> torch.Tensor:
    """``[num_blocks, block_size, num_kv_heads, head_size]`` as ``[1, tokens, num_kv_heads, heads, head_size]``, a view.

    That the heads of a group share their keys is told by a stride of 0.
    """
    num_blocks, page_tokens, num_kv_heads, head_size = cache.shape
    block_stride, token_stride, head_stride, _ = cache.stride()
    if block_stride != page_tokens * token_stride:
        raise ValueError(
            "--attention-backend XFORMERS needs tokens that lie equally far apart in memory, and this model's KV cache "
            f"has a page every {block_stride} elements of {page_tokens} tokens every {token_stride}. "
            "Way out: use another backend."
        )
    return cache.as_strided(
        (1, num_blocks * page_tokens, num_kv_heads, heads_per_kv_head, head_size),
        (num_blocks * block_stride, token_stride, head_stride, 0, 1),
    )


def _operator(
    *, page_tokens: int, programs: int, key_tokens: int, query_rows: int, head_size: int
) -> type[triton_splitk.FwOp]:
    """The kernel's tiling for a call.

    Tiles are as large as registers hold without spilling, and 99 KiB of shared memory: read off kernels compiled
    for sm_80 and sm_90. (From compute capability 8.9 on, xFormers chooses its own tile of queries at head size 128.)

    Args:
        page_tokens: a tile of keys must divide it.
        programs: kernel programs if keys are not split.
        key_tokens: the most keys a row can have.
        query_rows: queries times the heads that share a KV head, the rows of a tile product.
        head_size: elements.

    """
    splits = max(1, min(_PROGRAMS // programs, key_tokens // _SPLIT_TOKENS))
    tiles = (64, 32, 16) if head_size <= 256 else (32, 16)
    return triton_splitk.FwOp.get_operator(
        1 << (splits.bit_length() - 1),
        block_m=min(max(16, 8192 // head_size), max(16, power_of_two(query_rows)), 64),
        block_n=next(tile for tile in tiles if page_tokens % tile == 0),
        num_warps=2 if query_rows <= 16 and head_size <= 128 else 4,
    )
