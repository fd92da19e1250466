"""The CUDA ops of FLASH_ATTN and FLASHINFER in torch: they compute what they are given, and keep a note of it.

Only these are replaced; vLLM's backends, metadata builders and wrappers' callers run as they are. Call `install()`
after `fake_gpu.pretend()`, before anything imports these backends. FlashInfer's module is made of the names that vLLM
imports, with the arguments of flashinfer-python 0.7.
"""

from __future__ import annotations

import importlib.machinery
import sys
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace

import torch

HOPPER, AMPERE = (9, 0), (8, 0)
_capability = HOPPER


@dataclass(frozen=True)
class Given:
    """One tensor argument of an op, as it was handed over."""

    address: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    contiguous: bool

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Given:
        return cls(tensor.data_ptr(), tuple(tensor.shape), tensor.dtype, tensor.is_contiguous())


@dataclass(frozen=True)
class Call:
    """One call of an op.

    Args:
        op: its name.
        tensors: arguments by name.
        tables: of each row of the batch, the blocks that it reads.
        lengths: of each row, the tokens that it reads.
        max_length: the bound on them that the op was told, if it is told one.
        queries: of each row, its queries; None where it always is one.
    """

    op: str
    tensors: dict[str, Given]
    tables: tuple[tuple[int, ...], ...]
    lengths: tuple[int, ...]
    max_length: int | None = None
    queries: tuple[int, ...] | None = None


calls: list[Call] = []
"""Since the last `calls.clear()`."""


def attend(
    *,
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    rows: list[tuple[slice, torch.Tensor, int]],
    scale: float,
    out: torch.Tensor,
) -> None:
    """Causal attention over pages, the queries of a row at the end of its keys.

    Args:
        query: `[tokens, heads, head size]`.
        key_cache: `[blocks, block size, KV heads, head size]`.
        value_cache: the same.
        rows: of each row, which queries, which blocks, how many tokens in them.
        scale: of the logits.
        out: as `query`.
    """
    group_size = query.shape[1] // key_cache.shape[2]
    for queries, blocks, num_tokens in rows:
        q = query[queries].transpose(0, 1)
        k, v = (
            cache[blocks.long()].flatten(0, 1)[:num_tokens].transpose(0, 1).repeat_interleave(group_size, dim=0)
            for cache in (key_cache, value_cache)
        )
        visible = torch.ones(q.shape[1], num_tokens, dtype=torch.bool).tril(num_tokens - q.shape[1])
        weights = (q @ k.transpose(1, 2) * scale).masked_fill(~visible, -torch.inf).softmax(dim=-1)
        out[queries] = (weights @ v).transpose(0, 1)


