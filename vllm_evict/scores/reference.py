"""Page mass, written to be read: what the fast kernels must compute.

Every query spreads a probability of 1 over the tokens it may see (softmax of its attention logits),
once per query head. The *mass of a page* is how much of that lands on the page's tokens. Pages that
gather mass are the heavy hitters, worth keeping.

Based on H2O, "Heavy-Hitter Oracle for Efficient Generative Inference of Large Language Models"
(arXiv 2306.14048).
Differs from the paper: mass is summed over a whole page (vLLM block) and over the query heads of a
layer instead of being kept per token and head, because a page is what vLLM can free.

Example, one head, pages of 2 tokens, a query that sees 3 tokens with logits log 1, log 2, log 5:
    softmax           1/8  2/8  5/8
    page 0 (0, 1)     1/8 + 2/8 = 0.375
    page 1 (2, -)     5/8       = 0.625        the unwritten 4th slot is not looked at
"""

import torch


def page_mass_reference(
    *,
    query: torch.Tensor,
    key_cache: torch.Tensor,
    block_table: torch.Tensor,
    token: torch.Tensor,
    row: torch.Tensor,
    visible_tokens: torch.Tensor,
    page_mass: torch.Tensor,
    scale: float,
    weight: float = 1.0,
    softcap: float = 0.0,
    compute_dtype: torch.dtype = torch.float32,
) -> None:
    """Add each observed query's probability per page to `page_mass`, in place.

    query:          [num_tokens, num_heads, head_size]
    key_cache:      [num_blocks, num_kv_heads, block_size, head_size], row-major, *not* vLLM's packed layout
    block_table:    [num_rows, max_pages] block ids, compact: only resident pages, in logical order
    token:          [num_observed] which rows of `query` are observed
    row:            [num_observed] whose pages each of them reads (index into block_table)
    visible_tokens: [num_observed] how many resident tokens each may see; the rest is masked (causal)
    page_mass:      [num_observed, max_pages] accumulated; pages past the visible ones stay as they are
    scale:          factor on the logits, 1 / sqrt(head_size) as a rule
    weight:         factor on the mass
    softcap:        if not 0, logits become softcap * tanh(logits / softcap)
    """
    num_heads = query.shape[1]
    num_kv_heads, block_size = key_cache.shape[1], key_cache.shape[2]
    heads_per_kv_head = num_heads // num_kv_heads

    for i in range(len(token)):
        visible = int(visible_tokens[i])
        if visible == 0:
            continue
        num_pages = -(-visible // block_size)
        blocks = block_table[int(row[i]), :num_pages].long()

        # [num_pages, kv heads, block_size, head_size] -> [kv heads, tokens, head_size], visible tokens only
        keys = key_cache[blocks].transpose(0, 1).flatten(1, 2)[:, :visible].to(compute_dtype)
        # query head h reads KV head h // heads_per_kv_head
        keys = keys.repeat_interleave(heads_per_kv_head, dim=0)

        logits = torch.einsum("hd,htd->ht", query[int(token[i])].to(compute_dtype), keys) * scale
        if softcap:
            logits = softcap * torch.tanh(logits / softcap)
        probability = torch.softmax(logits, dim=-1)  # [heads, visible], each head sums to 1

        mass_per_token = probability.sum(dim=0)  # [visible], sums to num_heads
        padded = torch.nn.functional.pad(mass_per_token, (0, num_pages * block_size - visible))
        page_mass[i, :num_pages] += weight * padded.view(num_pages, block_size).sum(dim=1)
