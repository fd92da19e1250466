"""The oracle and the planted model, against counting by hand or computing by another road."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache

from tests.models.plant import HEAVY, NUM_NEUTRAL_TOKENS, SCREAM, SCREAMED, plant
from tests.models.tiny import MODELS, VOCAB_TOKENS, tiny
from tests.oracle.forward import greedy_reference, load, masked_forward, window_mask
from tests.oracle.mass import accumulated_mass, distant_mean, ema_mass, mean_mass, page_mass
from tests.oracle.trace import evictions_of, read_trace
from tests.oracle.visibility import Eviction, visibility_mask

PAGE_TOKENS = 8
TOLERANCE = 2e-5  # fp32 rounding of logits with a standard deviation of 3


def random_tokens(num_tokens, *, below=VOCAB_TOKENS, seed=7):
    return torch.randint(0, below, (num_tokens,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Tiny matrices gain nothing from two threads, which spin waiting for each other when cores are shared."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def planted(tmp_path_factory):
    return load(plant(tmp_path_factory.mktemp("plant")))


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Every tiny model by name, loaded once."""
    built = {}

    def get(name):
        if name not in built:
            built[name] = load(MODELS[name](tmp_path_factory.mktemp(name)))
        return built[name]

    return get


# ---- visibility ----


def drawn(*rows):
    return torch.tensor([[cell == "x" for cell in row if cell != " "] for row in rows])


@pytest.mark.parametrize(
    ("evictions", "expected"),
    [
        ((), ["x.....", "xx....", "xxx...", "xxxx..", "xxxxx.", "xxxxxx"]),
        (
            (Eviction(4, (1,)),),
            ["x. .. ..", "xx .. ..", "xx x. ..", "xx xx ..", "xx .. x.", "xx .. xx"],
        ),
        (  # two at different times: the first page goes while the second is still half computed
            (Eviction(3, (0,)), Eviction(5, (1,))),
            ["x. .. ..", "xx .. ..", "xx x. ..", ".. xx ..", ".. xx x.", ".. .. xx"],
        ),
        (  # two at once
            (Eviction(4, (0, 1)),),
            ["x. .. ..", "xx .. ..", "xx x. ..", "xx xx ..", ".. .. x.", ".. .. xx"],
        ),
        (
            (Eviction(6, (0,)),),
            ["x.....", "xx....", "xxx...", "xxxx..", "xxxxx.", "xxxxxx"],
        ),  # after the last token
    ],
)
def test_visibility_mask_as_drawn(evictions, expected):
    assert visibility_mask(6, 2, evictions).equal(drawn(*expected))


def test_last_page_may_be_partial():
    assert visibility_mask(5, 2, [Eviction(4, (0,))]).equal(
        drawn("x. .. .", "xx .. .", "xx x. .", "xx xx .", ".. xx x"),
    )


@pytest.mark.parametrize(
    ("evictions", "message"),
    [
        ([Eviction(2, (0,)), Eviction(4, (0,))], "page 0 is evicted twice"),
        ([Eviction(3, (1,))], "page 1 holds tokens 2 to 3, but is evicted when only 3"),
        ([Eviction(3, (-1,))], "page -1"),
    ],
)
def test_impossible_schedule_is_refused(evictions, message):
    with pytest.raises(ValueError, match=message):
        visibility_mask(6, 2, evictions)


# ---- trace ----


def write_trace(path, *lines):
    keys = ("request", "epoch", "num_computed_tokens", "pages", "resident", "scores", "reason")
    records = [dict(zip(keys, line, strict=True)) for line in lines]
    for record in records:
        record["scores"] = {} if record["scores"] is None else {"attention": record["scores"]}
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def test_trace_is_split_by_request_and_epoch(tmp_path):
    path = write_trace(
        tmp_path / "trace.jsonl",
        ("a", 0, 64, [1], [0, 1, 2], [0.5, 0.1, 0.4], "budget"),
        ("b", 0, 32, [0], [0], None, "pressure"),
        ("a", 0, 96, [2], [0, 2, 3], [0.6, 0.2, 0.3], "budget"),
        ("a", 1, 64, [2, 1], [0, 1, 2], [0.5, 0.1, 0.4], "budget"),
    )
    trace = read_trace(path)
    assert {request: len(lines) for request, lines in trace.items()} == {"a": 3, "b": 1}
    assert trace["a"][1].score_of() == {0: 0.6, 2: 0.2, 3: 0.3}
    assert trace["b"][0].scores == {}
    assert evictions_of(trace["a"]) == (Eviction(64, (1,)), Eviction(96, (2,)))
    assert evictions_of(trace["a"], epoch=1) == (Eviction(64, (2, 1)),)
    assert read_trace(path, "b") == {"b": trace["b"]}
    assert read_trace(path, "absent") == {"absent": []}


