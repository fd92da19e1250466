"""What a step uploads for its rows."""

import numpy as np
import torch

from vllm_evict.engine import rows
from vllm_evict.engine.resident import ResidentRequest

P = 4


def request(life: int, num_pages: int) -> ResidentRequest:
    empty = np.empty(0, dtype=np.int32)
    seen = ResidentRequest(life, 0, empty, empty, 0, num_computed_tokens=num_pages * P)
    seen.append(range(1, num_pages + 1))
    return seen


def test_an_upload_is_as_long_as_what_is_resident(monkeypatch):
    """Not as the longest request that there may be: a stream's limit is millions of tokens."""
    uploaded = []

    def to_device(array, device):
        uploaded.append(array.size)
        return torch.from_numpy(array)

    monkeypatch.setattr(rows, "to_device", to_device)
    buffers = rows.RowBuffers(2, 100_000, P, torch.device("cpu"))
    a, b = request(0, 9), request(1, 3)
    buffers.fill([a, b], 2)
    assert max(uploaded) == 2 * 9
    # What a longer one has left behind is overwritten, by itself and by the next in its slot.
    a.punch(range(1, 8))
    table = buffers.fill([a, b], 2).block_table
    assert table[0].nonzero().flatten().tolist() == [0, 1] and table[0, :2].tolist() == [1, 9]
    buffers.end([1])
    table = buffers.fill([a, request(2, 1)], 2).block_table
    assert table[1].nonzero().flatten().tolist() == [0]
    assert max(uploaded) == 2 * 9
