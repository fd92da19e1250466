"""From flags to a `VllmConfig` that evicts, or to one line that says why not (invariants 1 and 15)."""

import argparse
import dataclasses
from types import SimpleNamespace

import pytest
import vllm
from vllm.config import KVEventsConfig, KVTransferConfig
from vllm.engine.arg_utils import AsyncEngineArgs, EngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.attention.backend import AttentionMetadataBuilder
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from tests.models.tiny import tiny_swa
from vllm_evict.config import CONFIG_KEY, EvictionConfig, EvictionConfigError
from vllm_evict.engine import support
from vllm_evict.engine.attention.metadata import ResidentPagesBuilderMixin
from vllm_evict.engine.configure import config_of, enable, requested_config
from vllm_evict.engine.plugin import register
from vllm_evict.engine.support import (
    EVICTING_BACKENDS,
    REFUSALS,
    TESTED_VLLM,
    check_layers,
    check_supported,
    check_vllm_version,
    refused,
)
from vllm_evict.policies import POLICIES

STOCK_WORKER = "vllm.v1.worker.cpu_worker.CPUWorker"
H2O = EvictionConfig(policy="h2o")

# What nothing is refused for. Paths and quiet values; that the paths are real is a test.
QUIET = {
    "device_config.device_type": "cpu",
    "attention_config.backend": None,
    "kv_transfer_config": None,
    "speculative_config": None,
    "kv_events_config": None,
    "use_v2_model_runner": False,
    "additional_config": {},
    "model_config.use_mla": False,
    "model_config.is_hybrid": False,
    "model_config.has_inner_state": False,
    "model_config.is_attention_free": False,
    "model_config.is_encoder_decoder": False,
    "model_config.runner_type": "generate",
    "model_config.is_diffusion": False,
    "model_config.uses_mrope": False,
    "model_config.uses_alibi": False,
    "model_config.rswa_window": None,
    "model_config.is_mm_prefix_lm": False,
    "model_config.max_model_len": 64,
    "model_config.get_and_verify_max_len": lambda length=None: 64,
    "model_config.hf_text_config": SimpleNamespace(),
    "model_config.get_sliding_window": lambda: None,
    "scheduler_config.disable_hybrid_kv_cache_manager": False,
    "scheduler_config.scheduler_cls": None,
    "cache_config.cache_dtype": "auto",
    "cache_config.kv_sharing_fast_prefill": False,
    "parallel_config.decode_context_parallel_size": 1,
    "parallel_config.prefill_context_parallel_size": 1,
    "parallel_config.pipeline_parallel_size": 1,
    "parallel_config.distributed_executor_backend": "mp",
    "parallel_config.use_ubatching": False,
}

FUSED = {"additional_config": {"kv_eviction": {"score_kernel": "fused"}}}
ON_GPU = {"device_config.device_type": "cuda"}
TRITON = {"attention_config.backend": AttentionBackendEnum.TRITON_ATTN}

