"""The token-level reference: against counting by hand, a masked forward, and our own policies on one-token pages."""

from contextlib import nullcontext

import numpy as np
import pytest
import torch

from tests.models.tiny import MODELS, VOCAB_TOKENS
from tests.oracle.forward import load, masked_forward
from vllm_evict.pages import PageBudget, PageView
from vllm_evict.policies import get_policy
from vllm_evict.reference import EvictingCache, H2OCache, StreamingCache, kept_slots
from vllm_evict.reference.layer import EvictingLayer
from vllm_evict.reference.perplexity import token_losses
from vllm_evict.scores.aggregate import PageMass

TOLERANCE = 2e-5  # fp32 rounding of logits with a standard deviation of 3
BUDGET, SINKS, RECENT = 10, 2, 4

CACHES = {
    "h2o": lambda budget: H2OCache(budget, SINKS, RECENT),
    "h2o, one decision": lambda budget: H2OCache(budget, SINKS, RECENT, one_decision=True),
    "h2o, positions in the cache": lambda budget: H2OCache(budget, SINKS, RECENT, positions="cache"),
    "streaming": lambda budget: StreamingCache(SINKS, budget - SINKS),
    "streaming, original positions": lambda budget: StreamingCache(SINKS, budget - SINKS, positions="original"),
}
every_cache = pytest.mark.parametrize("make_cache", CACHES.values(), ids=CACHES)


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Tiny matrices gain nothing from two threads, which spin waiting for each other when cores are shared."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Tiny models by name, loaded once; `(name, 1)` is the model's first layer alone."""
    built = {}

    def get(name, num_layers=2):
        if (name, num_layers) not in built:
            model = load(MODELS[name](tmp_path_factory.mktemp(name)))
            model.model.layers = model.model.layers[:num_layers]
            model.config.num_hidden_layers = num_layers
            built[name, num_layers] = model
        return built[name, num_layers]

    return get


def random_tokens(*shape, seed=7):
    return torch.randint(0, VOCAB_TOKENS, shape, generator=torch.Generator().manual_seed(seed))


def attached(cache, model):
    return nullcontext() if cache is None else cache.attached_to(model)


def generate(model, prompts, cache=None, num_new_tokens=12, **settings):
    """The new tokens `[batch, num_new_tokens]` after prompts of any lengths, padded on the left."""
    length = max(len(prompt) for prompt in prompts)
    pads = torch.tensor([length - len(prompt) for prompt in prompts])
    tokens = torch.stack([torch.cat([prompt.new_zeros(length - len(prompt)), prompt]) for prompt in prompts])
    with attached(cache, model):
        output = model.generate(
            tokens,
            attention_mask=(torch.arange(length) >= pads[:, None]).long(),
            past_key_values=cache,
            max_new_tokens=num_new_tokens,
            do_sample=False,
            pad_token_id=0,
            **settings,
        )
    return output[:, length:]


@torch.inference_mode()
def step_by_step(model, tokens, cache, *, prompt_tokens):
    """Feed a prompt, then one token at a time.

    Returns logits `[num_tokens, vocab]`, and after each step the positions each layer holds,
    `[num_steps][num_layers]` of long `[num_kv_heads, num_slots]`.
    """
    logits, held = [], []
    with cache.attached_to(model):
        for chunk in (tokens[:prompt_tokens], *tokens[prompt_tokens:].split(1)):
            logits.append(model(chunk[None], past_key_values=cache).logits[0])
            held.append([layer.positions[0] for layer in cache.layers])
    return torch.cat(logits), held


# ---- the rule, by hand ----

PAD = -1