def _rows(
    starts: list[int], block_table: torch.Tensor, lengths: list[int], page_tokens: int
) -> list[tuple[slice, torch.Tensor, int]]:
    """Rows of a padded block table; those without queries (padding) are left out."""
    return [
        (slice(start, stop), block_table[row, : -(-length // page_tokens)], length)
        for row, (start, stop, length) in enumerate(zip(starts[:-1], starts[1:], lengths, strict=True))
        if stop > start
    ]


def _note(op: str, rows: list[tuple[slice, torch.Tensor, int]], max_length: int | None, **tensors) -> None:
    calls.append(
        Call(
            op,
            {name: Given.of(tensor) for name, tensor in tensors.items()},
            tuple(tuple(blocks.tolist()) for _, blocks, _ in rows),
            tuple(length for _, _, length in rows),
            max_length,
            tuple(queries.stop - queries.start for queries, _, _ in rows),
        )
    )


# ---- FlashAttention ----


def flash_attn_varlen_func(
    *,
    q,
    k,
    v,
    out,
    cu_seqlens_q,
    max_seqlen_q,
    seqused_k,
    max_seqlen_k,
    softmax_scale,
    causal,
    window_size,
    block_table,
    softcap,
    scheduler_metadata,
    fa_version,
    num_splits,
    alibi_slopes=None,
    q_descale=None,
    k_descale=None,
    v_descale=None,
    dynamic_causal=None,
    s_aux=None,
    mask_mod=None,
    aux_tensors=None,
) -> torch.Tensor:
    """`vllm.vllm_flash_attn.flash_attn_varlen_func`."""
    assert causal is True and window_size == [-1, -1] and not softcap and mask_mod is None and s_aux is None
    assert (scheduler_metadata is not None) == (fa_version == 3)
    rows = _rows(cu_seqlens_q.tolist(), block_table, seqused_k.tolist(), k.shape[1])
    assert max(queries.stop - queries.start for queries, _, _ in rows) <= max_seqlen_q
    _note("flash_attn_varlen_func", rows, max_seqlen_k, block_table=block_table, seq_lens=seqused_k)
    attend(query=q, key_cache=k, value_cache=v, rows=rows, scale=softmax_scale, out=out)
    return out


def get_scheduler_metadata(*, batch_size, cache_seqlens, cu_seqlens_q, max_seqlen_k, page_size, **kwargs):
    """`vllm.vllm_flash_attn.get_scheduler_metadata`: the plan of FlashAttention 3."""
    lengths = cache_seqlens.tolist()
    calls.append(
        Call("get_scheduler_metadata", {"seq_lens": Given.of(cache_seqlens)}, (), tuple(lengths), max_seqlen_k)
    )
    assert batch_size == len(lengths) and len(cu_seqlens_q) == batch_size + 1
    return torch.zeros(1 + 4 * batch_size, dtype=torch.int32)


def _reshape_and_cache_flash(key, value, key_cache, value_cache, slot_mapping, *_) -> None:
    """Write keys and values `[tokens, KV heads, head size]` to their slots; negative slots are padding."""
    used = slot_mapping >= 0
    block, offset = (x[used] for x in (slot_mapping // key_cache.shape[1], slot_mapping % key_cache.shape[1]))
    key_cache[block, offset] = key[: len(slot_mapping)][used]
    value_cache[block, offset] = value[: len(slot_mapping)][used]


# ---- FlashInfer ----


class _Wrapper:
    """What both wrappers have in common: a plan, kept as the real one keeps it, and its run."""

    is_cuda_graph_enabled = False
    op = ""

    def __init__(self, float_workspace_buffer, kv_layout="NHD", **kwargs) -> None:
        self._kv_layout = kv_layout

    def _keep(self, *, starts, indptr, indices, last_page_len, page_size, sm_scale, window_left, logits_soft_cap):
        self._sm_scale, self._window_left, self._logits_soft_cap = sm_scale, window_left, logits_soft_cap or 0.0
        # Host arrays go to the device, indices are there: the plan refers to them.
        self._starts, self._indptr, self._indices = starts, indptr.tolist(), indices
        self._lengths = [
            (stop - start - 1) * page_size + last if stop > start else 0
            for start, stop, last in zip(self._indptr[:-1], self._indptr[1:], last_page_len.tolist(), strict=True)
        ]

    def rows(self) -> list[tuple[slice, torch.Tensor, int]]:
        """What the plan tells the kernel, now."""
        return [
            (slice(start, stop), self._indices[first:last], length)
            for start, stop, first, last, length in zip(
                self._starts[:-1], self._starts[1:], self._indptr[:-1], self._indptr[1:], self._lengths, strict=True
            )
            if stop > start
        ]

    def run(self, q, paged_kv_cache, *, out, q_scale=None, k_scale=None, v_scale=None, sinks=None, kv_cache_sf=None):
        rows = self.rows()
        _note(self.op, rows, None, indices=self._indices)
        key_cache, value_cache = _as_nhd(paged_kv_cache, self._kv_layout)
        attend(query=q, key_cache=key_cache, value_cache=value_cache, rows=rows, scale=self._sm_scale, out=out)
        return out


class BatchPrefillWithPagedKVCacheWrapper(_Wrapper):
    """FlashInfer's own prefill."""

    op = "prefill"

    def plan(
        self,
        qo_indptr,
        paged_kv_indptr,
        paged_kv_indices,
        paged_kv_last_page_len,
        *,
        page_size,
        causal,
        seq_lens,
        sm_scale,
        window_left,
        logits_soft_cap,
        **kwargs,
    ) -> None:
        assert causal is True
        self._causal = causal
        self._keep(
            starts=qo_indptr.tolist(),
            indptr=paged_kv_indptr,
            indices=paged_kv_indices,
            last_page_len=paged_kv_last_page_len,
            page_size=page_size,
            sm_scale=sm_scale,
            window_left=window_left,
            logits_soft_cap=logits_soft_cap,
        )
        assert seq_lens.tolist() == self._lengths


class BatchDecodeWithPagedKVCacheWrapper(_Wrapper):
    """FlashInfer's own decode."""

    op = "decode"

    def plan(
        self,
        indptr,
        indices,
        last_page_len,
        *,
        page_size,
        seq_lens,
        sm_scale,
        window_left,
        logits_soft_cap,
        **kwargs,
    ) -> None:
        self._keep(
            starts=list(range(len(indptr))),
            indptr=indptr,
            indices=indices,
            last_page_len=last_page_len,
            page_size=page_size,
            sm_scale=sm_scale,
            window_left=window_left,
            logits_soft_cap=logits_soft_cap,
        )
        assert seq_lens.tolist() == self._lengths


def xqa_batch_decode_with_kv_cache(
    *, query, kv_cache, block_tables, seq_lens, max_seq_len, bmm1_scale, out, kv_layout, q_len_per_req, **kwargs
) -> None:
    """FlashInfer's decode on Hopper."""
    assert q_len_per_req == 1
    key_cache, value_cache = _as_nhd(kv_cache, kv_layout)
    starts = list(range(len(seq_lens) + 1))
    rows = _rows(starts, block_tables, seq_lens.tolist(), key_cache.shape[1])
    _note("xqa", rows, max_seq_len, block_table=block_tables, seq_lens=seq_lens)
    attend(query=query, key_cache=key_cache, value_cache=value_cache, rows=rows, scale=bmm1_scale, out=out)


def _as_nhd(caches: tuple[torch.Tensor, torch.Tensor], layout: str) -> list[torch.Tensor]:
    return [cache if layout == "NHD" else cache.transpose(1, 2) for cache in caches]


def get_seq_lens(kv_indptr, kv_last_page_len, page_size) -> torch.Tensor:
    """As FlashInfer's."""
    return (kv_indptr[1:] - kv_indptr[:-1] - 1).clamp(min=0) * page_size + kv_last_page_len


# ---- putting them in place ----


def use_capability(capability: tuple[int, int]) -> None:
    """What device the next engine runs on: Hopper has FlashAttention 3 and XQA, Ampere has FlashAttention 2."""
    global _capability
    _capability = capability


def install() -> None:
    """Have vLLM's CUDA backends import these. Once per process."""
    from vllm.platforms import current_platform
    from vllm.platforms.interface import DeviceCapability
    from vllm.utils import flashinfer as flashinfer_utils

    platform = type(current_platform)
    platform.get_device_capability = classmethod(lambda cls, device_id=0: DeviceCapability(*_capability))
    library = torch.library.Library("_C_cache_ops", "FRAGMENT")
    library.define(
        "reshape_and_cache_flash(Tensor key, Tensor value, Tensor(a!) key_cache, Tensor(b!) value_cache, "
        "Tensor slot_mapping, str kv_cache_dtype, Tensor k_scale, Tensor v_scale) -> ()"
    )
    library.impl("reshape_and_cache_flash", _reshape_and_cache_flash, "CPU")
    _libraries.append(library)

    interface = _module(
        "vllm.vllm_flash_attn.flash_attn_interface",
        is_fa_version_supported=lambda version: version in (2, 3),
        fa_version_unsupported_reason=lambda version: None,
    )
    _module(
        "vllm.vllm_flash_attn",
        flash_attn_interface=interface,
        flash_attn_varlen_func=flash_attn_varlen_func,
        get_scheduler_metadata=get_scheduler_metadata,
        compile_flash_attn_varlen_func_from_specs=None,
    )
    _flashinfer()
    flashinfer_utils.supports_trtllm_attention = lambda is_prefill=False: _capability == HOPPER and not is_prefill
    flashinfer_utils.flashinfer_xqa_batch_decode_with_kv_cache = xqa_batch_decode_with_kv_cache
    # Which ops exist is asked when the modules are imported.
    platform.is_cuda = lambda self: True
    from vllm.v1.attention.backends import flash_attn, flashinfer  # noqa: F401

    del platform.is_cuda
    flashinfer.trtllm_workspace_buffer = torch.zeros(16, dtype=torch.uint8)


_libraries: list[torch.library.Library] = []  # a registration lives as long as its Library


def _flashinfer() -> None:
    unused = SimpleNamespace()
    _module(
        "flashinfer",
        BatchAttentionWithAttentionSinkWrapper=type("BatchAttentionWithAttentionSinkWrapper", (), {}),
        BatchDecodeWithPagedKVCacheWrapper=BatchDecodeWithPagedKVCacheWrapper,
        BatchPrefillWithPagedKVCacheWrapper=BatchPrefillWithPagedKVCacheWrapper,
        BatchPrefillWithRaggedKVCacheWrapper=unused,
        get_seq_lens=get_seq_lens,
        nvfp4_quantize_append_paged_kv_cache_with_slot_mapping=unused,
    )
    _module("flashinfer.decode", fast_decode_plan=unused, trtllm_batch_decode_with_kv_cache=unused)
    _module("flashinfer.prefill", trtllm_batch_context_with_kv_cache=unused)
    _module("flashinfer.utils", FP4Tensor=unused)


def _module(name: str, **names: object) -> ModuleType:
    module = ModuleType(name)
    module.__spec__ = importlib.machinery.ModuleSpec(name, None)
    vars(module).update(names)
    sys.modules[name] = module
    return module


def note_triton_attention() -> None:
    """Note what vLLM's Triton attention is given, too. It needs no replacement."""
    from vllm.v1.attention.backends import triton_attn

    unified_attention = triton_attn.unified_attention

    def noted(**kwargs):
        block_table, lengths = kwargs["block_table"], kwargs["seqused_k"]
        rows = _rows(kwargs["cu_seqlens_q"].tolist(), block_table, lengths.tolist(), kwargs["k"].shape[1])
        _note("unified_attention", rows, kwargs["max_seqlen_k"], block_table=block_table, seq_lens=lengths)
        return unified_attention(**kwargs)

    triton_attn.unified_attention = noted


def note_page_mass() -> None:
    """Note what our page mass kernel is given."""
    from vllm_evict.engine.attention import paged_gpu

    add_page_mass = paged_gpu.kernels.add_page_mass

    def noted(**kwargs):
        tensors = ("block_table", "token", "row", "visible_tokens", "page_mass")
        calls.append(Call("page_mass", {name: Given.of(kwargs[name]) for name in tensors}, (), ()))
        add_page_mass(**kwargs)

    paged_gpu.kernels.add_page_mass = noted


def read_by_kernels(metadata: object) -> SimpleNamespace:
    """A batch as a layer's metadata tell it to the kernels, named as FlashAttention's metadata name it."""
    if not hasattr(metadata, "num_decodes"):
        return metadata
    rows, starts = [], [0]
    if metadata.num_decodes:
        decode = metadata.decode
        if hasattr(decode, "wrapper"):
            rows += [(blocks, length) for _, blocks, length in decode.wrapper.rows()]
        else:
            rows += list(zip(decode.block_tables, decode.seq_lens.tolist(), strict=True))
        starts += range(1, metadata.num_decodes + 1)
    if metadata.num_prefills:
        for queries, blocks, length in metadata.prefill.wrapper.rows():
            rows.append((blocks, length))
            starts.append(metadata.num_decode_tokens + queries.stop)
    width = max(len(blocks) for blocks, _ in rows)
    block_table = torch.zeros(len(rows), width, dtype=torch.int32)
    for row, (blocks, _) in enumerate(rows):
        block_table[row, : len(blocks)] = blocks
    return SimpleNamespace(
        query_start_loc=torch.tensor(starts),
        seq_lens=torch.tensor([length for _, length in rows]),
        slot_mapping=metadata.slot_mapping,
        block_table=block_table,
    )