# A word of the feature's name: what triggers it.
TRIGGERS = [
    ("KV connector", {"kv_transfer_config": object()}),
    ("speculative decoding", {"speculative_config": object()}),
    ("latent attention", {"model_config.use_mla": True}),
    ("state-space", {"model_config.is_hybrid": True}),
    ("state-space", {"model_config.has_inner_state": True}),
    ("without attention", {"model_config.is_attention_free": True}),
    ("encoder-decoder", {"model_config.is_encoder_decoder": True}),
    ("pooling", {"model_config.runner_type": "pooling"}),
    ("diffusion", {"model_config.is_diffusion": True}),
    ("M-RoPE", {"model_config.uses_mrope": True}),
    ("ALiBi", {"model_config.uses_alibi": True}),
    ("R-SWA", {"model_config.rswa_window": 128}),
    ("chunked local", {"model_config.hf_text_config": SimpleNamespace(attention_chunk_size=8192)}),
    ("ahead within images", {"model_config.is_mm_prefix_lm": True}),
    ("longer than the model", {"model_config.max_model_len": 65}),
    (
        "sliding-window layers",
        {
            "scheduler_config.disable_hybrid_kv_cache_manager": True,
            "model_config.hf_text_config": SimpleNamespace(layer_types=["full_attention", "sliding_attention"]),
        },
    ),
    (
        "sliding-window layers",
        {
            "scheduler_config.disable_hybrid_kv_cache_manager": True,
            "model_config.get_sliding_window": lambda: 4096,
        },
    ),
    (
        "overrides any",
        {
            "additional_config": {"kv_eviction": {"overrides": "any"}},
            "model_config.hf_text_config": SimpleNamespace(layer_types=["sliding_attention"]),
        },
    ),
    (
        "windows under",
        {
            "additional_config": {"kv_eviction": {"positions": "rebase"}},
            "model_config.hf_text_config": SimpleNamespace(layer_types=["sliding_attention"]),
        },
    ),
    (
        "LongRoPE",
        {
            "additional_config": {"kv_eviction": {"positions": "rebase"}},
            "model_config.hf_text_config": SimpleNamespace(rope_parameters={"rope_type": "longrope"}),
        },
    ),
    ("quantised KV cache", {"cache_config.cache_dtype": "fp8"}),
    ("quantised KV cache", {"cache_config.cache_dtype": "fp8_e5m2"}),
    ("KV cache events", {"kv_events_config": SimpleNamespace(enable_kv_cache_events=True)}),
    ("context parallelism", {"parallel_config.decode_context_parallel_size": 2}),
    ("context parallelism", {"parallel_config.prefill_context_parallel_size": 2}),
    (
        "pipeline under torchrun",
        {
            "parallel_config.distributed_executor_backend": "external_launcher",
            "parallel_config.pipeline_parallel_size": 2,
        },
    ),
    ("compiled graphs", {"parallel_config.distributed_executor_backend": "ray"}),
    ("kernel of", FUSED | TRITON),
    ("fused without a GPU", FUSED),
    ("fused without --attention-backend", FUSED | ON_GPU),
    ("batch-invariant", FUSED | ON_GPU | TRITON | {"variables": {"VLLM_BATCH_INVARIANT": "1"}}),
    ("micro-batching", {"parallel_config.use_ubatching": True}),
    ("fast prefill", {"cache_config.kv_sharing_fast_prefill": True}),
    ("scheduler of your own", {"scheduler_config.scheduler_cls": "my.Scheduler"}),
]

# Near misses, which must not be refused.
HARMLESS = [
    {"kv_events_config": SimpleNamespace(enable_kv_cache_events=False)},
    {"scheduler_config.disable_hybrid_kv_cache_manager": True},
    {"model_config.hf_text_config": SimpleNamespace(layer_types=["full_attention", "sliding_attention"])},
    {"model_config.hf_text_config": SimpleNamespace(layer_types=None, attention_chunk_size=None)},
    {"cache_config.cache_dtype": "bfloat16"},
    {"additional_config": {"kv_eviction": {"positions": "rebase"}}, "model_config.max_model_len": 65},
    {"model_config.hf_text_config": SimpleNamespace(rope_parameters={"rope_type": "longrope"})},
    {"scheduler_config.disable_hybrid_kv_cache_manager": None},
    {"parallel_config.distributed_executor_backend": "external_launcher"},
    {"parallel_config.pipeline_parallel_size": 2},
    {"additional_config": {"kv_eviction": {"score_kernel": "separate"}}},
    FUSED | ON_GPU | TRITON,
]


@pytest.fixture(autouse=True)
def variables(monkeypatch, request):
    """Without the first vLLM itself refuses a length beyond the model's, and we do not ask."""
    changes = request.node.callspec.params.get("changes", {}) if hasattr(request.node, "callspec") else {}
    for name, value in changes.get("variables", {}).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "1")
    monkeypatch.setenv("VLLM_USE_RAY_V2_EXECUTOR_BACKEND", "0")


def fake(changes=()):
    root = SimpleNamespace()
    for path, value in (QUIET | dict(changes)).items():
        *parents, name = path.split(".")
        owner = root
        for parent in parents:
            if not hasattr(owner, parent):
                setattr(owner, parent, SimpleNamespace())
            owner = getattr(owner, parent)
        setattr(owner, name, value)
    return root


def refusal_of(word):
    (refusal,) = [refusal for refusal in REFUSALS if word in refusal.feature]
    return refusal


def policy_refused_by(refusal):
    return "h2o" if not refusal.policies or "h2o" in refusal.policies else refusal.policies[0]


def one_line(error):
    line = str(error.value)
    assert "\n" not in line and line.endswith(".")
    return line


# ---- the table of refusals ----


def test_every_refusal_has_a_trigger():
    assert {refusal_of(word).feature for word, _ in TRIGGERS} == {refusal.feature for refusal in REFUSALS}