@pytest.mark.parametrize(
    ("positions", "worth", "budget", "sinks", "recent", "expected"),
    [
        ([0, 1, 2, 3, 4], [0.1, 0.6, 0.2, 0.5, 0.3], 4, 1, 2, [0, 1, 3, 4]),  # the docstring's example
        ([0, 1, 2, 3, 4], [0.1, 0.6, 0.2, 0.5, 0.3], 5, 1, 2, [0, 1, 2, 3, 4]),
        ([0, 1, 2], [0.1, 0.6, 0.2], 5, 1, 2, [0, 1, 2]),  # below the budget
        ([0, 1, 2, 3, 4], [0.1, 0.6, 0.2, 0.5, 0.3], 3, 0, 1, [1, 3, 4]),  # no sink: the first may go
        ([0, 1, 2, 3, 4], [9, 9, 9, 9, 9], 3, 0, 1, [2, 3, 4]),  # among equals the older goes
        ([0, 3, 7, 8, 9], [0, 1, 0, 0, 0], 4, 1, 2, [0, 1, 3, 4]),  # gaps: recent are 8 and 9
        ([PAD, PAD, 0, 1, 2], [9, 9, 1, 2, 3], 4, 1, 1, [1, 2, 3, 4]),  # padding first, whatever its worth
        ([PAD, PAD, 0, 1, 2], [9, 9, 1, 2, 3], 2, 1, 1, [2, 4]),  # a sink counts from the first real token
        ([0, 1, PAD, 2, 3], [1, 2, 9, 1, 3], 3, 1, 1, [0, 1, 4]),  # padding in the middle
        ([PAD, PAD, PAD], [0, 0, 0], 2, 1, 1, [1, 2]),
    ],
)
def test_kept_slots(positions, worth, budget, sinks, recent, expected):
    kept = kept_slots(
        positions=torch.tensor(positions),
        worth=torch.tensor(worth, dtype=torch.double),
        max_budget=budget,
        sink_size=sinks,
        recent_size=recent,
    )
    assert kept.tolist() == expected


# ---- H2O on attention matrices, by hand ----


def feed(cache, layer_idx, weights, real=None):
    """One step of one layer with the given attention, `[batch, heads, queries, slots]`."""
    weights = torch.tensor(weights)
    batch, _, num_queries, _ = weights.shape
    real = torch.ones(batch, num_queries, dtype=torch.bool) if real is None else torch.tensor(real)
    cache.begin(layer_idx, real)
    new = torch.zeros(batch, cache.layers[layer_idx].num_kv_heads, num_queries, 8)
    cache.update(new, new, layer_idx)
    cache.end(layer_idx, weights)
    return cache.layers[layer_idx].positions.tolist()


def with_layers(cache, num_layers, num_kv_heads):
    cache.layers.extend(EvictingLayer(num_kv_heads) for _ in range(num_layers))
    return cache


PREFILL = [
    [1.0, 0.0, 0.0, 0.0],
    [0.5, 0.5, 0.0, 0.0],
    [0.1, 0.6, 0.3, 0.0],
    [0.2, 0.1, 0.3, 0.4],
]  # sums   1.8  1.2  0.6  0.4


def prefill(*last_row):
    """A prompt whose last query alone looks around."""
    return [[0.0] * len(last_row)] * (len(last_row) - 1) + [list(last_row)]


def test_h2o_by_hand():
    cache = with_layers(H2OCache(3), num_layers=1, num_kv_heads=1)
    # Of 0, 1, 2 (3 is recent) the smallest sum is 2's.
    assert feed(cache, 0, [[PREFILL]]) == [[[0, 1, 3]]]
    # Sums over the slots of tokens 0, 1, 3, 4: 1.8, 1.3, 1.2, .1; 4 is recent, so 3 goes although it was loved last.
    assert feed(cache, 0, [[[[0.0, 0.1, 0.8, 0.1]]]]) == [[[0, 1, 4]]]
    torch.testing.assert_close(cache.layers[0].scores, torch.tensor([[[1.8, 1.3, 0.1]]], dtype=torch.double))