def test_trace_score_of_an_unscored_page_is_nan(tmp_path):
    path = write_trace(
        tmp_path / "trace.jsonl",
        ("a", 0, 64, [0], [0, 1], [None, 0.1], "budget"),
        ("b", 0, 64, [0], [0, 1], [NAN, 0.1], "budget"),
    )
    for (line,) in read_trace(path).values():
        assert line.score_of() == pytest.approx({0: NAN, 1: 0.1}, nan_ok=True)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([("a", 0, 64, [1], [0, 1], [0.5], "r")], "1 scores of attention for 2 resident"),
        ([("a", 0, 64, [2], [0, 1], None, "r")], "not among the resident"),
        ([("a", 0, 64, [], [0, 1], None, "r")], "not among the resident"),
        ([("a", 0, 64, [1], [1, 0], None, "r")], "not ascending"),
        (
            [("a", 0, 64, [0], [0, 1], None, "r"), ("a", 0, 63, [1], [1], None, "r")],
            "time runs backwards",
        ),
        (
            [("a", 0, 64, [0], [0, 1], None, "r"), ("a", 0, 96, [1], [0, 1], None, "r")],
            "resident again",
        ),
        (
            [  # not the line just before, but an earlier one
                ("a", 0, 64, [0], [0, 1, 2], None, "r"),
                ("a", 0, 80, [1], [1, 2], None, "r"),
                ("a", 0, 96, [2], [0, 2], None, "r"),
            ],
            "resident again",
        ),
    ],
)
def test_broken_trace_is_refused(tmp_path, lines, message):
    with pytest.raises(ValueError, match=message):
        read_trace(write_trace(tmp_path / "trace.jsonl", *lines))


# ---- forward ----


@pytest.mark.parametrize("name", MODELS)
def test_without_evictions_it_is_the_plain_forward(models, name):
    model, tokens = models(name), random_tokens(100)
    logits, attentions = masked_forward(model, tokens, visibility_mask(100, PAGE_TOKENS, ()))
    with torch.inference_mode():
        plain = model(torch.tensor([tokens]), output_attentions=True)
    torch.testing.assert_close(logits, plain.logits[0], atol=TOLERANCE, rtol=0)
    kinds = getattr(model.config, "layer_types", ["full_attention"] * len(plain.attentions))
    full = [weights[0] for kind, weights in zip(kinds, plain.attentions, strict=True) if kind == "full_attention"]
    assert len(attentions) == len(full) == 2
    for ours, theirs in zip(attentions, full, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=0)


