"""What the functions of triton.py refuse, by shape, type and stride: reading an index would wait for the device."""

import torch

QUERY_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)
MAX_PAGE_TOKENS = 256


def validate_queries(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    block_table: torch.Tensor,
    token: torch.Tensor,
    row: torch.Tensor,
    visible_tokens: torch.Tensor,
    page_mass: torch.Tensor,
) -> None:
    validate_query(query, key_cache)
    num_observed = len(token)
    validate_int32("token", token, num_observed)
    validate_int32("row", row, num_observed)
    validate_int32("visible_tokens", visible_tokens, num_observed)
    validate_table(block_table, page_mass, num_observed, "page_mass")


def validate_query(query: torch.Tensor, key_cache: torch.Tensor) -> None:
    validate_key_cache(key_cache)
    if query.dtype not in QUERY_DTYPES or key_cache.dtype not in (query.dtype, *FP8_DTYPES):
        raise ValueError(
            f"page mass: query is {query.dtype}, key_cache {key_cache.dtype}; a query is one of {[*QUERY_DTYPES]}, "
            f"keys are the same or one of {[*FP8_DTYPES]}"
        )
    num_kv_heads, head_size = key_cache.shape[2:]
    if query.dim() != 3 or query.shape[2] != head_size or query.stride(2) != 1:
        raise ValueError(
            f"page mass: query has shape {tuple(query.shape)} and strides {query.stride()}, expected "
            f"[num_tokens, num_heads, {head_size}] with contiguous heads"
        )
    if query.shape[1] % num_kv_heads:
        raise ValueError(f"page mass: {query.shape[1]} query heads are no multiple of {num_kv_heads} KV heads")


def validate_options(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    log_sum_exp: torch.Tensor | None,
    k_scale: torch.Tensor | float | None,
    enabled: torch.Tensor | None,
    scratch: torch.Tensor | None,
) -> None:
    if log_sum_exp is not None and (log_sum_exp.dtype != torch.float32 or log_sum_exp.shape != query.shape[:2]):
        raise ValueError(
            f"page mass: log_sum_exp must be float32 {tuple(query.shape[:2])}, got {log_sum_exp.dtype} "
            f"{tuple(log_sum_exp.shape)}"
        )
    num_kv_heads = key_cache.shape[2]
    if isinstance(k_scale, torch.Tensor) and (
        k_scale.dtype != torch.float32 or k_scale.dim() > 1 or k_scale.numel() not in (1, num_kv_heads)
    ):
        raise ValueError(
            f"page mass: k_scale must be a number or float32 [1] or [{num_kv_heads}], got {k_scale.dtype} "
            f"{tuple(k_scale.shape)}"
        )
    validate_gate_and_scratch(enabled, scratch)


def validate_key_cache(key_cache: torch.Tensor) -> None:
    if key_cache.dim() != 4 or key_cache.stride(3) != 1:
        raise ValueError(
            f"key_cache has shape {tuple(key_cache.shape)} and strides {key_cache.stride()}, expected [num_blocks, "
            "page_tokens, num_kv_heads, head_size] with contiguous heads"
        )
    page_tokens = key_cache.shape[1]
    if page_tokens.bit_count() != 1 or page_tokens > MAX_PAGE_TOKENS:
        raise ValueError(f"a page of {page_tokens} tokens: set --block-size to a power of two up to {MAX_PAGE_TOKENS}")
    if key_cache.dtype not in QUERY_DTYPES + FP8_DTYPES:
        raise ValueError(
            f"key_cache is {key_cache.dtype}, supported: {[*QUERY_DTYPES, *FP8_DTYPES]} (view bytes as them)"
        )
    if key_cache.dtype == torch.float8_e4m3fn and key_cache.is_cuda:
        capability = torch.cuda.get_device_capability(key_cache.device)
        if capability < (8, 9):
            raise ValueError(
                f"key_cache is float8_e4m3fn, which needs compute capability 8.9, not {capability}: use e5m2"
            )


def validate_table(block_table: torch.Tensor, result: torch.Tensor, num_results: int, name: str) -> None:
    if block_table.dim() != 2 or block_table.dtype != torch.int32 or block_table.stride(1) != 1:
        raise ValueError("block_table must be int32 [num_rows, max_pages] with contiguous rows")
    max_pages = block_table.shape[1]
    if result.dtype != torch.float32 or result.dim() != 2 or result.stride(1) != 1:
        raise ValueError(f"{name} must be float32 with two dimensions and contiguous rows, got {result.dtype}")
    if len(result) != num_results or result.shape[1] < max_pages:
        raise ValueError(f"{name} has shape {tuple(result.shape)}, expected [{num_results}, >= {max_pages}]")


def validate_int32(name: str, values: torch.Tensor, length: int) -> None:
    if values.dtype != torch.int32 or values.shape != (length,) or not values.is_contiguous():
        raise ValueError(
            f"{name} must be contiguous int32 [{length}], got {values.dtype} {tuple(values.shape)}, strides "
            f"{values.stride()}"
        )


def validate_gate_and_scratch(enabled: torch.Tensor | None, scratch: torch.Tensor | None) -> None:
    if enabled is not None and (enabled.dtype != torch.int32 or enabled.numel() != 1):
        raise ValueError(f"enabled must be int32 [1], got {enabled.dtype} {tuple(enabled.shape)}")
    if scratch is not None and (scratch.dtype != torch.float32 or scratch.dim() != 1 or not scratch.is_contiguous()):
        raise ValueError(f"scratch must be contiguous float32 with one dimension, got {scratch.dtype}")