def test_h2o_step_by_step_by_hand():
    cache = with_layers(H2OCache(3), num_layers=1, num_kv_heads=1)
    held = [feed(cache, 0, [[[row[: i + 1]]]]) for i, row in enumerate(PREFILL)]
    assert held == [[[[0]]], [[[0, 1]]], [[[0, 1, 2]]], [[[0, 1, 3]]]]


def test_h2o_sinks_by_hand():
    cache = with_layers(H2OCache(3, sink_size=1, recent_size=2), num_layers=1, num_kv_heads=1)
    assert feed(cache, 0, [[prefill(0.0, 0.9, 0.05, 0.05)]]) == [[[0, 2, 3]]]  # token 1 is the only one that may go


def test_query_heads_of_a_kv_head_vote_together():
    # Four query heads, two KV heads. KV head 0 hears [.5 .4 0 .1] and [.1 .7 .1 .1]: sums .6 1.1 .1 -> 2 goes.
    # KV head 1 hears [.1 .1 .7 .1] twice, but for .05 between tokens 0 and 1                         -> 0 goes.
    weights = [[0.5, 0.4, 0.0, 0.1], [0.1, 0.7, 0.1, 0.1], [0.1, 0.1, 0.7, 0.1], [0.05, 0.15, 0.7, 0.1]]
    step = [[prefill(*row) for row in weights]]
    cache = with_layers(H2OCache(3), num_layers=1, num_kv_heads=2)
    assert feed(cache, 0, step) == [[[0, 1, 3], [1, 2, 3]]]
    # All heads together: .75 1.35 1.5 -> 0 goes everywhere.
    cache = with_layers(H2OCache(3, one_decision=True), num_layers=1, num_kv_heads=2)
    assert feed(cache, 0, step) == [[[1, 2, 3], [1, 2, 3]]]


def test_one_decision_waits_for_the_last_layer():
    cache = with_layers(H2OCache(3, one_decision=True), num_layers=2, num_kv_heads=1)
    first, second = [[prefill(0.1, 0.4, 0.4, 0.1)]], [[prefill(0.6, 0.0, 0.3, 0.1)]]  # together .7 .4 .7 -> 1 goes
    assert feed(cache, 0, first) == [[[0, 1, 2, 3]]]
    assert feed(cache, 1, second) == [[[0, 2, 3]]] == cache.layers[0].positions.tolist()
    # Alone: layer 0 drops token 0, layer 1 drops token 1.
    cache = with_layers(H2OCache(3), num_layers=2, num_kv_heads=1)
    assert (feed(cache, 0, first), feed(cache, 1, second)) == ([[[1, 2, 3]]], [[[0, 2, 3]]])


def test_padding_gets_no_vote():
    # Row 1 starts with two pads, whose garbage attention would have saved token 0 (slot 2).
    weights = [[PREFILL], [[[0.0, 0.0, 9.0, 0.0], [0.0, 0.0, 9.0, 0.0], [0.0, 0.0, 1.0, 0.0], [0.0, 0.0, 0.3, 0.7]]]]
    cache = with_layers(H2OCache(3), num_layers=1, num_kv_heads=1)
    assert feed(cache, 0, weights, [[True] * 4, [False, False, True, True]]) == [[[0, 1, 3]], [[PAD, 0, 1]]]
    torch.testing.assert_close(cache.layers[0].scores[1, 0, 1:], torch.tensor([1.3, 0.7], dtype=torch.double))
    # Row 1 has one token to go before its budget is full; row 0 evicts at once.
    step = [[[[0.5, 0.1, 0.2, 0.2]]], [[[0.0, 0.1, 0.2, 0.7]]]]
    assert feed(cache, 0, step) == [[[0, 1, 4]], [[0, 1, 2]]]


def test_streaming_by_hand():
    cache = with_layers(StreamingCache(1, 2, positions="original"), num_layers=1, num_kv_heads=1)
    held = [feed(cache, 0, [[[[1.0] * min(i + 1, 4)]]]) for i in range(6)]
    assert held == [[[[0]]], [[[0, 1]]], [[[0, 1, 2]]], [[[0, 2, 3]]], [[[0, 3, 4]]], [[[0, 4, 5]]]]