@pytest.mark.parametrize("path", QUIET)
def test_what_the_fakes_imitate_is_there_and_quiet(stock_config, path):
    value = stock_config
    for name in path.split("."):
        value = getattr(value, name)
    quiet = QUIET[path]
    if callable(value):
        assert path.endswith("get_and_verify_max_len") or value() == quiet()
    else:
        assert value == quiet or path.endswith("hf_text_config")


def test_a_plain_config_is_not_refused(stock_config):
    for config in (fake(), stock_config):
        for policy in POLICIES:
            check_supported(config, EvictionConfig(policy=policy))


@pytest.mark.parametrize("changes", HARMLESS, ids=lambda c: ",".join(c))
def test_a_near_miss_is_not_refused(changes):
    check_supported(fake(changes), H2O)


@pytest.mark.parametrize(("word", "changes"), TRIGGERS, ids=[word for word, _ in TRIGGERS])
def test_refused_naming_both_sides_and_the_way_out(word, changes):
    refusal = refusal_of(word)
    policy = policy_refused_by(refusal)
    with pytest.raises(EvictionConfigError) as error:
        check_supported(fake(changes), EvictionConfig(policy=policy))
    line = one_line(error)
    assert line.startswith(f"--kv-eviction {policy} does not work with {refusal.feature}: ")
    assert refusal.why in line and refusal.instead in line and "drop --kv-eviction" in line
    assert len(refusal.why) > 15 and len(refusal.instead) > 10


@pytest.mark.parametrize(("word", "changes"), TRIGGERS, ids=[word for word, _ in TRIGGERS])
def test_alone_it_triggers_no_other_refusal(word, changes):
    config = EvictionConfig(policy=policy_refused_by(refusal_of(word)))
    assert [refusal.feature for refusal in refused(fake(changes), config)] == [refusal_of(word).feature]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(("word", "changes"), TRIGGERS, ids=[word for word, _ in TRIGGERS])
def test_which_policies_are_refused(policy, word, changes):
    """All of them, unless the refusal names its policies."""
    refusal = refusal_of(word)
    config = EvictionConfig(policy=policy)
    is_refused = not refusal.policies or policy in refusal.policies
    assert (refusal in refused(fake(changes), config)) == is_refused
    if is_refused:
        with pytest.raises(EvictionConfigError, match=f"--kv-eviction {policy} does not work with"):
            check_supported(fake(changes), config)


def test_who_scores_is_refused_where_every_stage_decides():
    assert set(refusal_of("pipeline under torchrun").policies) == {"h2o", "keydiff", "h2o-keydiff"}


def test_ray_s_default_executor_goes_through_the_worker(monkeypatch):
    monkeypatch.delenv("VLLM_USE_RAY_V2_EXECUTOR_BACKEND")
    check_supported(fake({"parallel_config.distributed_executor_backend": "ray"}), EvictionConfig(policy="h2o"))


@pytest.mark.parametrize("is_known", [True, False], ids=["0.32", "0.33"])
def test_ray_s_executor_of_0_33_has_no_variable(monkeypatch, is_known):
    """There, compiled graphs are gone; with 0.32 they are refused when asked for."""
    variables = SimpleNamespace(**{"VLLM_USE_RAY_V2_EXECUTOR_BACKEND": False} if is_known else {})
    monkeypatch.setattr(support, "envs", variables)
    refusal = refusal_of("compiled graphs")
    assert refusal.applies(fake({"parallel_config.distributed_executor_backend": "ray"})) is is_known


# ---- versions (C49) ----


@pytest.mark.parametrize("version", ["0.32.0", "0.32.1", "0.32.0+cpu", "0.32.0rc1", "0.32.5.dev3+g1234"])
def test_tested_versions_pass(version):
    check_vllm_version(version)


@pytest.mark.parametrize("version", ["0.31.9", "0.33.0", "0.3.2", "0.320.0", "1.32.0", "0.9", "dev", ""])
def test_other_versions_are_refused_naming_the_tested_ones(version):
    with pytest.raises(EvictionConfigError) as error:
        check_vllm_version(version)
    line = one_line(error)
    assert f"vLLM {version}." in line and "drop --kv-eviction" in line
    for tested in TESTED_VLLM:
        assert f"{tested}.*" in line


def test_the_installed_version_is_tested():
    check_vllm_version(vllm.__version__)


# ---- real configs ----


