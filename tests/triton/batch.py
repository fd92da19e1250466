"""Batches for the page-mass kernel, and what the slow reference says about them. For the tests and deploy/gpu-check."""

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace

import torch

from vllm_evict.scores.reference import page_mass_reference

UNTOUCHED = 7.0  # what page_mass holds before
#: On top of what a row holds, so that there are entries nobody may read.
SPARE_PAGES = 2

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
# Every value of an axis with several of every other one.
CASES = {
    "MHA": dict(page=16, heads=2, kv_heads=2, head_size=64, dtype=BF16),
    "SmolLM2": dict(page=16, heads=9, kv_heads=3, head_size=64, dtype=F32, head_major=True),
    "Llama 3 8:1": dict(page=32, heads=16, kv_heads=2, head_size=128, dtype=BF16),
    "MQA 256": dict(page=64, heads=4, kv_heads=1, head_size=256, dtype=F16, softcap=5.0),
    "MQA wide": dict(page=16, heads=20, kv_heads=1, head_size=64, dtype=F16),
    "head of 80": dict(page=32, heads=6, kv_heads=2, head_size=80, dtype=F32, softcap=20.0),
    "head of 80, 8:1": dict(page=64, heads=8, kv_heads=1, head_size=80, dtype=BF16, head_major=True),
    "e4m3": dict(page=16, heads=4, kv_heads=2, head_size=64, dtype=BF16, key_dtype=E4M3, k_scale=0.5),
    "e5m2": dict(
        page=32, heads=6, kv_heads=2, head_size=80, dtype=F16, key_dtype=E5M2, k_scale=torch.tensor([0.5, 2.0])
    ),
    "e4m3 in fp32": dict(
        page=64, heads=2, kv_heads=2, head_size=128, key_dtype=E4M3, k_scale=torch.tensor(2.0), head_major=True
    ),
    "pages of 8": dict(page=8, heads=3, kv_heads=1, head_size=32, dtype=F32),
    "pages of 128": dict(page=128, heads=2, kv_heads=1, head_size=64, dtype=BF16, softcap=5.0),
}
#: Of `decode_with_page_mass`, which reads no float8.
DECODE_CASES = {name: case for name, case in CASES.items() if "key_dtype" not in case}
KEY_CASES = {
    "bf16": dict(page=16, kv_heads=2, head_size=64, dtype=BF16),
    "fp16, 80": dict(page=32, kv_heads=3, head_size=80, dtype=F16, head_major=True),
    "fp32, 256": dict(page=64, kv_heads=1, head_size=256, dtype=F32),
    "e4m3": dict(page=16, kv_heads=2, head_size=128, dtype=BF16, key_dtype=E4M3),
    "pages of 128": dict(page=128, kv_heads=2, head_size=64, dtype=BF16),
}