# ---- the same choice as our policies with pages of one token ----


@pytest.mark.parametrize("prompt_tokens", [1, 16])
@pytest.mark.parametrize("name", ["tiny", "tiny-mha", "tiny-mqa"])
@pytest.mark.parametrize("policy", ["h2o", "streaming"])
def test_page_size_one_chooses_the_same_tokens(models, policy, name, prompt_tokens):
    if policy == "h2o":
        cache = H2OCache(BUDGET, SINKS, RECENT, one_decision=True)
    else:
        cache = StreamingCache(SINKS, BUDGET - SINKS, positions="original")
    prompt, num_new_tokens = random_tokens(prompt_tokens), 32
    model = models(name)
    held = []
    with cache.attached_to(model):
        hook = model.register_forward_hook(lambda *_: held.append([h.positions[0].clone() for h in cache.layers]))
        output = model.generate(
            prompt[None],
            past_key_values=cache,
            max_new_tokens=num_new_tokens,
            do_sample=False,
            output_attentions=True,
            return_dict_in_generate=True,
        )
        hook.remove()

    budget = PageBudget(page_tokens=1, budget_pages=BUDGET, sink_pages=SINKS, recent_pages=RECENT)
    mass = PageMass(kind="sum", page_tokens=1, distant_tokens=1)
    pages, num_tokens, num_evicted = np.zeros(0, dtype=np.int32), 0, 0
    for attention, positions in zip(output.attentions, held, strict=True):
        # [num_layers, num_heads, num_queries, num_slots] -> [num_queries, num_slots]
        weights = torch.stack([layer[0] for layer in attention]).mean(dim=(0, 1)).numpy()
        queries = np.arange(num_tokens, num_tokens + len(weights), dtype=np.int32)
        num_tokens += len(queries)
        pages = np.concatenate([pages, queries])
        mass.append(len(queries))
        mass.observe(pages, queries, weights)
        view = PageView(pages, num_tokens, num_tokens, {"attention": mass.scores(pages, num_tokens)})
        plan = get_policy(policy).plan(view, budget)
        kept = ~np.isin(pages, plan.pages)
        pages = pages[kept]
        mass.keep(kept)
        num_evicted += len(plan.pages)
        for layer in positions:
            assert layer.tolist() == [pages.tolist()] * len(layer)
    assert num_evicted == prompt_tokens + num_new_tokens - 1 - BUDGET
    if policy == "h2o":  # it chose, not just the newest
        assert pages.tolist() != [*range(SINKS), *range(num_tokens - BUDGET + SINKS, num_tokens)]


# ---- the logits: attention over what is held, and nothing else ----


def visible(held, num_tokens, prompt_tokens):
    """Bool `[num_kv_heads, query, key]`: a prompt is causal, a later token sees what was held before it, and itself."""
    mask = torch.ones(num_tokens, num_tokens, dtype=torch.bool).tril().repeat(len(held[0]), 1, 1)
    for query, positions in enumerate(held[:-1], start=prompt_tokens):
        mask[:, query] = torch.zeros_like(mask[:, query]).scatter(1, positions, True)
        mask[:, query, query] = True
    return mask


@pytest.mark.parametrize("name", ["tiny", "tiny-mha", "tiny-mqa", "tiny-partial-rotary"])
@pytest.mark.parametrize("kind", ["h2o, one decision", "streaming, original positions"])
def test_logits_are_those_of_a_masked_forward(models, name, kind):
    model, tokens, prompt_tokens = models(name), random_tokens(40), 16
    logits, held = step_by_step(model, tokens, CACHES[kind](BUDGET), prompt_tokens=prompt_tokens)
    mask = visible([layers[0] for layers in held], len(tokens), prompt_tokens)[0]
    expected, _ = masked_forward(model, tokens.tolist(), mask, attentions=False)
    torch.testing.assert_close(logits, expected, atol=TOLERANCE, rtol=0)