@pytest.fixture(scope="module")
def engine_args(model_path):
    """`engine_args(policy="h2o", **options of vLLM)`: arguments as `LLM(...)` makes them."""
    register()

    def make(settings=None, **options):
        common = {"skip_tokenizer_init": True, "enforce_eager": True, "dtype": "float32", "max_model_len": 256}
        if settings is not None:
            options["additional_config"] = {CONFIG_KEY: settings}
        return EngineArgs(**{"model": model_path} | common | options)

    return make


def test_without_the_flag_the_config_is_vllm_s_own(engine_args):
    wrapped = EngineArgs.create_engine_config
    ours = wrapped(engine_args())
    theirs = getattr(wrapped, "__wrapped__", wrapped)(engine_args())
    assert ours.scheduler_config.scheduler_cls is None
    assert ours.parallel_config.worker_cls == STOCK_WORKER
    assert ours.cache_config.block_size == theirs.cache_config.block_size == 128
    assert ours.compute_hash() == theirs.compute_hash()
    for part in ("cache_config", "scheduler_config", "parallel_config", "model_config"):
        for field in dataclasses.fields(getattr(ours, part)):
            if field.name not in ("hf_config", "hf_text_config", "instance_id", "compilation_config"):
                mine, stock = (repr(getattr(getattr(c, part), field.name, None)) for c in (ours, theirs))
                assert mine.split(" object at ")[0] == stock.split(" object at ")[0], field.name


@pytest.mark.parametrize("settings", [{"policy": "none"}, {"policy": "none", "budget": 1}])
def test_policy_none_is_vllm_s_own(engine_args, settings):
    config = engine_args(settings).create_engine_config()
    assert config.scheduler_config.scheduler_cls is None
    assert config.parallel_config.worker_cls == STOCK_WORKER
    assert config.cache_config.block_size == 128


@pytest.mark.parametrize("policy", POLICIES)
def test_with_the_flag_scheduler_and_worker_are_ours_and_pages_have_32_tokens(engine_args, policy):
    config = engine_args({"policy": policy, "budget": 128}).create_engine_config()
    assert config.scheduler_config.scheduler_cls == "vllm_evict.engine.scheduler.EvictionScheduler"
    assert config.parallel_config.worker_cls == "vllm_evict.engine.worker.EvictionCPUWorker"
    assert config.cache_config.block_size == 32
    assert config_of(config) == EvictionConfig(policy=policy, budget=128)


def test_names_that_are_swapped_in_exist(engine_args):
    config = engine_args({"policy": "h2o"}).create_engine_config()
    assert config.scheduler_config.get_scheduler_cls().__name__ == "EvictionScheduler"
    module, name = config.parallel_config.worker_cls.rsplit(".", 1)
    assert hasattr(__import__(module, fromlist=[name]), name)


@pytest.mark.parametrize("block_size", [64, 128])
def test_a_block_size_of_the_user_s_stays(engine_args, block_size):
    config = engine_args({"policy": "h2o", "budget": 512}, block_size=block_size).create_engine_config()
    assert config.cache_config.block_size == block_size


def test_async_scheduling_gets_its_own_class(stock_config):
    from tests.bookkeeping.harness import configured

    config = configured(stock_config, {"policy": "streaming", "budget": 64}, async_scheduling=True)
    config.parallel_config = dataclasses.replace(config.parallel_config)
    config.parallel_config.worker_cls = STOCK_WORKER
    enable(config)
    assert config.scheduler_config.scheduler_cls == "vllm_evict.engine.scheduler.AsyncEvictionScheduler"
    assert config.scheduler_config.get_scheduler_cls().__name__ == "AsyncEvictionScheduler"


