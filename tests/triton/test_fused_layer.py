"""When a TRITON_ATTN layer lets one kernel do attention and page mass, and what it is handed; nothing of it runs."""

from types import SimpleNamespace

import pytest
import torch
from vllm.v1.attention.backend import AttentionType

pytest.importorskip("triton", reason="no Triton here")

from vllm_evict.config import EvictionConfigError
from vllm_evict.engine.attention import paged_gpu, triton_attn
from vllm_evict.engine.mass_request import MassRequest, Stopwatch

HEADS, KV_HEADS, HEAD_SIZE, PAGE = 4, 2, 16, 8
PLAIN_STEP = dict(max_query_len=1, causal=True, mm_prefix_range_tensor=None, rswa_window=None)


def layer(**changes) -> triton_attn.EvictionTritonAttentionImpl:
    common = dict(alibi_slopes=None, sliding_window=None, kv_cache_dtype="auto", logits_soft_cap=30.0)
    return triton_attn.EvictionTritonAttentionImpl(
        num_heads=HEADS, head_size=HEAD_SIZE, scale=0.25, num_kv_heads=KV_HEADS, **common | changes
    )


def metadata(
    *, tokens: int = 3, rows: int = 3, is_plain: bool = True, enabled: torch.Tensor | None = None
) -> SimpleNamespace:
    int32 = dict(dtype=torch.int32)
    request = MassRequest(
        observed=SimpleNamespace(row=torch.tensor([1], **int32), visible_tokens=torch.tensor([9], **int32)),
        block_table=torch.zeros(rows, 2, **int32),
        page_mass=torch.zeros(1, 2),
        layer_weight=0.5,
        stopwatch=Stopwatch(),
        enabled=enabled,
    )
    lengths = torch.ones(rows, **int32)
    return SimpleNamespace(num_actual_tokens=tokens, seq_lens=lengths, is_plain_decode=is_plain, mass_request=request)


@pytest.fixture
def calls(monkeypatch) -> list[tuple[str, dict]]:
    """What was called, the one kernel with its arguments."""
    calls = []
    monkeypatch.setattr(triton_attn, "decode_with_page_mass", lambda **given: calls.append(("one kernel", given)))
    monkeypatch.setattr(paged_gpu, "add_page_mass", lambda *given: calls.append(("page mass", {})))
    monkeypatch.setattr(
        triton_attn.TritonAttentionImpl, "forward", lambda self, *given: calls.append(("attention", {})) or given[6]
    )
    return calls


def forward(impl, attn_metadata, *scales) -> torch.Tensor:
    query = torch.zeros(5, HEADS, HEAD_SIZE)
    kv_cache = torch.arange(3 * KV_HEADS * PAGE * 2 * HEAD_SIZE).view(3, KV_HEADS, PAGE, 2 * HEAD_SIZE)
    output = torch.zeros(5, HEADS, HEAD_SIZE)
    assert impl.forward(None, query, None, None, kv_cache, attn_metadata, output, *scales) is output
    return kv_cache


def test_a_plain_layer_of_a_plain_step(calls):
    kv_cache = forward(layer(), metadata())
    [(name, given)] = calls
    assert name == "one kernel"
    assert torch.equal(given["key_cache"], kv_cache.transpose(1, 2)[..., :HEAD_SIZE])
    assert torch.equal(given["value_cache"], kv_cache.transpose(1, 2)[..., HEAD_SIZE:])
    assert (given["scale"], given["softcap"], given["weight"]) == (0.25, 30.0, 0.5 / HEADS)
    assert given["enabled"] is None


def test_the_gate_of_a_graph_is_handed_on(calls):
    gate = torch.ones(1, dtype=torch.int32)
    forward(layer(logits_soft_cap=None), metadata(enabled=gate))
    assert calls[0][1]["enabled"] is gate and calls[0][1]["softcap"] == 0


@pytest.mark.parametrize(("tokens", "rows"), [(3, 5), (5, 3)])
def test_padding_of_tokens_or_rows_is_left_out(calls, tokens, rows):
    forward(layer(), metadata(tokens=tokens, rows=rows))
    given = calls[0][1]
    assert [len(given[name]) for name in ("query", "output", "block_table", "num_tokens")] == [3] * 4


@pytest.mark.parametrize(
    "change",
    [
        {"sliding_window": 8},
        {"alibi_slopes": [0.5] * HEADS},
        {"sinks": torch.zeros(HEADS)},
        {"kv_cache_dtype": "fp8"},
        {"attn_type": AttentionType.ENCODER_DECODER},
        {"chunk_lookback": 1},
    ],
    ids=lambda change: next(iter(change)),
)
def test_another_layer_takes_two_kernels(calls, change):
    forward(layer(**change), metadata())
    assert [name for name, _ in calls] == ["attention", "page mass"]


def test_another_step_or_output_takes_two_kernels(calls):
    forward(layer(), metadata(is_plain=False))
    forward(layer(), metadata(), torch.ones(1))
    forward(layer(), metadata(), None, torch.ones(1))
    assert [name for name, _ in calls] == 3 * ["attention", "page mass"]


def test_a_call_with_too_much_scratch_takes_two_kernels(calls, monkeypatch):
    needed = triton_attn.decode_scratch(
        num_rows=3,
        num_observed=1,
        num_heads=HEADS,
        num_kv_heads=KV_HEADS,
        head_size=HEAD_SIZE,
        max_pages=2,
        page_tokens=PAGE,
        element_bytes=8,
    )
    for most in (4 * needed, 4 * needed - 1):
        monkeypatch.setattr(triton_attn, "MAX_SCRATCH_BYTES", most)
        forward(layer(), metadata())
    assert [name for name, _ in calls] == ["one kernel", "attention", "page mass"]


def test_a_step_that_is_not_scored_is_vllm_s(calls):
    attn_metadata = metadata()
    attn_metadata.mass_request = None
    forward(layer(), attn_metadata)
    forward(layer(), None)
    assert [name for name, _ in calls] == ["attention", "attention"]


@pytest.mark.parametrize(
    ("fuses", "change", "expected"),
    [
        (True, {}, True),
        (False, {}, False),
        (True, {"max_query_len": 2}, False),
        (True, {"causal": False}, False),
        (True, {"causal": torch.tensor([True])}, False),
        (True, {"mm_prefix_range_tensor": torch.zeros(1)}, False),
        (True, {"rswa_window": 64}, False),
    ],
)
def test_a_plain_step(monkeypatch, fuses, change, expected):
    stock = SimpleNamespace(**PLAIN_STEP | change)
    monkeypatch.setattr(paged_gpu.PagedGPUBuilderMixin, "build", lambda self: stock, raising=False)
    builder = object.__new__(triton_attn.EvictionTritonMetadataBuilder)
    builder._fuses = fuses
    assert builder.build().is_plain_decode is expected


def test_a_page_too_large_is_refused_at_start():
    triton_attn._check_fused_page(128, 256)
    with pytest.raises(EvictionConfigError) as error:
        triton_attn._check_fused_page(256, 256)
    line = str(error.value)
    for words in ("--kv-eviction-score-kernel fused", "--block-size is 256", "--block-size 128 or less", "separate"):
        assert words in line