@torch.inference_mode()
def test_logits_with_a_choice_per_head(models):
    """One layer, so that one mask `[1, num_heads, query, key]` can say what every head holds."""
    model, tokens, prompt_tokens = models("tiny", 1), random_tokens(40), 16
    logits, held = step_by_step(model, tokens, H2OCache(BUDGET, SINKS, RECENT), prompt_tokens=prompt_tokens)
    assert any(not torch.equal(*layers[0]) for layers in held)  # the heads disagree
    mask = visible([layers[0] for layers in held], len(tokens), prompt_tokens).repeat_interleave(2, dim=0)[None]
    additive = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)
    expected = model(tokens[None], attention_mask=additive, use_cache=False).logits[0]
    torch.testing.assert_close(logits, expected, atol=TOLERANCE, rtol=0)


@torch.inference_mode()
@pytest.mark.parametrize("name", ["tiny", "tiny-partial-rotary"])
@pytest.mark.parametrize("positions", ["cache", "original"])
@pytest.mark.parametrize("method", ["h2o", "streaming"])
def test_positions(models, name, positions, method):
    """In one layer keys depend on nothing but token and position: a fresh forward over what is held must agree."""
    model, tokens = models(name, 1), random_tokens(40)
    if method == "h2o":
        cache = H2OCache(BUDGET, SINKS, RECENT, one_decision=True, positions=positions)
    else:
        cache = StreamingCache(SINKS, BUDGET - SINKS, positions=positions)
    logits, held = step_by_step(model, tokens, cache, prompt_tokens=16)
    for query, layers in enumerate(held[:-1], start=16):
        seen = torch.cat([layers[0][0], torch.tensor([query])])
        places = torch.arange(len(seen)) if positions == "cache" else seen
        # With a padding mask transformers does not take gaps between positions for the ends of packed texts.
        inputs = {"input_ids": tokens[seen], "position_ids": places, "attention_mask": torch.ones_like(seen)}
        expected = model(**{key: row[None] for key, row in inputs.items()}, use_cache=False).logits[0, -1]
        torch.testing.assert_close(logits[query], expected, atol=TOLERANCE, rtol=0)


# ---- model.generate ----


@every_cache
def test_below_the_budget_nothing_changes(models, make_cache):
    model, prompts = models("tiny"), [random_tokens(20), random_tokens(9, seed=1)]
    assert torch.equal(generate(model, prompts, make_cache(32)), generate(model, prompts))


@every_cache
@pytest.mark.parametrize("name", ["tiny", "tiny-partial-rotary"])
def test_a_batch_is_its_rows(models, name, make_cache):
    """Rows of one batch: over the budget, with padding at the budget, and below it until the middle of the answer."""
    model, prompts = models(name), [random_tokens(20), random_tokens(BUDGET, seed=1), random_tokens(5, seed=2)]
    cache = make_cache(BUDGET)
    together = generate(model, prompts, cache)
    assert all(layer.keys.shape[2] == BUDGET for layer in cache.layers)
    assert cache.get_seq_length() == 20 + 12 - 1
    for row, prompt in enumerate(prompts):
        alone = make_cache(BUDGET)
        assert torch.equal(generate(model, [prompt], alone)[0], together[row])
        for layer, lone_layer in zip(cache.layers, alone.layers, strict=True):
            assert torch.equal(layer.positions[row], lone_layer.positions[0])
    assert not torch.equal(together, generate(model, prompts))  # it did evict