def cut_cache_logits(model, tokens, page_tokens, evictions, *, step_tokens):
    """The other road: evicted rows are really removed from a Hugging Face cache, which then goes on
    at given positions.

    No mask is passed; each step is at most `step_tokens` long and ends where an eviction happens.
    """
    cache, resident, rows, start = DynamicCache(config=model.config), [], [], 0
    due = {eviction.num_computed_tokens: eviction.pages for eviction in evictions}
    while start < len(tokens):
        pages = due.get(start, ())
        keep = [row for row, token in enumerate(resident) if token // page_tokens not in pages]
        resident = [resident[row] for row in keep]
        for layer in cache.layers:
            if layer.is_initialized and not layer.is_sliding:
                layer.keys, layer.values = layer.keys[:, :, keep], layer.values[:, :, keep]
        end = min([start + step_tokens, len(tokens), *(at for at in due if at > start)])
        output = model(
            torch.tensor([tokens[start:end]]),
            position_ids=torch.arange(start, end)[None],
            past_key_values=cache,
            use_cache=True,
        )
        rows.append(output.logits[0])
        resident += range(start, end)
        start = end
    return torch.cat(rows)


SCHEDULE = (Eviction(35, (1,)), Eviction(61, (3, 0)), Eviction(80, (9,)))


@pytest.mark.parametrize(
    ("name", "step_tokens"),
    # A Hugging Face cache with sliding layers cannot take a chunk after a cut.
    [("tiny", 1), ("tiny-swa", 1)] + [(name, 100) for name in MODELS if name != "tiny-swa"],
)
@torch.inference_mode()
def test_hiding_a_page_is_removing_its_rows(models, name, step_tokens):
    model, tokens = models(name), random_tokens(100)
    logits, _ = masked_forward(model, tokens, visibility_mask(100, PAGE_TOKENS, SCHEDULE))
    removed = cut_cache_logits(model, tokens, PAGE_TOKENS, SCHEDULE, step_tokens=step_tokens)
    torch.testing.assert_close(logits, removed, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("name", MODELS)
def test_a_wrong_schedule_shows_in_the_logits(models, name):
    """The models are worth testing with: one page or one query off is a thousand tolerances away."""
    model, tokens = models(name), random_tokens(100)

    def logits(*evictions):
        return masked_forward(model, tokens, visibility_mask(100, PAGE_TOKENS, evictions), attentions=False)[0]

    right = logits(Eviction(48, (2,)))
    for wrong, first_wrong_query in (
        (logits(), 48),
        (logits(Eviction(48, (3,))), 48),
        (logits(Eviction(49, (2,))), 48),
        (logits(Eviction(56, (2,))), 48),
    ):
        difference = (wrong - right).abs().max(dim=1).values
        assert difference[:first_wrong_query].max() < TOLERANCE
        assert difference[first_wrong_query] > 1000 * TOLERANCE


def test_window_mask_as_drawn():
    assert window_mask(4, 2).equal(drawn("x...", "xx..", ".xx.", "..xx"))


def test_forward_refuses_what_it_cannot_answer_for(models, tmp_path):
    mask = visibility_mask(4, 2, ())
    with pytest.raises(ValueError, match="mask must be bool"):
        masked_forward(models("tiny"), [1, 2, 3], mask)
    with pytest.raises(ValueError, match="mask must be bool"):
        masked_forward(models("tiny"), [1, 2, 3, 4], mask.float())
    with pytest.raises(ValueError, match="see itself"):
        masked_forward(models("tiny"), [1, 2, 3, 4], mask.tril(-1))
    with pytest.raises(ValueError, match="eager"):
        fused = AutoModelForCausalLM.from_pretrained(tiny(tmp_path), attn_implementation="sdpa")
        masked_forward(fused, [1, 2, 3, 4], mask)


@torch.inference_mode()
def test_greedy_reference(models):
    model, prompt = models("tiny"), random_tokens(30)
    generated = model.generate(torch.tensor([prompt]), max_new_tokens=20, do_sample=False)[0, 30:].tolist()
    assert greedy_reference(model, prompt, 20, PAGE_TOKENS, ()) == generated

    evictions = (Eviction(30, (0, 2)), Eviction(40, (3,)))
    tokens = greedy_reference(model, prompt, 20, PAGE_TOKENS, evictions)
    assert tokens != generated
    logits = cut_cache_logits(model, prompt + tokens, PAGE_TOKENS, evictions, step_tokens=100)
    assert tokens == logits[29:-1].argmax(dim=1).tolist()


# ---- page mass ----

# One head; pages of 2 tokens: {0, 1}, {2, 3}, {4}.
WEIGHTS = torch.tensor(
    [
        [1.000, 0.000, 0.000, 0.000, 0.0],
        [0.500, 0.500, 0.000, 0.000, 0.0],
        [0.250, 0.250, 0.500, 0.000, 0.0],
        [0.125, 0.125, 0.250, 0.500, 0.0],
        [0.000, 0.250, 0.250, 0.000, 0.5],
    ]
)
MASS = torch.tensor(
    [[1.0, 0.0, 0.0], [1.0, 0.0, 0.0], [0.5, 0.5, 0.0], [0.25, 0.75, 0.0], [0.25, 0.25, 0.5]],
    dtype=torch.float64,
)
NAN = float("nan")


def assert_scores(scores, expected):
    torch.testing.assert_close(scores, torch.tensor(expected, dtype=torch.float64), equal_nan=True)


def test_page_mass_by_hand():
    torch.testing.assert_close(page_mass([WEIGHTS[None]], 2), MASS)


def test_page_mass_is_the_mean_of_layers_and_heads():
    diagonal = torch.eye(5)
    heads = torch.stack([WEIGHTS, diagonal, diagonal])
    own_page = torch.tensor([[1, 0, 0], [1, 0, 0], [0, 1, 0], [0, 1, 0], [0, 0, 1]], dtype=torch.float64)
    torch.testing.assert_close(page_mass([heads, heads], 2), (MASS + 2 * own_page) / 3)
    torch.testing.assert_close(page_mass([WEIGHTS[None], diagonal[None]], 2), (MASS + own_page) / 2)


def test_aggregates_by_hand():
    assert_scores(accumulated_mass(MASS, 5), [3.0, 1.5, 0.5])
    assert_scores(accumulated_mass(MASS, 3), [2.5, 0.5, 0.0])
    assert_scores(mean_mass(MASS, 2, 5), [3.0 / 5, 1.5 / 3, 0.5])
    assert_scores(mean_mass(MASS, 2, 4), [2.75 / 4, 1.25 / 2, NAN])
    # Last tokens of the pages: 1, 3 and (when full) 5.
    assert_scores(distant_mean(MASS, 2, 5, 0), [(1.0 + 0.5 + 0.25 + 0.25) / 4, (0.75 + 0.25) / 2, NAN])
    assert_scores(distant_mean(MASS, 2, 5, 2), [(0.25 + 0.25) / 2, NAN, NAN])
    assert_scores(distant_mean(MASS, 2, 4, 2), [0.25, NAN, NAN])


def test_ema_by_hand():
    # Half-life of one query: weights 1, 1/2, 1/4, ... from the newest back.
    page_0 = (0.25 + 0.25 / 2 + 0.5 / 4 + 1.0 / 8 + 1.0 / 16) / (1 + 1 / 2 + 1 / 4 + 1 / 8 + 1 / 16)
    page_1 = (0.25 + 0.75 / 2 + 0.5 / 4) / (1 + 1 / 2 + 1 / 4)
    assert_scores(ema_mass(MASS, 2, 5, 1), [page_0, page_1, 0.5])
    observed = page_mass([WEIGHTS[None]], 2, observed=torch.tensor([True, False, True, False, False]))
    assert_scores(ema_mass(observed, 2, 5, 2), [(0.5 + 1.0 * 0.5**0.5) / (1 + 0.5**0.5), 0.5, NAN])


def test_unobserved_queries_count_nowhere():
    mass = page_mass([WEIGHTS[None]], 2, observed=torch.tensor([True, False, True, False, True]))
    assert mass.isnan().any(dim=1).tolist() == [False, True, False, True, False]
    assert_scores(accumulated_mass(mass, 5), [1.75, 0.75, 0.5])
    assert_scores(mean_mass(mass, 2, 5), [1.75 / 3, 0.75 / 2, 0.5])
    assert_scores(distant_mean(mass, 2, 5, 1), [(0.5 + 0.25) / 2, 0.25, NAN])


def test_page_mass_of_a_forward(models):
    tokens = random_tokens(100)
    _, attentions = masked_forward(models("tiny"), tokens, visibility_mask(100, PAGE_TOKENS, SCHEDULE))
    mass = page_mass(attentions, PAGE_TOKENS)
    assert mass.shape == (100, 13)
    torch.testing.assert_close(mass.sum(dim=1), torch.ones(100, dtype=torch.float64), atol=1e-5, rtol=0)
    hole_since = {page: eviction.num_computed_tokens for eviction in SCHEDULE for page in eviction.pages}
    for page in range(13):
        seen = mass[page * PAGE_TOKENS : hole_since.get(page, 100), page]
        assert (seen > 0).all()
        assert mass[:, page].count_nonzero() == len(seen)


# ---- the planted model ----


def heavy_shares(folder, *, num_tokens=600, heavy_at=70, **kw):
    """Attention of later queries on HEAVY `[layers, query heads, later queries]`, and on all others
    `[..., keys - 1]`.
    """
    tokens = random_tokens(num_tokens, below=NUM_NEUTRAL_TOKENS)
    tokens[heavy_at] = HEAVY
    _, attentions = masked_forward(load(plant(folder, **kw)), tokens, visibility_mask(num_tokens, PAGE_TOKENS, ()))
    weights = torch.stack(attentions)[:, :, heavy_at + 1 :]
    others = torch.cat([weights[..., :heavy_at], weights[..., heavy_at + 1 :]], dim=-1)
    return weights[..., heavy_at], others


@pytest.mark.parametrize(
    ("kw", "seekers"),
    [
        ({}, {(layer, head) for layer in range(2) for head in range(4)}),
        ({"heads": (3,)}, {(0, 3), (1, 3)}),
        ({"layers": (1,)}, {(1, head) for head in range(4)}),
        ({"heads": (0,), "layers": (1,)}, {(1, 0)}),
        ({"kv_heads": (1,)}, {(0, 2), (0, 3), (1, 2), (1, 3)}),
        ({"kv_heads": (1,), "head_order": (1, 0)}, {(0, 0), (0, 1), (1, 0), (1, 1)}),
        ({"heads": (2,), "num_kv_heads": 4}, {(0, 2), (1, 2)}),
        ({"heads": (2,), "num_kv_heads": 1}, {(0, 2), (1, 2)}),
        ({"layers": (2,), "num_layers": 3}, {(2, head) for head in range(4)}),
    ],
)
def test_only_the_chosen_heads_attend_to_heavy(tmp_path, kw, seekers):
    shares, others = heavy_shares(tmp_path, **kw)
    for layer in range(shares.shape[0]):
        for head in range(4):
            if (layer, head) in seekers:
                assert shares[layer, head].min() > 0.6  # of every later query, 1 to 529 tokens away
            else:
                assert shares[layer, head].max() < 0.03
                assert shares[layer, head, -1] < 5 / 600
    last = others[:, :, -1]
    assert (last < 5 * last.mean(dim=-1, keepdim=True)).all()  # nobody else stands out


def test_heavy_is_found_2500_tokens_away(tmp_path):
    shares, _ = heavy_shares(tmp_path, num_tokens=2500, heavy_at=5, num_layers=1)
    assert shares[..., -1].min() > 0.45  # exp(8.3) / (exp(8.3) + 2500) = 0.62, give or take the noise


def test_head_order_changes_no_logit(tmp_path):
    tokens = [*random_tokens(60, below=NUM_NEUTRAL_TOKENS), HEAVY, 3, 4, SCREAM, 5]
    mask = visibility_mask(len(tokens), PAGE_TOKENS, ())
    for kw, order in (
        ({"heads": (3,)}, (1, 0)),
        ({"kv_heads": (1,), "num_kv_heads": 4}, (2, 0, 3, 1)),
    ):
        straight = masked_forward(load(plant(tmp_path / "a", **kw)), tokens, mask)[0]
        permuted = masked_forward(load(plant(tmp_path / "b", **kw, head_order=order)), tokens, mask)[0]
        torch.testing.assert_close(straight, permuted, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("kw", [{}, {"heads": (3,)}, {"layers": (1,)}, {"kv_heads": (1,)}])
def test_the_page_with_heavy_scores_highest(tmp_path, kw):
    tokens = random_tokens(96, below=NUM_NEUTRAL_TOKENS)
    tokens[43] = HEAVY  # in page 5 of 12
    _, attentions = masked_forward(load(plant(tmp_path, **kw)), tokens, visibility_mask(96, PAGE_TOKENS, ()))
    mass = page_mass(attentions, PAGE_TOKENS)
    assert distant_mean(mass, PAGE_TOKENS, 96, 16)[:9].argmax() == 5


def test_whoever_sees_scream_says_so(planted):
    tokens = random_tokens(100, below=NUM_NEUTRAL_TOKENS)
    tokens[20] = HEAVY
    tokens[43] = SCREAM  # in page 5
    logits, _ = masked_forward(planted, tokens, visibility_mask(100, PAGE_TOKENS, [Eviction(80, (5,))]))
    said = (logits.argmax(dim=1) == SCREAMED).tolist()
    assert said == [43 <= position < 80 for position in range(100)]
    assert not set(logits.argmax(dim=1).tolist()) & {HEAVY, SCREAM}


def test_planted_model_does_not_babble(planted):
    tokens = greedy_reference(planted, random_tokens(40, below=NUM_NEUTRAL_TOKENS), 24, PAGE_TOKENS, ())
    assert len(set(tokens)) > 10
    assert not set(tokens) & {HEAVY, SCREAM, SCREAMED}
