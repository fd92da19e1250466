"""`vllm-evict plan`: by hand, against vLLM's own start-up figures, and as the documentation shows it."""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from vllm_evict import cli, pages
from vllm_evict.config import EvictionConfig
from vllm_evict.planning import memory
from vllm_evict.planning.command import DEFAULT_MEMORY_SHARE, DEVICE_DEFAULTS, byte_size
from vllm_evict.planning.memory import CacheLayout, RequestPages, Serving, fit, largest_budget_tokens
from vllm_evict.planning.model import ModelShape, PlanError, kv_dtype_of, shape_of
from vllm_evict.planning.report import REFUSED_KV_DTYPE, REFUSED_LATENT
from vllm_evict.planning.source import config_path, read_config, weight_bytes

ROOT = Path(__file__).parents[2]
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "dtype": "float32",
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
}
GEMMA = LLAMA | {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "head_dim": 64,
    "query_pre_attn_scalar": 64,
    "sliding_window": 64,
}
DEEPSEEK = LLAMA | {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "kv_lora_rank": 512,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 1,
    "n_shared_experts": 1,
    "first_k_dense_replace": 3,
    "num_key_value_heads": 4,
}


def gemma(kinds):
    """`s` a sliding layer, `f` a full one."""
    names = {"s": "sliding_attention", "f": "full_attention"}
    return GEMMA | {"num_hidden_layers": len(kinds), "layer_types": [names[kind] for kind in kinds]}


def write(folder, config):
    path = Path(folder) / "config.json"
    path.write_text(json.dumps(config))
    return path


# ---- by hand ----


@pytest.mark.parametrize(
    ("config", "kv_dtype", "num_ranks", "attention", "layer_token_bytes"),
    [
        # heads * size * (key and value) * bytes of an element
        ({"num_key_value_heads": 4}, "bfloat16", 1, "MHA", 4 * 64 * 2 * 2),
        ({}, "bfloat16", 1, "GQA", 2 * 64 * 2 * 2),
        ({"num_key_value_heads": 1}, "bfloat16", 1, "MQA", 64 * 2 * 2),
        ({"head_dim": 32}, "float32", 1, "GQA", 2 * 32 * 2 * 4),
        ({}, "fp8", 1, "GQA", 2 * 64 * 2),
        ({}, "bfloat16", 2, "GQA", 64 * 2 * 2),
        ({}, "bfloat16", 4, "GQA", 64 * 2 * 2),  # a head cannot be split
        (DEEPSEEK, "bfloat16", 1, "MLA", 576 * 2),
        (DEEPSEEK, "fp8", 1, "MLA", 576),
        (DEEPSEEK, "bfloat16", 8, "MLA", 576 * 2),  # every rank has the whole latent
    ],
)
def test_bytes_of_a_token(config, kv_dtype, num_ranks, attention, layer_token_bytes):
    shape = shape_of(LLAMA | config)
    assert shape.attention == attention
    assert shape.layer_token_bytes(kv_dtype, num_ranks) == layer_token_bytes


def test_real_models(tmp_path):
    """Figures as published: DeepSeek-V3 keeps 70,272 bytes a token (61 layers), Llama 3 8B 128 KiB."""
    deepseek = {"model_type": "deepseek_v3", "num_hidden_layers": 61, "kv_lora_rank": 512, "qk_rope_head_dim": 64}
    shape = shape_of(read_config(write(tmp_path, {**deepseek, "torch_dtype": "bfloat16"})))
    assert shape.layer_token_bytes("bfloat16") * shape.num_full_layers == 70_272
    shape = shape_of(read_config(ROOT / "docs/planning/8b-gqa.json"))
    assert shape.layer_token_bytes("bfloat16") * shape.num_full_layers == 128 * 1024


@pytest.mark.parametrize(
    ("config", "full", "window"),
    [
        (gemma("sssssf"), 1, 5),
        (gemma("ssf") | {"num_kv_shared_layers": 1}, 0, 2),  # the shared layer has no cache of its own
        (LLAMA | {"sliding_window": 128}, 0, 3),
        (LLAMA | {"sliding_window": 128, "use_sliding_window": False}, 3, 0),
        (LLAMA, 3, 0),
    ],
)
def test_sliding_layers(config, full, window):
    shape = shape_of(config)
    assert (shape.num_full_layers, shape.num_window_layers) == (full, window)
    assert (shape.window_tokens is not None) == bool(window)