def test_a_worker_we_do_not_know_is_refused_by_name(stock_config):
    from tests.bookkeeping.harness import configured

    config = configured(stock_config, {"policy": "streaming", "budget": 64})
    config.parallel_config = dataclasses.replace(config.parallel_config)
    config.parallel_config.worker_cls = "my.Worker"
    with pytest.raises(EvictionConfigError, match=r"no worker for 'my.Worker'") as error:
        enable(config)
    assert STOCK_WORKER in one_line(error)


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"speculative_config": {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3}}, "specul"),
        ({"kv_transfer_config": KVTransferConfig(kv_connector="ExampleConnector", kv_role="kv_both")}, "KV connector"),
        ({"kv_offloading_size": 1.0}, "KV connector"),
        ({"kv_cache_dtype": "fp8"}, "quantised KV cache"),
        ({"kv_events_config": KVEventsConfig(enable_kv_cache_events=True, publisher="null")}, "KV cache events"),
        ({"kv_sharing_fast_prefill": True}, "fast prefill"),
        ({"scheduler_cls": "vllm.v1.core.sched.scheduler.Scheduler"}, "scheduler of your own"),
        ({"runner": "pooling"}, "pooling"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_real_options_of_vllm_are_refused(engine_args, options, word):
    """The fakes above say what is refused; these say that vLLM's own options lead there."""
    args = engine_args({"policy": "h2o", "budget": 128}, **options)
    with pytest.raises(EvictionConfigError, match="does not work with") as error:
        args.create_engine_config()
    assert word in one_line(error)


@pytest.mark.parametrize("options", [{}, {"attention_backend": "TRITON_ATTN"}], ids=["", "TRITON_ATTN"])
def test_one_kernel_for_attention_and_scores_needs_a_gpu(engine_args, options):
    """Said before anything is loaded; vLLM's CPU build ignores the backend asked for."""
    args = engine_args({"policy": "h2o", "budget": 128, "score_kernel": "fused"}, **options)
    with pytest.raises(EvictionConfigError, match="fused without a GPU") as error:
        args.create_engine_config()
    assert "use --kv-eviction-score-kernel separate" in one_line(error)


def test_a_model_with_windows_needs_the_hybrid_manager(engine_args, tmp_path):
    model = str(tiny_swa(tmp_path))
    settings = {"policy": "h2o", "budget": 128}
    engine_args(settings, model=model).create_engine_config()
    with pytest.raises(EvictionConfigError, match="--disable-hybrid-kv-cache-manager"):
        engine_args(settings, model=model, disable_hybrid_kv_cache_manager=True).create_engine_config()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"policy": "h20"}, ("--kv-eviction got 'h20'", "streaming")),
        ({"policy": "h2o", "budgets": 64}, ("unknown setting 'budgets'",)),
        ({"policy": "h2o", "budget": 32}, ("--kv-eviction-budget 32", "at least 64")),
        ({"policy": "h2o", "trace": "/no/such/folder/trace.jsonl"}, ("--kv-eviction-trace", "/no/such/folder")),
        ("h2o", ("kv_eviction", "'h2o'")),
    ],
)
def test_wrong_settings_are_refused_before_weights_load(engine_args, settings, words):
    with pytest.raises(EvictionConfigError) as error:
        engine_args(settings).create_engine_config()
    for word in words:
        assert word in one_line(error)


@pytest.mark.parametrize("additional", [{}, None, {"other": {"policy": "h2o"}}, SimpleNamespace(kv_eviction="h2o")])
def test_somebody_else_s_additional_config_is_left_alone(additional):
    assert not requested_config(additional).enabled


# ---- the command line, through vLLM's own parser ----


@pytest.fixture(scope="module")
def parser(model_path):
    register()
    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser(prog="vllm serve"))
    parser.set_defaults(model=model_path, max_model_len=256, enforce_eager=True, skip_tokenizer_init=True)
    return parser


def config_from(parser, *argv):
    return AsyncEngineArgs.from_cli_args(parser.parse_args(argv)).create_engine_config()


def test_flags_reach_the_config(parser):
    config = config_from(parser, "--kv-eviction", "h2o", "--kv-eviction-budget", "128", "--kv-eviction-sink=0")
    assert config_of(config) == EvictionConfig(policy="h2o", budget=128, sink=0)
    assert config.scheduler_config.scheduler_cls.endswith("EvictionScheduler")


def test_underscores_are_vllm_s_way_too(parser):
    assert config_of(config_from(parser, "--kv_eviction", "h2o", "--kv_eviction_budget", "128")).budget == 128


def test_flags_lie_over_json_and_json_over_additional_config(parser):
    config = config_from(
        parser,
        "--additional-config",
        '{"other": 1, "kv_eviction": {"policy": "streaming", "budget": 64, "seed": 9}}',
        "--kv-eviction-config",
        '{"budget": 96, "sink": 32}',
        "--kv-eviction",
        "h2o",
    )
    assert config_of(config) == EvictionConfig(policy="h2o", budget=96, sink=32, seed=9)
    assert config.additional_config["other"] == 1