@torch.inference_mode()
@pytest.mark.parametrize("budget", [BUDGET, 24])
@every_cache
def test_padding_between_turns(models, make_cache, budget):
    """The second turn of a batch is padded too: row 1 is `........ttttttttttt...ttt` and then goes on."""
    model = models("tiny")
    turns = [[random_tokens(20), random_tokens(11, seed=1)], [random_tokens(6), random_tokens(3, seed=2)]]
    turns += [[token, token + 1] for token in random_tokens(8, seed=3).clamp(max=VOCAB_TOKENS - 2).split(1)]
    cache, alone, mask = make_cache(budget), make_cache(budget), torch.zeros(2, 0, dtype=torch.long)
    with cache.attached_to(model), alone.attached_to(model):
        for rows in turns:
            pads = torch.tensor([len(rows[0]) - len(row) for row in rows])
            tokens = torch.stack([torch.cat([row.new_zeros(pad), row]) for row, pad in zip(rows, pads, strict=True)])
            mask = torch.cat([mask, (torch.arange(len(rows[0])) >= pads[:, None]).long()], dim=1)
            positions = (mask.cumsum(dim=1) - 1).clamp(min=0)[:, -len(rows[0]) :]
            logits = model(tokens, attention_mask=mask, position_ids=positions, past_key_values=cache).logits
            expected = model(rows[1][None], past_key_values=alone).logits[0]
            torch.testing.assert_close(logits[1, pads[1] :], expected, atol=TOLERANCE, rtol=0)


@torch.inference_mode()
@every_cache
def test_rows_may_move(models, make_cache):
    """Beam search reorders, repeats and selects rows; what is known about their tokens must go along."""
    model, turns = models("tiny"), [random_tokens(2, num_tokens, seed=num_tokens) for num_tokens in (16, 4, 1)]
    moves = [lambda cache, rows: cache.reorder_cache(rows), lambda cache, rows: cache.batch_select_indices(rows)]
    moves += [lambda cache, rows: (cache.batch_repeat_interleave(2), cache.batch_select_indices(2 * rows + 1))]
    swapped = torch.tensor([1, 0])
    for move in moves:
        cache, expected = make_cache(BUDGET), make_cache(BUDGET)
        with cache.attached_to(model), expected.attached_to(model):
            for turn, tokens in enumerate(turns):
                if turn == 1:
                    move(cache, swapped)
                logits = model(tokens[swapped] if turn else tokens, past_key_values=cache).logits
                expected_logits = model(tokens, past_key_values=expected).logits
            torch.testing.assert_close(logits, expected_logits[swapped], atol=TOLERANCE, rtol=0)
            assert torch.equal(cache.layers[1].positions, expected.layers[1].positions[swapped])


@pytest.mark.parametrize("kind", ["h2o", "streaming"])
def test_settings_of_generate(models, kind):
    """Reset, a prompt in chunks, beams, a second turn."""
    make_cache = CACHES[kind]
    model, prompts = models("tiny"), [random_tokens(20), random_tokens(9, seed=1)]
    cache = make_cache(BUDGET)
    first = generate(model, prompts, cache)
    cache.reset()
    assert torch.equal(generate(model, prompts, cache), first)

    large = make_cache(64)
    assert torch.equal(generate(model, prompts, large, prefill_chunk_size=6), generate(model, prompts))
    assert generate(model, prompts, make_cache(BUDGET), prefill_chunk_size=6).shape == (2, 12)
    beams = generate(model, prompts, make_cache(64), num_beams=3)
    assert torch.equal(beams, generate(model, prompts, num_beams=3))
    assert generate(model, prompts, make_cache(BUDGET), num_beams=3).shape == (2, 12)

    # The second turn gets the whole text and finds the first turn in the cache.
    cache = make_cache(64)
    text = torch.cat([prompts[0], generate(model, prompts[:1], cache)[0], random_tokens(5, seed=3)])
    assert torch.equal(generate(model, [text], cache), generate(model, [text]))


def num_hooks(model):
    """The caches' own; transformers keeps some too."""
    hooks = [hook for m in model.modules() for hook in (*m._forward_pre_hooks.values(), *m._forward_hooks.values())]
    return sum(isinstance(getattr(hook, "__self__", None), EvictingCache) for hook in hooks)