def test_defaults_of_the_model_type_are_filled_in(tmp_path):
    """An old Gemma 3 config names no layer types; transformers knows that every sixth is full."""
    config = {key: value for key, value in gemma("ssssssssssss").items() if key != "layer_types"}
    shape = shape_of(read_config(write(tmp_path, config)))
    assert (shape.num_full_layers, shape.num_window_layers) == (2, 10)


def test_text_model_inside_another(tmp_path):
    config = {"model_type": "gemma3", "architectures": ["Gemma3ForConditionalGeneration"], "text_config": gemma("sf")}
    shape = shape_of(read_config(write(tmp_path, config)))
    assert (shape.num_full_layers, shape.num_window_layers, shape.num_kv_heads) == (1, 1, 2)


def test_model_type_that_transformers_does_not_know(tmp_path):
    assert shape_of(read_config(write(tmp_path, LLAMA | {"model_type": "brand_new"}))).attention == "GQA"


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"layer_types": ["full_attention", "linear_attention", "full_attention"]}, "linear_attention"),
        ({"attention_chunk_size": 8192}, "chunked local attention"),
        ({"index_topk": 2048}, "sparse-attention index"),
        ({"num_hidden_layers": None}, "num_hidden_layers"),
        ({"dtype": "float8_e4m3fn"}, "--dtype"),
    ],
)
def test_no_number_rather_than_a_wrong_one(config, words):
    with pytest.raises(PlanError, match=words):
        shape_of(LLAMA | config)


def test_cache_dtype_follows_the_checkpoint():
    shape = shape_of(LLAMA)
    assert kv_dtype_of(LLAMA, shape, "auto") == shape.dtype == "bfloat16"  # vLLM runs float32 models so
    scheme = {"num_bits": 8, "type": "float"}
    assert kv_dtype_of({"quantization_config": {"kv_cache_scheme": scheme}}, shape, "auto") == "fp8"
    assert kv_dtype_of({"quantization_config": {"kv_cache_scheme": scheme}}, shape, "bfloat16") == "bfloat16"
    with pytest.raises(PlanError, match="--kv-dtype"):
        kv_dtype_of({"quantization_config": {"kv_cache_scheme": {"num_bits": 4, "type": "int"}}}, shape, "auto")


def test_a_request_by_hand():
    """Context 1000, pages of 32, budget 100, 100 tokens in flight, one of three tables full, window 64."""
    shape = ModelShape("m", "bfloat16", 4, 2, 64, num_full_layers=2, num_window_layers=4, window_tokens=64)
    layout = CacheLayout(shape, Serving(1000, 32, 100, 1, "bfloat16"))
    assert (layout.layers_per_table, layout.num_full_tables, layout.num_window_tables) == (2, 1, 2)
    assert layout.page_bytes == 2 * 32 * (2 * 64 * 2 * 2)
    # full: 1000 tokens are 32 pages. Window: 63 + 1 tokens are 2 pages and one more; 63 + 100 are 6 and one more.
    assert layout.request_pages(EvictionConfig()) == RequestPages(32 + 2 * 3, 32 + 2 * 7)
    # budget 100 is 4 pages: 4 + 1 decoding; 100 tokens in flight are 4 pages: 4 + 4 + 1 prefilling.
    config = EvictionConfig(policy="streaming", budget=100)
    assert layout.request_pages(config) == RequestPages(5 + 2 * 3, 9 + 2 * 7)
    # Never more than there are tokens.
    assert layout.request_pages(EvictionConfig(policy="h2o", budget=5000)).prefilling == 32 + 2 * 7


def test_formulas_of_the_engine_are_used_not_copied():
    assert (memory.steady_pages, memory.peak_pages) == (pages.steady_pages, pages.peak_pages)


@pytest.mark.parametrize("num_pages", [1, 9, 10, 11, 14, 15, 16, 100])
def test_fit(num_pages):
    """One request in its prompt and the others decoding; one page is vLLM's null block."""
    request = RequestPages(decoding=5, prefilling=9)
    count = fit(request, num_pages).num_requests
    held = lambda n: (n - 1) * 5 + 9  # noqa: E731
    assert count == 0 or held(count) <= num_pages - 1
    assert held(count + 1) > num_pages - 1


