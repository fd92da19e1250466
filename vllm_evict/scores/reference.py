"""Page mass and key difference, written to be read: what the fast kernels must compute.

Page mass

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

Key difference
Of each KV head the *anchor* is the mean direction of the keys a request holds: the sum of k / |k| over
its resident tokens. A page's difference is minus the mean cosine between its keys and the anchor. Pages
whose keys point elsewhere are worth keeping: what the many similar keys say, the others of them say too.

Based on KeyDiff, "Key Similarity-Based KV Cache Eviction for Long-Context LLM Inference in
Resource-Constrained Environments" (arXiv 2504.15364).
Differs from the paper: mean over the tokens of a page and the KV heads of a layer; keys as they lie in
the cache, that is, rotated.

Example, one head, pages of 2 tokens, 3 keys (2, 0), (0, 5), (1, 0):
    directions    (1, 0)  (0, 1)  (1, 0)      anchor (2, 1), of length sqrt 5
    page 0        -(2 + 1) / (2 sqrt 5) = -0.671
    page 1        -2 / sqrt 5           = -0.894      more of the same: goes first
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


def key_difference_reference(
    *,
    key_cache: torch.Tensor,
    block_table: torch.Tensor,
    num_tokens: torch.Tensor,
    key_difference: torch.Tensor,
    weight: float = 1.0,
    compute_dtype: torch.dtype = torch.float32,
) -> None:
    """Add each resident page's key difference, summed over KV heads, to `key_difference`, in place.

    key_cache:      [num_blocks, num_kv_heads, block_size, head_size], row-major, *not* vLLM's packed layout
    block_table:    [num_rows, max_pages] block ids, compact: only resident pages, in logical order
    num_tokens:     [num_rows] resident tokens of each row
    key_difference: [num_rows, max_pages] accumulated; pages without a token stay as they are
    weight:         factor on the difference
    """
    block_size = key_cache.shape[2]
    for row, tokens in enumerate(num_tokens.tolist()):
        num_pages = -(-tokens // block_size)
        blocks = block_table[row, :num_pages].long()

        # [num_pages, kv heads, block_size, head_size] -> [kv heads, tokens, head_size], resident tokens only
        keys = key_cache[blocks].transpose(0, 1).flatten(1, 2)[:, :tokens].to(compute_dtype)
        direction = torch.nn.functional.normalize(keys, dim=-1, eps=torch.finfo(compute_dtype).tiny)
        anchor = torch.nn.functional.normalize(direction.sum(dim=1), dim=-1, eps=torch.finfo(compute_dtype).tiny)
        cosine = torch.einsum("htd,hd->t", direction, anchor)  # [tokens], summed over KV heads

        padded = torch.nn.functional.pad(cosine, (0, num_pages * block_size - tokens))
        in_page = (tokens - torch.arange(num_pages) * block_size).clamp(max=block_size)
        key_difference[row, :num_pages] -= weight * padded.view(num_pages, block_size).sum(dim=1) / in_page
