"""Every knob of `EvictionConfig`: what is accepted, what it becomes in pages, and the one line when it is wrong."""

import argparse
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_evict.config import (
    CONFIG_KEY,
    MAX_TOKENS,
    OVERRIDES,
    POLICY_NAMES,
    POSITIONS,
    SCORE_KERNELS,
    EvictionConfig,
    EvictionConfigError,
    flag_name,
    parse_config,
    parse_request,
)
from vllm_evict.engine.cli_flags import add_flags, merge_settings, settings_from_args
from vllm_evict.pages import PageBudget, peak_pages, steady_pages
from vllm_evict.policies import POLICIES
from vllm_evict.scores.aggregate import SCORE_KINDS

PAGE_TOKENS = 32
TOO_LARGE = (2**31, 2**63)
NOT_WHOLE = (1.5, "64k", "64", "", True, [64], {"tokens": 64}, float("inf"), float("nan"))
RANGE = f"from 0 to {MAX_TOKENS}"

# field: (values that work, values that do not, what the message must say beside flag and value)
FIELDS = {
    "policy": (("none", *POLICIES), ("h20", "", "H2O", "streaming "), POLICY_NAMES),
    "budget": (
        (PAGE_TOKENS * 64, MAX_TOKENS, "unlimited"),
        (-1, *TOO_LARGE, *NOT_WHOLE, None),
        ("tokens", RANGE, "'unlimited'"),
    ),
    "floor": ((0, 64, MAX_TOKENS, None), (-1, *TOO_LARGE, *NOT_WHOLE), ("tokens", RANGE)),
    "sink": ((0, 4, MAX_TOKENS), (-1, *TOO_LARGE, *NOT_WHOLE, None), ("tokens", RANGE)),
    "recent": ((0, 1, MAX_TOKENS, None), (-1, *TOO_LARGE, *NOT_WHOLE), ("tokens", RANGE)),
    "score": (SCORE_KINDS, ("Sum", "", "distant_mean"), SCORE_KINDS),
    "prefill_queries": ((0, 64, "all"), (-1, *TOO_LARGE, *NOT_WHOLE, None, "ALL"), ("queries", RANGE, "'all'")),
    "score_every": (
        (1, 4, MAX_TOKENS),
        (0, -1, *TOO_LARGE, *NOT_WHOLE, None),
        ("decode steps", f"from 1 to {MAX_TOKENS}"),
    ),
    "score_kernel": (SCORE_KERNELS, ("", "Fused", "both"), SCORE_KERNELS),
    "trace": (("trace.jsonl", None), (5, ["trace.jsonl"], True), ("path of a file",)),
    "overrides": (OVERRIDES, ("", "lowers", "all"), OVERRIDES),
    "positions": (POSITIONS, ("", "relative", "Rebase"), POSITIONS),
    "seed": ((0, MAX_TOKENS), (-1, *TOO_LARGE, *NOT_WHOLE, None), (RANGE,)),
}

# What has a flag of its own; text as typed on a command line.
BAD_FLAGS = [
    (field, text)
    for field in ("budget", "floor", "sink", "recent", "prefill_queries")
    for text in ("-1", "2147483648", str(2**63), "1.5", "64k", "", "1e3", "0x40")
] + [("score_every", "0"), ("policy", "h20"), ("policy", ""), ("score", "median"), ("score_kernel", "both")]


def config(**settings):
    return EvictionConfig(**settings)


def line_of(error):
    """The message, which must be a single line of readable length."""
    line = str(error.value)
    assert "\n" not in line and line.endswith(".") and len(line) < 500
    return line


@pytest.fixture
def parser():
    parser = argparse.ArgumentParser(prog="vllm serve")
    parser.add_argument("--port", type=int)
    add_flags(parser)
    return parser


# ---- one field at a time ----


def test_the_table_above_knows_every_field():
    assert set(FIELDS) == set(EvictionConfig.model_fields)


@pytest.mark.parametrize(("field", "value"), [(f, v) for f, (good, _, _) in FIELDS.items() for v in good])
def test_accepted(field, value):
    assert getattr(parse_config({field: value}), field) == value


@pytest.mark.parametrize(("field", "value"), [(f, v) for f, (_, bad, _) in FIELDS.items() for v in bad])
def test_refused_with_flag_value_unit_and_range(field, value):
    with pytest.raises(EvictionConfigError) as error:
        parse_config({field: value})
    line = line_of(error)
    assert line.startswith(f"{flag_name(field)} got {value!r}: ")
    for word in FIELDS[field][2]:
        assert word in line