@pytest.mark.parametrize("num_pages", [12, 30, 60, 100, 130])
@pytest.mark.parametrize("batch", [2, 4])
def test_largest_budget(num_pages, batch):
    """Against trying every budget."""
    layout = CacheLayout(shape_of(LLAMA), Serving(1000, 32, 100, 1, "bfloat16"))

    def fits(budget_pages):
        request = layout.request_pages(EvictionConfig(policy="streaming", budget=32 * budget_pages))
        return fit(request, num_pages).num_requests >= batch

    fitting = [budget_pages for budget_pages in range(2, layout.full_pages) if fits(budget_pages)]
    expected = 32 * max(fitting) if fitting else None
    assert largest_budget_tokens(layout, "streaming", batch, num_pages) == expected


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("80GiB", 80 << 30),
        ("80G", 80 << 30),
        ("80GB", 80 * 10**9),
        ("1.5MiB", 3 << 19),
        ("4096", 4096),
        ("4096B", 4096),
    ],
)
def test_sizes(text, size):
    assert byte_size(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "80 apples", "-1GiB", "80XiB", "80"])
def test_sizes_that_are_none(text):
    with pytest.raises(argparse.ArgumentTypeError):
        byte_size(text)


# ---- weights ----


def test_weights_from_files_and_counted_are_the_same(tmp_path):
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    path = write(tmp_path, LLAMA | {"tie_word_embeddings": True})
    counted = weight_bytes(path, "bfloat16")
    assert "counted" in counted[1]
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path), dtype=torch.float32)
    assert counted[0] == 2 * sum(p.numel() for p in model.parameters())
    model.save_pretrained(tmp_path, max_shard_size="2MB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    from_files = weight_bytes(path, "bfloat16")
    assert from_files[0] == counted[0] and "headers" in from_files[1]  # stored as float32, loaded as bfloat16
    assert weight_bytes(path, "float32")[0] == 2 * counted[0]


def test_weights_whose_size_nobody_knows(tmp_path):
    with pytest.raises(PlanError, match="--weights"):
        weight_bytes(write(tmp_path, LLAMA | {"quantization_config": {"quant_method": "awq"}}), "bfloat16")
    with pytest.raises(PlanError, match="--weights"):
        weight_bytes(write(tmp_path, LLAMA | {"model_type": "brand_new"}), "bfloat16")
    write(tmp_path, LLAMA)
    (tmp_path / "model.safetensors").write_bytes(b"cut")
    with pytest.raises(PlanError, match="--weights"):
        weight_bytes(tmp_path / "config.json", "bfloat16")


# ---- the command ----


def run(capsys, *argv):
    status = cli.main(["plan", *map(str, argv)])
    said = capsys.readouterr()
    return status, said.out, said.err


def test_json_and_table_say_the_same(capsys, tmp_path):
    argv = [write(tmp_path, LLAMA), "--kv-memory", "16MiB", "--device", "cpu", "--budget", "96", "--batch", "20"]
    argv += ["--max-num-batched-tokens", "64", "--weights", "1GiB", "--context", "1000"]
    status, text, _ = run(capsys, *argv)
    status_json, said, _ = run(capsys, *argv, "--json")
    plan = json.loads(said)
    assert status == status_json == 0
    rows = {row["policy"]: row for row in plan["policies"]}
    assert list(rows) == ["full cache", "streaming", "h2o", "keydiff", "h2o-keydiff", "random"]
    assert rows["streaming"]["request_pages_decoding"] == 4 and rows["streaming"]["request_pages_prefilling"] == 6
    assert plan["num_pages"] == (16 << 20) // (3 * 32 * 512)
    for row in rows.values():
        [line] = [line for line in text.splitlines() if line.startswith(row["policy"] + " ")]
        assert line.split()[-2:] == [str(row["requests_that_fit"]), f"{row['vllm_concurrency']:.2f}x"]
    assert plan["advice"] in text.replace("\n         ", "\n")


def test_advice_makes_the_batch_fit(capsys, tmp_path):
    argv = [write(tmp_path, LLAMA), "--kv-memory", "16MiB", "--device", "cpu", "--batch", "12", "--context", "4000"]
    argv += ["--max-num-batched-tokens", "64", "--weights", "1GiB", "--policy", "h2o", "--json"]
    advice = json.loads(run(capsys, *argv)[1])["advice"]
    budget = re.search(r"--kv-eviction h2o --kv-eviction-budget (\d+) ", advice).group(1)
    rows = json.loads(run(capsys, *argv, "--budget", budget)[1])["policies"]
    assert rows[0]["requests_that_fit"] < 12 <= rows[1]["requests_that_fit"]
    rows = json.loads(run(capsys, *argv, "--budget", int(budget) + 32)[1])["policies"]
    assert rows[1]["requests_that_fit"] < 12


def test_advice_to_set_nothing_and_none_that_helps(capsys, tmp_path):
    argv = [
        write(tmp_path, LLAMA),
        "--device",
        "cpu",
        "--weights",
        "1GiB",
        "--context",
        "4000",
        "--json",
        "--kv-memory",
    ]
    assert json.loads(run(capsys, *argv, "1GiB")[1])["advice"].startswith("nothing")
    assert json.loads(run(capsys, *argv, "1MiB")[1])["advice"].startswith("no budget")


def test_only_sliding_layers_leave_nothing_to_evict(capsys, tmp_path):
    path = write(tmp_path, LLAMA | {"model_type": "mistral", "sliding_window": 128})
    _, text, _ = run(capsys, path, "--kv-memory", "1MiB", "--weights", "1GiB")
    assert "nothing to evict" in text and "streaming" not in text


def test_notes(capsys, tmp_path):
    path = write(tmp_path, DEEPSEEK)
    argv = ["--kv-memory", "1GiB", "--weights", "1GiB", "--json", "--kv-dtype", "fp8", "--context", "9000"]
    notes = json.loads(run(capsys, path, *argv)[1])["notes"]
    assert notes[:2] == [REFUSED_LATENT, REFUSED_KV_DTYPE] and "4,096 positions" in notes[2]


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["/no/such/config.json", "--memory", "80GiB"], "there is no file"),
        (["CONFIG", "--memory", "1GiB", "--weights", "1GiB"], "leaves nothing for the cache"),
        (
            ["CONFIG", "--memory", "80GiB", "--weights", "1GiB", "--budget", "16", "--sink", "64"],
            "--kv-eviction-budget",
        ),
    ],
)
def test_one_line_and_status_1(capsys, tmp_path, argv, words):
    path = write(tmp_path, LLAMA)
    status, out, err = run(capsys, *[str(path) if arg == "CONFIG" else arg for arg in argv])
    assert (status, out, err.count("\n")) == (1, "", 1)
    assert err.startswith("vllm-evict plan: error: ") and words in err