@dataclass(frozen=True)
class Batch:
    """Arguments of `add_page_mass`."""

    query: torch.Tensor
    key_cache: torch.Tensor
    block_table: torch.Tensor
    token: torch.Tensor
    row: torch.Tensor
    visible_tokens: torch.Tensor
    scale: float
    softcap: float = 0.0
    weight: float = 0.5
    k_scale: torch.Tensor | float | None = None
    value_cache: torch.Tensor | None = None

    @property
    def page_tokens(self) -> int:
        return self.key_cache.shape[1]

    def arguments(self) -> dict:
        return dict(
            query=self.query,
            key_cache=self.key_cache,
            block_table=self.block_table,
            token=self.token,
            row=self.row,
            visible_tokens=self.visible_tokens,
            scale=self.scale,
            softcap=self.softcap,
            weight=self.weight,
            k_scale=self.k_scale,
        )

    def start(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        shape = (len(self.token), self.block_table.shape[1])
        return torch.full(shape, UNTOUCHED, dtype=dtype, device=self.query.device)

    def keys(self) -> torch.Tensor:
        """float64 [num_blocks, num_kv_heads, page_tokens, head_size], scaled."""
        keys = self.key_cache.double().transpose(1, 2)
        if self.k_scale is not None:
            keys = keys * torch.as_tensor(self.k_scale, device=keys.device).double().view(-1, 1, 1)
        return keys

    def reference(self) -> torch.Tensor:
        page_mass = self.start(torch.float64)
        arguments = self.arguments() | {"key_cache": self.keys()}
        del arguments["k_scale"]
        page_mass_reference(**arguments, page_mass=page_mass, compute_dtype=torch.float64)
        return page_mass

    def log_sum_exp(self) -> torch.Tensor:
        """float32 [num_tokens, num_heads], of observed queries; NaN elsewhere. Transposed in memory, as FA's."""
        num_tokens, num_heads, _ = self.query.shape
        result = torch.full((num_heads, num_tokens), float("nan"), device=self.query.device)
        keys = self.keys()
        for token, row, visible in zip(self.token, self.row, self.visible_tokens, strict=True):
            if visible == 0 or row < 0:
                continue
            blocks = self.block_table[int(row), : -(-int(visible) // self.page_tokens)].long()
            seen = keys[blocks].transpose(0, 1).flatten(1, 2)[:, : int(visible)]
            seen = seen.repeat_interleave(num_heads // len(seen), dim=0)
            logits = torch.einsum("hd,htd->ht", self.query[int(token)].double(), seen) * self.scale
            if self.softcap:
                logits = self.softcap * torch.tanh(logits / self.softcap)
            result[:, int(token)] = torch.logsumexp(logits, dim=-1)
        return result.t()

    def only(self, chosen: torch.Tensor) -> "Batch":
        return replace(self, token=self.token[chosen], row=self.row[chosen], visible_tokens=self.visible_tokens[chosen])

    def bound(self) -> float:
        """Mass per head is at most 1, and some fp32 roundings (6e-8 each) of exponents up to 2^5 lie on the way."""
        return 2e-6 * self.weight * self.query.shape[1] + UNTOUCHED * 2**-23


def make_batch(
    *,
    page: int = 16,
    heads: int = 6,
    kv_heads: int = 2,
    head_size: int = 64,
    dtype: torch.dtype = torch.float32,
    key_dtype: torch.dtype | None = None,
    head_major: bool = False,
    softcap: float = 0.0,
    k_scale: torch.Tensor | float | None = None,
    requests: tuple[tuple[int, int], ...] = ((1, 1), (16, 1), (75, 3), (64, 1), (97, 20)),
    garbage: float = float("nan"),
    device: str = "cpu",
    seed: int = 1,
) -> Batch:
    """Requests of (tokens, observed last ones), pages in random places; all that nobody wrote holds `garbage`.

    head_major: the cache lies as [num_blocks, num_kv_heads, page, 2 * head_size] (vLLM's LBHNC), not as
                [num_blocks, page, num_kv_heads, 2 * head_size] (LBNHC)
    """
    generator, value_generator = (torch.Generator().manual_seed(seed + i) for i in (0, 1000))
    pages_of = [-(-length // page) for length, _ in requests]
    num_blocks = sum(pages_of) + 3
    shape = (num_blocks, kv_heads, page) if head_major else (num_blocks, page, kv_heads)
    cache = torch.full((*shape, 2 * head_size), garbage, dtype=torch.float32).to(key_dtype or dtype)
    if head_major:
        cache = cache.transpose(1, 2)
    halves = cache.split(head_size, dim=-1)  # two of [num_blocks, page, kv_heads, head_size]
    free = torch.randperm(num_blocks, generator=generator)
    # -1: an index that nobody may follow
    block_table = torch.full((len(requests), max(pages_of) + SPARE_PAGES), -1, dtype=torch.int32)
    token, row, visible = [], [], []
    next_token = 0
    for i, (length, num_observed) in enumerate(requests):
        pages, free = free[: pages_of[i]], free[pages_of[i] :]
        block_table[i, : len(pages)] = pages
        position = torch.arange(length)
        for half, source in zip(halves, (generator, value_generator), strict=True):
            numbers = torch.randn(length, kv_heads, head_size, generator=source).to(half.dtype)
            as_bytes = half.view(torch.uint8) if half.element_size() == 1 else half
            as_bytes[pages[position // page], position % page] = numbers.view(as_bytes.dtype)
        next_token += 2  # unobserved ones
        token += range(next_token, next_token + num_observed)
        next_token += num_observed
        row += [i] * num_observed
        visible += range(length - num_observed + 1, length + 1)
    # A slice of a fused projection, as in vLLM. Twice the usual spread makes sharp softmaxes.
    qkv = 2 * torch.randn(next_token, (heads + 2 * kv_heads) * head_size, generator=generator)
    query = qkv.to(dtype).to(device)[:, : heads * head_size].view(next_token, heads, head_size)
    if isinstance(k_scale, torch.Tensor):
        k_scale = k_scale.to(device)

    def indices(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    key_cache, value_cache = cache.to(device).split(head_size, dim=-1)
    return Batch(
        query=query,
        key_cache=key_cache,
        block_table=block_table.to(device),
        token=indices(token),
        row=indices(row),
        visible_tokens=indices(visible),
        scale=head_size**-0.5,
        softcap=softcap,
        k_scale=k_scale,
        value_cache=value_cache,
    )


@dataclass(frozen=True)
class DecodeStep:
    """Arguments of `decode_with_page_mass`."""

    query: torch.Tensor
    key_cache: torch.Tensor
    value_cache: torch.Tensor
    block_table: torch.Tensor
    num_tokens: torch.Tensor
    row: torch.Tensor
    visible_tokens: torch.Tensor
    scale: float
    softcap: float = 0.0
    weight: float = 0.5

    def arguments(self) -> dict:
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def start(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """What page_mass holds before."""
        shape = (len(self.row), self.block_table.shape[1])
        return torch.full(shape, UNTOUCHED, dtype=dtype, device=self.query.device)

    def expected_mass(self) -> torch.Tensor:
        """float64, of the reference."""
        page_mass = self.start(torch.float64)
        page_mass_reference(
            query=self.query,
            key_cache=self.key_cache.transpose(1, 2),
            block_table=self.block_table,
            token=self.row,
            row=self.row,
            visible_tokens=self.visible_tokens,
            page_mass=page_mass,
            scale=self.scale,
            weight=self.weight,
            softcap=self.softcap,
            compute_dtype=torch.float64,
        )
        return page_mass

    def expected_output(self) -> torch.Tensor:
        """float64 [num_rows, num_heads, head_size]; zeros of a row without tokens."""
        expected = torch.zeros(self.query.shape, dtype=torch.float64, device=self.query.device)
        page_tokens, num_kv_heads = self.key_cache.shape[1:3]
        for i, tokens in enumerate(self.num_tokens.tolist()):
            if tokens == 0:
                continue
            blocks = self.block_table[i, : -(-tokens // page_tokens)].long()
            keys, values = (
                cache[blocks].flatten(0, 1)[:tokens].double().repeat_interleave(self.query.shape[1] // num_kv_heads, 1)
                for cache in (self.key_cache, self.value_cache)
            )
            logits = torch.einsum("hd,thd->ht", self.query[i].double(), keys) * self.scale
            if self.softcap:
                logits = self.softcap * torch.tanh(logits / self.softcap)
            expected[i] = torch.einsum("ht,thd->hd", torch.softmax(logits, dim=-1), values)
        return expected

    def mass_bound(self) -> float:
        """As `Batch.bound`."""
        return 2e-6 * self.weight * self.query.shape[1] + UNTOUCHED * 2**-23

    def output_bound(self) -> float:
        """A mean of values: besides float32's roundings its weights are rounded to the dtype once, and it is once."""
        rounding = 0.0 if self.query.dtype == torch.float32 else torch.finfo(self.query.dtype).eps
        return (rounding + 4e-6) * self.value_cache.double().nan_to_num().abs().max().item()


def make_decode_step(*, lengths: tuple[int, ...], **case) -> DecodeStep:
    """One query of each row of so many tokens, all rows observed; that of a row without tokens is NaN."""
    batch = make_batch(requests=tuple((length, min(length, 1)) for length in lengths), **case)
    query = batch.query.new_full((len(lengths), *batch.query.shape[1:]), float("nan"))
    query[batch.row.long()] = batch.query[batch.token.long()]

    def indices(values: Iterable[int]) -> torch.Tensor:
        return torch.tensor([*values], dtype=torch.int32, device=query.device)

    return DecodeStep(
        query=query,
        key_cache=batch.key_cache,
        value_cache=batch.value_cache,
        block_table=batch.block_table,
        num_tokens=indices(lengths),
        row=indices(range(len(lengths))),
        visible_tokens=indices(lengths),
        scale=batch.scale,
        softcap=batch.softcap,
    )