def test_only_calls_with_the_cache_are_touched(models):
    model, prompts = models("tiny"), [random_tokens(20)]
    plain = generate(model, prompts)
    one, other = CACHES["h2o"](BUDGET), CACHES["streaming"](BUDGET)
    with one.attached_to(model), other.attached_to(model):
        model(prompts[0][None], past_key_values=one)
        assert torch.equal(generate(model, prompts), plain)
        assert other.get_seq_length() == 0 and one.get_seq_length() == 20
        assert num_hooks(model) == 2 * 2 * len(one.layers)
    assert num_hooks(model) == 0


# ---- refused ----


@pytest.mark.parametrize("implementation", ["sdpa", "flash_attention_2"])
@every_cache
def test_other_attention_is_refused(models, make_cache, implementation, monkeypatch):
    model = models("tiny")
    monkeypatch.setattr(model.config, "_attn_implementation", implementation)
    with pytest.raises(ValueError, match=rf"'{implementation}' computes no attention weights.*'eager'"):
        generate(model, [random_tokens(20)], make_cache(BUDGET))


def test_other_attention_is_refused_after_attaching(models, monkeypatch):
    model = models("tiny")
    with CACHES["h2o"](BUDGET).attached_to(model) as cache:
        monkeypatch.setattr(model.config, "_attn_implementation", "sdpa")
        with pytest.raises(ValueError, match="computes no attention weights"):
            model(random_tokens(1, 4), past_key_values=cache)


@every_cache
def test_a_cache_that_sees_no_attention_is_refused(models, make_cache):
    cache = make_cache(BUDGET)
    with pytest.raises(ValueError, match="attached_to"):
        models("tiny").generate(random_tokens(1, 4), past_key_values=cache, max_new_tokens=2)
    with cache.attached_to(models("tiny-mha")), pytest.raises(ValueError, match="attached_to"):
        models("tiny").generate(random_tokens(1, 4), past_key_values=cache, max_new_tokens=2)


def test_attached_twice_is_refused(models):
    with CACHES["h2o"](BUDGET).attached_to(models("tiny")) as cache:  # noqa: SIM117
        with pytest.raises(ValueError, match="attached already"), cache.attached_to(models("tiny")):
            pass


def test_sliding_layers_are_refused(models):
    with pytest.raises(ValueError, match="sliding window"), CACHES["h2o"](BUDGET).attached_to(models("tiny-swa", 4)):
        pass


def test_rolling_back_is_refused(models):
    model = models("tiny")
    with pytest.raises(ValueError, match="rolled back"):
        generate(model, [random_tokens(20)], CACHES["h2o"](BUDGET), prompt_lookup_num_tokens=3)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: H2OCache(8, 4, 5), "max_budget 8 .* at least 9"),
        (lambda: H2OCache(8, 4, 0), "at least 1"),
        (lambda: H2OCache(8, -1, 4), "at least 0"),
        (lambda: StreamingCache(4, 0), "at least 1"),
        (lambda: StreamingCache(4, 8, positions="absolute"), "'absolute'.*'cache' or 'original'"),
    ],
)
def test_wrong_sizes_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_positions_in_the_cache_need_fixed_frequencies(models, monkeypatch):
    model = models("tiny")
    monkeypatch.setattr(model.model.rotary_emb, "rope_type", "dynamic")
    with pytest.raises(ValueError, match=r"dynamic.*original"), StreamingCache(1, 4).attached_to(model):
        pass


# ---- perplexity ----


@torch.inference_mode()
def test_losses_do_not_depend_on_chunks(models):
    model, tokens = models("tiny"), random_tokens(50)
    expected = torch.nn.functional.cross_entropy(model(tokens[None]).logits[0, :-1], tokens[1:], reduction="none")
    losses = token_losses(model, tokens, CACHES["h2o"](64), chunk_tokens=7)
    torch.testing.assert_close(losses, expected, atol=TOLERANCE, rtol=0)