def test_no_flag_leaves_additional_config_alone(parser):
    assert config_from(parser).additional_config == {}
    assert config_from(parser, "--additional-config", '{"other": 1}').additional_config == {"other": 1}


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (("--kv-eviction", "h20"), ("'h20'", "streaming", "keep-all")),
        (("--kv-eviction", "h2o", "--kv-eviction-budget", "1.5"), ("--kv-eviction-budget", "'1.5'")),
        (("--kv-eviction", "h2o", "--kv-eviction-budget", "32"), ("--kv-eviction-budget 32", "at least 64")),
        (("--kv-eviction", "h2o", "--kv-eviction-sink", "4000"), ("--kv-eviction-sink 4000", "at least 4032")),
        (("--kv-eviction-config", '{"policy": "h2o", "budget": -1}'), ("--kv-eviction-budget got -1", "tokens")),
        (("--kv-eviction-config", '{"budgets": 1}'), ("'budgets'", "known settings")),
        (("--kv-eviction", "h2o", "--kv-cache-dtype", "fp8"), ("--kv-eviction h2o", "--kv-cache-dtype")),
        (
            ("--kv-eviction", "streaming", "--kv-eviction-score-kernel", "fused"),
            ("--kv-eviction streaming", "--kv-eviction-score-kernel fused", "h2o-keydiff", "separate"),
        ),
        (("--kv-eviction", "h2o", "--kv-eviction-trace", "/no/such/folder/t"), ("--kv-eviction-trace",)),
        (("--additional-config", '{"kv_eviction": "h2o"}', "--kv-eviction", "h2o"), ("kv_eviction", "'h2o'")),
        (("--additional-config", '{"kv_eviction": {"sink": "four"}}', "--kv-eviction", "h2o"), ("'four'", "tokens")),
    ],
    ids=lambda value: " ".join(value)[:60],
)
def test_a_wrong_command_line_is_one_line_and_exit_code_2(parser, capsys, argv, words):
    with pytest.raises(SystemExit) as stop:
        config_from(parser, *argv)
    assert stop.value.code == 2
    line = capsys.readouterr().err.rstrip("\n").split("\n")[-1]
    assert "error: " in line
    for word in words:
        assert word in line


def test_help_has_a_group_of_its_own(parser):
    groups = {group.title: group for group in parser._action_groups}
    flags = [option for action in groups["KV eviction"]._group_actions for option in action.option_strings]
    assert "--kv-eviction" in flags and "--kv-eviction-config" in flags
    other = argparse.ArgumentParser()
    assert not any("kv-eviction" in option for action in other._actions for option in action.option_strings)


# ---- what the layers tell ----


class Layer(SimpleNamespace):
    """An attention layer of a loaded model, as far as eviction looks at it."""

    def get_attn_backend(self):
        return SimpleNamespace(get_builder_cls=lambda: self.builder)


def layer(*, builder=ResidentPagesBuilderMixin, sliding_window=None, **impl):
    return Layer(builder=builder, sliding_window=sliding_window, impl=SimpleNamespace(**impl))


@pytest.mark.parametrize(
    ("refused", "word"),
    [
        (layer(builder=AttentionMetadataBuilder), "attention backend other than CPU_ATTN"),
        (layer(alibi_slopes=[0.5]), "ALiBi"),
        (layer(sinks=[1.0]), "learned attention sinks"),
    ],
)
def test_a_layer_is_refused_by_name(refused, word):
    with pytest.raises(EvictionConfigError, match=word) as error:
        check_layers([layer(), refused], EvictionConfig(policy="h2o"))
    one_line(error)


def test_layers_that_are_let_through():
    """Windows stay vLLM's; who does not score may have learned sinks; a layer without attention is none of ours."""
    others = [layer(builder=AttentionMetadataBuilder, sliding_window=512, alibi_slopes=[1.0]), SimpleNamespace()]
    check_layers([layer(), layer(sinks=[1.0]), *others], EvictionConfig(policy="streaming"))


def test_one_kernel_for_attention_and_scores_is_triton_attn_s():
    fused = EvictionConfig(policy="h2o", score_kernel="fused")
    with pytest.raises(EvictionConfigError) as error:
        check_layers([layer()], fused)
    line = one_line(error)
    for words in ("fused in a layer that TRITON_ATTN does not serve", "--kv-eviction-score-kernel separate"):
        assert words in line
    check_layers([layer()], H2O)
    check_layers([layer(builder=SimpleNamespace(reads_resident_pages=True, fuses_page_mass=True))], fused)


def test_the_backends_named_are_those_that_are_replaced():
    from vllm_evict.engine.worker import BACKENDS

    assert sorted(EVICTING_BACKENDS) == sorted(backend.name for backend in BACKENDS)