def test_name_of_a_model_that_cannot_be_had(capsys):
    """Tests are offline: a name is looked for in the local cache only."""
    status, _, err = run(capsys, "nobody/no-such-model", "--memory", "80GiB")
    assert status == 1 and err.startswith(
        "vllm-evict plan: error: 'nobody/no-such-model' is neither a file nor a folder"
    )


def test_not_a_config(tmp_path):
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(PlanError, match="not a model's config"):
        read_config(config_path(str(tmp_path)))


# ---- the documentation ----

PAGE = ROOT / "docs" / "planning.md"
EXAMPLES = re.findall(r"^    \$ vllm-evict plan (.*)\n((?:    .*\n|\n(?=    ))+)", PAGE.read_text(), re.MULTILINE)


def test_the_documentation_has_examples():
    assert len(EXAMPLES) >= 3
    assert PAGE.read_text().count("$ vllm-evict plan") == len(EXAMPLES)


@pytest.mark.parametrize(("command", "output"), EXAMPLES, ids=[command for command, _ in EXAMPLES])
def test_documented_output(command, output, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    status, out, _ = run(capsys, *shlex.split(command))
    assert status == 0
    documented = [line.removeprefix("    ") for line in output.strip("\n").splitlines()]
    assert out.strip("\n").splitlines() == documented


# ---- against vLLM ----

SERVED = {
    "dtype": "float32",
    "max_model_len": 1000,
    "max_num_batched_tokens": 100,
    "kv_cache_memory_bytes": 16 << 20,
    "block_size": 32,
    "max_num_seqs": 8,
}


def case(config, budget=None, policy="streaming", **arguments):
    if budget is not None:
        arguments["additional_config"] = {"kv_eviction": {"policy": policy, "budget": budget}}
    return {"config": config, "arguments": SERVED | arguments}


CASES = {
    "GQA": case(LLAMA),
    "GQA streaming": case(LLAMA, 100),
    "GQA h2o, chunk in two steps": case(LLAMA, 333, policy="h2o", max_num_batched_tokens=77),
    "GQA keep-all": case(LLAMA, 100, policy="keep-all"),
    "budget above the context": case(LLAMA, 2048),
    "MHA": case(LLAMA | {"num_key_value_heads": 4}),
    "MQA": case(LLAMA | {"num_key_value_heads": 1}, 100),
    "bfloat16, pages of 64": case(LLAMA, 100, dtype="bfloat16", block_size=64),
    "fp8": case(LLAMA, dtype="bfloat16", kv_cache_dtype="fp8_e5m2"),
    "as many sliding as full": case(gemma("sfsfsf")),
    "5 sliding to 1 full": case(gemma("sssssf")),
    "5 sliding to 1 full, streaming": case(gemma("sssssf"), 100),
    "3 sliding, 2 full: at the limit of vLLM's rule": case(gemma("sfsfs")),
    "4 sliding, 3 full: padded": case(gemma("sfsfsfs")),
    "5 sliding, 2 full: padded, streaming": case(gemma("ssfssfs"), 200),
    "all sliding": case(
        LLAMA | {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": 128}
    ),
}

ENGINES = """
import dataclasses, gc, json, pathlib, sys, tempfile
import torch
from transformers.utils.logging import disable_progress_bar
from vllm import LLM
from vllm.config import CacheConfig, ParallelConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms import current_platform
from vllm.usage.usage_lib import UsageContext
from vllm.v1.kv_cache_interface import MLAAttentionSpec
from vllm_evict.engine.configure import CPU_BLOCK_TOKENS
from vllm_evict.engine.support import REFUSALS

torch.set_num_threads(1)
torch.compiler.set_stance("force_eager")
disable_progress_bar()
gc.collect()
gc.freeze()
for name in ("collect", "freeze", "unfreeze"):  # half a second each, eight times a start
    setattr(gc, name, lambda *args: 0)

def start(folder, arguments):
    llm = LLM(folder, load_format="dummy", skip_tokenizer_init=True, enforce_eager=True,
              distributed_executor_backend="uni", seed=0, **arguments)
    core = llm.llm_engine.engine_core.engine_core
    config = core.vllm_config
    cache = core.model_executor.driver_worker.worker.model_runner.kv_cache_config
    found = {
        "num_blocks": cache.num_blocks,
        "concurrency": config.cache_config.kv_cache_max_concurrency,  # the figure of the log line
        "max_in_flight_tokens": config.max_in_flight_tokens,
        "tables": [
            {"spec": type(group.kv_cache_spec).__name__, "layers": len(group.layer_names),
             "page_size_bytes": group.kv_cache_spec.page_size_bytes,
             "max_memory_usage_bytes": group.kv_cache_spec.max_memory_usage_bytes(config)}
            for group in cache.kv_cache_groups
        ],
    }
    llm.llm_engine.engine_core.shutdown()
    # vLLM registers its CPU replacements of Triton kernels per worker, and the second time fails.
    type(current_platform).register_triton_kernel_overrides = classmethod(lambda cls: None)
    return found

cases, deepseek = json.loads(sys.argv[1])
with tempfile.TemporaryDirectory() as folder:
    path = pathlib.Path(folder, "config.json")
    results = {}
    for name, case in cases.items():
        path.write_text(json.dumps(case["config"]))
        results[name] = start(folder, case["arguments"])
    path.write_text(json.dumps(deepseek))
    mla = EngineArgs(folder, skip_tokenizer_init=True).create_model_config()
    spec = dict(block_size=16, num_kv_heads=1, head_size=mla.get_head_size(), dtype=mla.dtype)
    results["MLA"] = {"use_mla": mla.use_mla, "page_size_bytes": MLAAttentionSpec(**spec).page_size_bytes}
    path.write_text(json.dumps(cases["GQA"]["config"]))
    gqa = EngineArgs(folder, skip_tokenizer_init=True).create_model_config()
    results["GQA heads"] = {n: gqa.get_num_kv_heads(ParallelConfig(tensor_parallel_size=n)) for n in (1, 2, 4)}
    results["GQA dtype"] = str(gqa.dtype)
batched, _ = EngineArgs.get_batch_defaults(1)
defaults = {field.name: field.default for field in dataclasses.fields(EngineArgs)}
results["defaults"] = {
    "cpu": [CPU_BLOCK_TOKENS, batched[UsageContext.OPENAI_API_SERVER]],
    "page": CacheConfig.DEFAULT_BLOCK_SIZE,
    "memory share": defaults["gpu_memory_utilization"],
}
results["refused"] = [refusal.feature for refusal in REFUSALS]
print("RESULT " + json.dumps(results))
"""


@pytest.fixture(scope="module")
def vllm():
    """vLLM's figures for CASES: real engines, one after the other, with random weights."""
    environment = os.environ | {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
    }
    argv = [sys.executable, "-c", ENGINES, json.dumps([CASES, DEEPSEEK])]
    done = subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    [line] = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    return json.loads(line.removeprefix("RESULT "))


def planned(name):
    """Our own layout and eviction settings for a case."""
    config, arguments = CASES[name]["config"], CASES[name]["arguments"]
    shape = shape_of(config, arguments["dtype"])
    kv_dtype = kv_dtype_of(config, shape, arguments.get("kv_cache_dtype", "auto"))
    batched_tokens = arguments["max_num_batched_tokens"]
    layout = CacheLayout(shape, Serving(1000, arguments["block_size"], batched_tokens, 1, kv_dtype))
    settings = arguments.get("additional_config", {}).get("kv_eviction", {})
    return layout, EvictionConfig(**settings)


@pytest.mark.parametrize("name", CASES)
def test_pool_and_concurrency_are_those_of_vllm(vllm, name):
    layout, config = planned(name)
    request = layout.request_pages(config)
    found = vllm[name]
    assert found["max_in_flight_tokens"] == layout.serving.max_in_flight_tokens
    assert found["num_blocks"] == CASES[name]["arguments"]["kv_cache_memory_bytes"] // layout.page_bytes
    assert found["concurrency"] == pytest.approx(fit(request, found["num_blocks"]).vllm_concurrency, rel=1e-12)
    pages_at_once = sum(table["max_memory_usage_bytes"] // table["page_size_bytes"] for table in found["tables"])
    assert pages_at_once == request.prefilling
    assert len(found["tables"]) == layout.num_full_tables + layout.num_window_tables
    page_bytes = layout.layer_token_bytes * layout.serving.page_tokens
    assert {table["page_size_bytes"] for table in found["tables"]} == {page_bytes}
    full = [t for t in found["tables"] if t["spec"] in ("FullAttentionSpec", "EvictingAttentionSpec")]
    assert sum(table["layers"] for table in full) == layout.shape.num_full_layers
    assert all(t["spec"] == "EvictingAttentionSpec" for t in full) == (config.enabled or not full)


def test_mla_is_as_large_as_vllm_makes_it(vllm):
    assert vllm["MLA"]["use_mla"]
    assert vllm["MLA"]["page_size_bytes"] == 16 * shape_of(DEEPSEEK).layer_token_bytes("bfloat16")


def test_heads_per_rank_and_dtype_are_those_of_vllm(vllm):
    shape = shape_of(LLAMA)
    for num_ranks, num_heads in vllm["GQA heads"].items():
        assert shape.layer_token_bytes("bfloat16", int(num_ranks)) == num_heads * 64 * 2 * 2
    assert vllm["GQA dtype"] == f"torch.{shape.dtype}"


def test_defaults_are_those_of_vllm(vllm):
    assert vllm["defaults"]["cpu"] == list(DEVICE_DEFAULTS["cpu"][:2])
    assert vllm["defaults"]["page"] == DEVICE_DEFAULTS["gpu"][0]
    assert vllm["defaults"]["memory share"] == DEFAULT_MEMORY_SHARE


def test_notes_on_refusals_are_still_true(vllm):
    """When the engine learns one of these, the plan must stop saying that it is refused."""
    assert any("MLA" in feature for feature in vllm["refused"])
    assert any("quantised KV cache" in feature for feature in vllm["refused"])