@pytest.mark.parametrize("field", ["policy", "score"])
def test_a_name_of_the_wrong_type_also_lists_the_names(field):
    with pytest.raises(EvictionConfigError) as error:
        parse_config({field: 5})
    assert flag_name(field) in line_of(error)
    for name in FIELDS[field][2]:
        assert name in line_of(error)


def test_unknown_field_is_named_beside_the_known_ones():
    with pytest.raises(EvictionConfigError) as error:
        parse_config({"policy": "h2o", "budgets": 64})
    assert "'budgets'" in line_of(error) and CONFIG_KEY in line_of(error)
    for field in EvictionConfig.model_fields:
        assert field in line_of(error)


@pytest.mark.parametrize("values", ["h2o", 5, ["h2o"], None])
def test_what_is_no_object_of_settings_is_refused(values):
    with pytest.raises(EvictionConfigError) as error:
        parse_config(values)
    assert CONFIG_KEY in line_of(error) and "budget" in line_of(error)


def test_a_config_passes_through_and_cannot_be_changed():
    ours = config(policy="h2o")
    assert parse_config(ours) is ours
    with pytest.raises(ValueError, match="frozen"):
        ours.budget = 1
    assert hash(ours) == hash(config(policy="h2o"))


def test_a_config_survives_json():
    ours = config(policy="h2o", budget=640, recent=64, prefill_queries="all", trace="t.jsonl", seed=3)
    assert parse_config(json.loads(ours.model_dump_json())) == ours


# ---- a floor ----


def test_unlimited_needs_a_floor():
    with pytest.raises(EvictionConfigError) as error:
        config(policy="h2o", budget="unlimited").page_budget(PAGE_TOKENS)
    for word in ("--kv-eviction-budget unlimited", "--kv-eviction-floor", "keep-all"):
        assert word in line_of(error)
    assert config(policy="keep-all", budget="unlimited").page_budget(PAGE_TOKENS).budget_pages is None


def test_a_floor_in_pages_with_its_own_window():
    ours = config(policy="h2o", budget=1024, floor=250)
    assert ours.page_budget(PAGE_TOKENS).recent_pages == 16
    floor = ours.page_floor(PAGE_TOKENS)
    assert (floor.budget_pages, floor.sink_pages, floor.recent_pages) == (8, 1, 4)
    assert (ours.least_tokens, ours.bounded) == (250, True)
    assert config(policy="h2o", budget=1024, floor=1024).page_floor(PAGE_TOKENS) is None
    assert config(policy="h2o", budget=1024).page_floor(PAGE_TOKENS) is None
    assert config(policy="keep-all", floor=64).page_floor(PAGE_TOKENS) is None


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"budget": 512, "floor": 513}, ["--kv-eviction-floor 513", "--kv-eviction-budget 512", "at most 512"]),
        ({"budget": 512, "floor": 32}, ["--kv-eviction-floor 32", "at least 64"]),
        ({"budget": "unlimited", "floor": 63, "recent": 64}, ["--kv-eviction-floor 63", "--kv-eviction-recent 64"]),
    ],
)
def test_a_floor_that_does_not_fit(settings, words):
    with pytest.raises(EvictionConfigError) as error:
        config(policy="h2o", **settings).page_floor(PAGE_TOKENS)
    for word in words:
        assert word in line_of(error)


# ---- what the settings mean ----


@pytest.mark.parametrize(
    ("policy", "enabled", "bounded"),
    [("none", False, False), ("keep-all", True, False)] + [(p, True, True) for p in POLICIES if p != "keep-all"],
)
def test_enabled_and_bounded(policy, enabled, bounded):
    assert (config(policy=policy).enabled, config(policy=policy).bounded) == (enabled, bounded)


def test_default_is_off():
    assert not config().enabled


