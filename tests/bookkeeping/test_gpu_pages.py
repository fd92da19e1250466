"""Pages that the Triton kernels cannot score are refused at start-up, not in the first step that scores."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from tests.bookkeeping.harness import configured, make_spec
from vllm_evict.config import EvictionConfigError
from vllm_evict.engine.attention.paged_gpu import PagedGPUBuilderMixin
from vllm_evict.engine.rows import RowBuffers


@pytest.mark.parametrize("observes, reads, page_tokens, refused", [
    (True, False, 48, True),
    (False, True, 512, True),
    (True, True, 64, False),
    (False, False, 48, False),
])  # fmt: skip
def test_pages_that_cannot_be_scored(stock_config, observes, reads, page_tokens, refused):
    config = configured(stock_config, {"policy": "h2o", "budget": 16})
    builder = PagedGPUBuilderMixin()
    builder.kv_cache_spec = replace(make_spec(config), block_size=page_tokens)
    builder.device = torch.device("cpu")
    buffers = RowBuffers(2, 4, page_tokens, builder.device)
    runtime = SimpleNamespace(
        observes_attention=observes, reads_keys=reads, key_readers=[], buffers=buffers, decode_mass=None
    )
    if refused:
        with pytest.raises(EvictionConfigError, match=f"--block-size is {page_tokens}"):
            builder.bind(runtime, lambda batch: [])
    else:
        builder.bind(runtime, lambda batch: [])
        assert len(runtime.key_readers) == reads and (runtime.decode_mass is not None) == observes
