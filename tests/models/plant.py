"""A Llama with hand-set weights: who attends to what is known before anything runs.

Token `HEAVY` draws most of the attention of every later token, at any distance; all other keys get
about the same. Token `SCREAM` writes values of norm 1000 into the cache: whoever can see one, even
faintly, is pulled towards saying `SCREAMED`. All other tokens are neutral, and the model never says
`HEAVY` or `SCREAM` itself.

How. The residual stream has 256 dims: dim 0 is a constant of every token, dim 1 marks HEAVY, dim 2
marks SCREAM, dims 3 to 127 carry what kind of token it is, dims 128 to 255 receive what attention
brings. The constant is so large that RMSNorm divides by nearly the same number whatever attention
adds, so layers do not disturb each other.

A query writes the constant, a key writes the HEAVY mark, both into dims 31 and 63 of the head: the
rotary pair of lowest frequency. At theta 1e6 that pair turns by 1.5e-6 radians a token, so over
4096 tokens its cosine is 1 to five digits. Dot product there: `pull`. A key without the mark scores
`noise`-sized random numbers, so pages do not tie. With c keys in sight the share of one HEAVY token
is about e^pull / (e^pull + c).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

HEAVY = 510
SCREAM = 511
SCREAMED = 509
NUM_NEUTRAL_TOKENS = 509
VOCAB_TOKENS = 512

_HIDDEN = 256
_HEAD_SIZE = 64
_CONSTANT_DIM, _HEAVY_DIM, _SCREAM_DIM = 0, 1, 2
_CONTENT = slice(3, 128)
_BROUGHT = slice(128, 256)
_SCREAM_OUT_DIM = 255
_SLOW_PAIR = _HEAD_SIZE // 2 - 1  # dims 31 and 63 of a head turn together, slowest of all
_FAST_DIMS = torch.tensor([d for d in range(_HEAD_SIZE) if d % (_HEAD_SIZE // 2) != _SLOW_PAIR])
_CONSTANT = 64.0  # four times the norm of a token's content
_MARK = 16.0
_RMS = math.sqrt((_CONSTANT**2 + 16**2) / _HIDDEN)  # of a neutral token's embedding
_SCREAM_NORM = 1000.0


def plant(
    path: Path,
    *,
    heads: Collection[int] | None = None,
    layers: Collection[int] | None = None,
    kv_heads: Collection[int] | None = None,
    head_order: Sequence[int] | None = None,
    num_kv_heads: int = 2,
    num_layers: int = 2,
    pull: float = 8.3,
    noise: float = 0.3,
    seed: int = 5,
) -> Path:
    """Save the model (4 query heads of size 64, 4096 positions) and return `path`.

    Args:
        path: folder to write.
        heads: query heads that look for HEAVY (default: all). The others attend to everything about
            equally.
        layers: layers in which they do (default: all).
        kv_heads: KV heads whose keys show HEAVY (default: all): only query heads of these groups
            can find it.
        head_order: a permutation of the KV heads; the groups, with everything they do, change
            places. The function computed stays the same.
        num_kv_heads: 4 makes it MHA, 1 MQA.
        num_layers: number of layers.
        pull: attention logit of HEAVY; 8.3 is a share of 0.89 among 500 keys, and of 0.5 among
            4000.
        noise: standard deviation of the attention logits of all other keys.
        seed: of the random parts.
    """
    num_heads = 4
    config = LlamaConfig(
        vocab_size=VOCAB_TOKENS,
        hidden_size=_HIDDEN,
        intermediate_size=64,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        head_dim=_HEAD_SIZE,
        max_position_embeddings=4096,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        rms_norm_eps=1e-6,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
        dtype="float32",
    )
    model = LlamaForCausalLM(config)
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.data.zero_()
    _embed(model, generator)
    for index, layer in enumerate(model.model.layers):
        layer.input_layernorm.weight.data.fill_(_RMS)  # undoes the division: dims keep their embedded size
        layer.post_attention_layernorm.weight.data.fill_(1.0)
        seeking = heads if layers is None or index in layers else ()
        _plant_attention(layer.self_attn, generator, seeking, kv_heads, num_kv_heads, pull, noise)
        if head_order is not None:
            _reorder(layer.self_attn, list(head_order), num_kv_heads)
    _read_out(model, generator)
    model.generation_config.eos_token_id = None
    model.save_pretrained(path)
    return Path(path)


def _random(generator: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=generator)


def _embed(model: LlamaForCausalLM, generator: torch.Generator) -> None:
    table = model.model.embed_tokens.weight.data  # [vocab, hidden]
    content = _random(generator, VOCAB_TOKENS, _CONTENT.stop - _CONTENT.start)
    table[:, _CONTENT] = 16.0 * content / content.norm(dim=1, keepdim=True)
    table[:, _CONSTANT_DIM] = _CONSTANT
    table[HEAVY, _HEAVY_DIM] = _MARK
    table[SCREAM, _SCREAM_DIM] = _MARK


def _plant_attention(
    attention: torch.nn.Module,
    generator: torch.Generator,
    heads: Collection[int] | None,
    kv_heads: Collection[int] | None,
    num_kv_heads: int,
    pull: float,
    noise: float,
) -> None:
    q = attention.q_proj.weight.data.view(-1, _HEAD_SIZE, _HIDDEN)  # [query heads, head size, hidden]
    k = attention.k_proj.weight.data.view(-1, _HEAD_SIZE, _HIDDEN)  # [KV heads, head size, hidden]
    v = attention.v_proj.weight.data.view(-1, _HEAD_SIZE, _HIDDEN)
    num_heads, content_dims = q.shape[0], _CONTENT.stop - _CONTENT.start

    # Content against content: each of 62 products has a variance of noise^2, after the division by
    # sqrt(head size).
    scale = math.sqrt(noise * 8 / math.sqrt(len(_FAST_DIMS))) / 16
    for w in (q, k):
        w[:, _FAST_DIMS, _CONTENT] = scale * _random(generator, w.shape[0], len(_FAST_DIMS), content_dims)

    # Constant against mark, in both dims of the slow pair; 8 is sqrt(head size).
    side = math.sqrt(pull * 8 / 2)
    for dim in (_SLOW_PAIR, _SLOW_PAIR + _HEAD_SIZE // 2):
        for head in range(num_heads) if heads is None else heads:
            q[head, dim, _CONSTANT_DIM] = side / _CONSTANT
        for head in range(num_kv_heads) if kv_heads is None else kv_heads:
            k[head, dim, _HEAVY_DIM] = side / _MARK

    # Values: content at norm 16 in dims 0 to 62, the scream alone in dim 63.
    v[:, :-1, _CONTENT] = _random(generator, num_kv_heads, _HEAD_SIZE - 1, content_dims) / math.sqrt(_HEAD_SIZE - 1)
    v[:, -1, _SCREAM_DIM] = _SCREAM_NORM / _MARK
    o = attention.o_proj.weight.data.view(_HIDDEN, num_heads, _HEAD_SIZE)
    brought_dims = _SCREAM_OUT_DIM - _BROUGHT.start
    o[_BROUGHT.start : _SCREAM_OUT_DIM, :, :-1] = _random(
        generator, brought_dims, num_heads, _HEAD_SIZE - 1
    ) / math.sqrt(brought_dims * num_heads)
    o[_SCREAM_OUT_DIM, :, -1] = 1.0 / num_heads


def _reorder(attention: torch.nn.Module, order: list[int], num_kv_heads: int) -> None:
    """KV head i of the result is KV head `order[i]` of before, with its query heads."""
    for projection in (attention.q_proj, attention.k_proj, attention.v_proj):
        weight = projection.weight.data
        weight.copy_(weight.view(num_kv_heads, -1, _HIDDEN)[order].reshape(weight.shape))
    weight = attention.o_proj.weight.data
    weight.copy_(weight.view(_HIDDEN, num_kv_heads, -1)[:, order].reshape(weight.shape))


def _read_out(model: LlamaForCausalLM, generator: torch.Generator) -> None:
    model.model.norm.weight.data.fill_(_RMS)
    head = model.lm_head.weight.data  # [vocab, hidden]
    head[:, _CONTENT] = _random(generator, VOCAB_TOKENS, _CONTENT.stop - _CONTENT.start) / 8
    head[:, _BROUGHT] = _random(generator, VOCAB_TOKENS, _BROUGHT.stop - _BROUGHT.start) / 4
    head[:, _SCREAM_OUT_DIM] = 0.0
    head[SCREAMED, :] = 0.0
    head[SCREAMED, _SCREAM_OUT_DIM] = 50.0
    head[[HEAVY, SCREAM], :] = 0.0
    head[[HEAVY, SCREAM], _CONSTANT_DIM] = -1.0