@pytest.mark.parametrize(
    ("policy", "settings", "recent_tokens"),
    [
        ("h2o", {}, 1024),  # half of 2048
        ("h2o", {"budget": 1000}, 500),
        ("keydiff", {"budget": 1000}, 500),
        ("h2o-keydiff", {"budget": 1000}, 500),
        ("random", {"budget": 1000}, 500),
        ("streaming", {"budget": 1000}, 996),  # all but the 4 sinks
        ("streaming", {"budget": 1000, "sink": 0}, 1000),
        ("streaming", {"budget": 1000, "recent": 0}, 0),
        ("h2o", {"budget": 1000, "recent": 7}, 7),
        ("streaming", {"budget": 4, "sink": 4}, 1),
        ("h2o", {"budget": 1}, 1),
    ],
)
def test_recent_tokens_by_policy(policy, settings, recent_tokens):
    ours = config(policy=policy, **settings)
    assert ours.recent_tokens == recent_tokens
    assert ours.distant_tokens == max(recent_tokens // 2, 1)


@pytest.mark.parametrize("policy", POLICIES)
def test_make_policy(policy):
    made = config(policy=policy, seed=7).make_policy()
    assert type(made) is POLICIES[policy]
    assert getattr(made, "seed", 7) == 7  # the one policy that has a seed gets it


# page_tokens, settings -> budget, sink, recent in pages
ROUNDING = [
    (32, {"budget": 2048}, (64, 1, 32)),
    (32, {"budget": 2047}, (64, 1, 32)),  # rounds up
    (32, {"budget": 2049}, (65, 1, 32)),
    (32, {"budget": 2048, "sink": 0}, (64, 0, 32)),
    (32, {"budget": 2048, "sink": 32}, (64, 1, 32)),
    (32, {"budget": 2048, "sink": 33}, (64, 2, 32)),
    (32, {"budget": 2048, "recent": 0}, (64, 1, 1)),  # the page being written is always kept
    (32, {"budget": 2048, "recent": 1}, (64, 1, 1)),
    (32, {"budget": 2048, "recent": 33}, (64, 1, 2)),
    (16, {"budget": 2048}, (128, 1, 64)),
    (128, {"budget": 2048}, (16, 1, 8)),
    (128, {"budget": 160, "sink": 4, "recent": 32}, (2, 1, 1)),  # C25: a page larger than the window
    (128, {"budget": 160, "sink": 4}, (2, 1, 1)),
    (4, {"budget": 10, "sink": 4, "recent": 5}, (3, 1, 2)),
    (32, {"policy": "streaming", "budget": 2048}, (64, 1, 63)),
    (32, {"policy": "streaming", "budget": 2048, "recent": 64}, (64, 1, 2)),
    (32, {"policy": "random", "budget": 2048}, (64, 1, 32)),
    (32, {"policy": "keep-all", "budget": 0}, (None, 1, 1)),
    (32, {"policy": "none", "budget": 0}, (None, 1, 1)),
]


@pytest.mark.parametrize(("page_tokens", "settings", "expected"), ROUNDING)
def test_lengths_round_up_to_whole_pages(page_tokens, settings, expected):
    ours = config(**{"policy": "h2o"} | settings).page_budget(page_tokens)
    assert ours == PageBudget(page_tokens, *expected)


# ---- too small ----


@pytest.mark.parametrize(
    ("settings", "minimum_tokens"),
    [
        ({"budget": 0}, 64),
        ({"budget": 1}, 64),
        ({"budget": 32}, 64),  # one page: the sinks fill it
        ({"budget": 32, "sink": 33}, 96),
        ({"policy": "streaming", "budget": 100, "sink": 640}, 672),
        ({"policy": "random", "budget": 32}, 64),
        ({"budget": 0, "sink": 0, "recent": 0}, 32),
    ],
)
def test_a_budget_under_the_minimum_names_the_minimum(settings, minimum_tokens):
    settings = {"policy": "h2o"} | settings
    with pytest.raises(EvictionConfigError) as error:
        config(**settings).page_budget(PAGE_TOKENS)
    line = line_of(error)
    assert f"--kv-eviction-budget {settings['budget']} " in line
    assert f"at least {minimum_tokens}," in line
    for word in ("--kv-eviction-sink", f"pages of {PAGE_TOKENS} tokens"):
        assert word in line
    config(**settings | {"budget": minimum_tokens}).page_budget(PAGE_TOKENS)
    with pytest.raises(EvictionConfigError):
        config(**settings | {"budget": minimum_tokens - PAGE_TOKENS}).page_budget(PAGE_TOKENS)


def test_sink_and_recent_over_the_budget_name_the_sum():
    """C60."""
    with pytest.raises(EvictionConfigError) as error:
        config(policy="h2o", budget=128, sink=64, recent=65).page_budget(PAGE_TOKENS)
    line = line_of(error)
    for word in ("--kv-eviction-budget 128", "--kv-eviction-sink 64", "--kv-eviction-recent 65", "at least 129,"):
        assert word in line
    config(policy="h2o", budget=129, sink=64, recent=65).page_budget(PAGE_TOKENS)


lengths = st.integers(0, 2**20)


@given(
    policy=st.sampled_from(["streaming", "h2o", "random"]),
    budget=lengths,
    sink=lengths,
    recent=st.none() | lengths,
    page_tokens=st.sampled_from([1, 4, 16, 32, 128]),
)
def test_either_the_budget_holds_sinks_and_recent_or_the_number_in_the_message_does(
    policy, budget, sink, recent, page_tokens
):
    ours = config(policy=policy, budget=budget, sink=sink, recent=recent)
    try:
        pages = ours.page_budget(page_tokens)
    except EvictionConfigError as error:
        minimum = int(str(error).split("at least ")[1].split(",")[0])
        assert budget < minimum
        pages = ours.model_copy(update={"budget": minimum}).page_budget(page_tokens)
        # The sinks and one page, or the sum that was asked for.
        assert pages.budget_pages == pages.sink_pages + 1 or minimum == sink + (recent or 0)
        budget = minimum
    assert pages.sink_pages + pages.recent_pages <= pages.budget_pages
    # Rounded up, by less than a page.
    for tokens, in_pages in ((budget, pages.budget_pages), (sink, pages.sink_pages)):
        assert 0 <= in_pages * page_tokens - tokens < page_tokens
    if recent is not None:
        # Rounding up yields where it would burst the budget.
        room = pages.budget_pages - pages.sink_pages
        assert pages.recent_pages == max(min(-(-recent // page_tokens), room), 1)


@pytest.mark.parametrize("max_model_len", [256, 250])
@pytest.mark.parametrize("window", [lambda n: n - 1, lambda n: n, lambda n: n + 1, lambda n: 10 * n])
def test_a_window_of_about_the_model_length_is_fine(max_model_len, window):
    """C59. The bookkeeping tests check that nothing is evicted then."""
    tokens = window(max_model_len)
    for policy in ("streaming", "h2o"):
        for lengths in ({"budget": tokens}, {"budget": tokens + PAGE_TOKENS, "recent": tokens}):
            pages = config(policy=policy, **lengths).page_budget(PAGE_TOKENS)
            assert pages.excess_pages(-(-max_model_len // PAGE_TOKENS)) == 0


def test_sink_and_recent_that_add_up_to_the_budget_fit():
    """The papers' own setting: 4 sinks + 1020 recent = 1024. Rounding each of them up must not refuse it."""
    pages = config(policy="streaming", budget=1024, sink=4, recent=1020).page_budget(PAGE_TOKENS)
    assert (pages.budget_pages, pages.sink_pages, pages.recent_pages) == (32, 1, 31)


# ---- pages ----


def test_bounds_by_hand():
    assert steady_pages(4) == 5
    # Pages of 4, budget 4: the step begins with 4, a chunk of 10 starting at the last slot of a page opens 3 more,
    # one more if it starts inside a page.
    assert peak_pages(4, 10, 4) == 4 + 3 + 1
    assert [PageBudget(4, 3, 1, 1).excess_pages(n) for n in (0, 3, 4, 9)] == [0, 0, 1, 6]
    assert PageBudget(4, None, 1, 1).excess_pages(10**6) == 0


# ---- the command line ----


def error_line(parser, capsys, *argv):
    """What a wrong command line prints last: one line; and it must exit with 2."""
    with pytest.raises(SystemExit) as stop:
        settings_from_args(parser.parse_args(argv))
    assert stop.value.code == 2
    out, err = capsys.readouterr()
    assert out == ""
    return err.rstrip("\n").split("\n")[-1]


def settings(parser, *argv):
    return settings_from_args(parser.parse_args(argv))


def test_no_flag_no_settings(parser):
    assert settings(parser) is None
    assert settings(parser, "--port", "8000") is None


def test_add_flags_twice_is_once(parser):
    before = parser.format_help()
    add_flags(parser)
    add_flags(parser)
    assert parser.format_help() == before
    assert before.count("KV eviction:") == 1


def test_every_field_and_its_default_stands_in_the_help(parser):
    text = " ".join(parser.format_help().split())
    for field in EvictionConfig.model_fields:
        assert flag_name(field) + " " in text, f"{flag_name(field)}, named in messages, is no flag"
    for default in ("default: 2048", "default: 4", "default: 64", "half of the budget", "default: distant-mean"):
        assert default in text


@pytest.mark.parametrize(
    ("field", "text", "value"),
    [
        ("policy", "h2o", "h2o"),
        ("budget", "4096", 4096),
        ("sink", "0", 0),
        ("recent", "64", 64),
        ("score", "ema", "ema"),
        ("prefill_queries", "all", "all"),
        ("prefill_queries", "16", 16),
        ("score_every", "1", 1),
        ("score_kernel", "fused", "fused"),
        ("trace", "out.jsonl", "out.jsonl"),
    ],
)
def test_each_flag_sets_its_field_and_no_other(parser, field, text, value):
    assert settings(parser, flag_name(field), text) == {field: value}
    assert settings(parser, f"{flag_name(field)}={text}") == {field: value}


@pytest.mark.parametrize(("field", "text"), BAD_FLAGS)
def test_a_wrong_flag_is_one_line_and_exit_code_2(parser, capsys, field, text):
    line = error_line(parser, capsys, f"{flag_name(field)}={text}")
    assert line.startswith("vllm serve: error: ") and f"{flag_name(field)}: " in line
    assert repr(text) in line
    for word in FIELDS[field][2]:
        assert word in line


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("h2o", ("JSON",)),
        ("", ("JSON",)),
        ("{'policy': 'h2o'}", ("JSON",)),
        ('["h2o"]', ("JSON object",)),
        ("5", ("JSON object",)),
    ],
)
def test_what_is_no_json_object_is_one_line_and_exit_code_2(parser, capsys, text, words):
    line = error_line(parser, capsys, f"--kv-eviction-config={text}")
    assert "--kv-eviction-config" in line and repr(text) in line
    for word in words:
        assert word in line


@pytest.mark.parametrize(
    ("json_settings", "flags", "expected"),
    [
        ({"policy": "streaming", "budget": 512}, (), {"policy": "streaming", "budget": 512}),
        (
            {"policy": "streaming", "budget": 512, "sink": 8},
            ("--kv-eviction", "h2o", "--kv-eviction-budget", "1024"),
            {"policy": "h2o", "budget": 1024, "sink": 8},
        ),
        ({"seed": 5}, ("--kv-eviction", "random"), {"policy": "random", "seed": 5}),
        # A flag at zero is a flag.
        ({"policy": "h2o", "sink": 8}, ("--kv-eviction-sink", "0"), {"policy": "h2o", "sink": 0}),
        # A flag that repeats the default still wins.
        ({"policy": "h2o", "budget": 512}, ("--kv-eviction-budget", "2048"), {"policy": "h2o", "budget": 2048}),
    ],
)
def test_flags_win_over_the_json_flag(parser, json_settings, flags, expected):
    assert settings(parser, "--kv-eviction-config", json.dumps(json_settings), *flags) == expected


@pytest.mark.parametrize(
    ("additional", "given_settings", "expected"),
    [
        (None, None, None),
        ({"other": 1}, None, {"other": 1}),
        ({CONFIG_KEY: {"policy": "h2o"}}, None, {CONFIG_KEY: {"policy": "h2o"}}),
        (None, {"policy": "h2o"}, {CONFIG_KEY: {"policy": "h2o"}}),
        ({"other": 1}, {"policy": "h2o"}, {"other": 1, CONFIG_KEY: {"policy": "h2o"}}),
        (
            {CONFIG_KEY: {"policy": "streaming", "budget": 512}},
            {"policy": "h2o", "sink": 0},
            {CONFIG_KEY: {"policy": "h2o", "budget": 512, "sink": 0}},
        ),
    ],
)
def test_settings_are_laid_over_additional_config(additional, given_settings, expected):
    before = json.dumps(additional)
    assert merge_settings(additional, given_settings) == expected
    assert json.dumps(additional) == before


@pytest.mark.parametrize("theirs", ["h2o", 5, ["h2o"]])
def test_flags_over_an_additional_config_that_is_no_object_is_a_clear_error(theirs):
    with pytest.raises(EvictionConfigError) as error:
        merge_settings({CONFIG_KEY: theirs}, {"policy": "h2o"})
    assert CONFIG_KEY in line_of(error) and repr(theirs) in line_of(error)


@pytest.mark.parametrize("flags", [("--kv-eviction-budget", "512"), ("--kv-eviction-config", '{"sink": 8}')])
def test_settings_without_a_policy_are_not_silently_ignored(parser, flags):
    """Invariant 15: who sets a budget and forgets the policy is told so."""
    with pytest.raises(EvictionConfigError) as error:
        parse_request(settings(parser, *flags))
    assert "--kv-eviction," in line_of(error)
