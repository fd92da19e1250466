"""The table of what we rely on in vLLM: complete, true of the installed one, and able to tell another one."""

import ast
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest

import vllm_evict
from vllm_evict.engine.upstream import Upstream
from vllm_evict.engine.upstream_table import HOOKS, Hook

ENGINE = [ast.parse(path.read_text()) for path in (Path(vllm_evict.__file__).parent / "engine").rglob("*.py")]
KNOWN = {(hook.module, hook.name.split(".")[0]) for hook in HOOKS}
MEMBERS = {hook.name.split(".")[-1] for hook in HOOKS} | {name for hook in HOOKS for name in hook.has}


@pytest.fixture(scope="module")
def installed() -> Path:
    return Path(find_spec("vllm").submodule_search_locations[0]).parent


def altered(installed: Path, folder: Path, file: str, old: str, new: str) -> Path:
    """vLLM with one change in one file; all other files are links to the installed ones."""
    source, target = installed / "vllm", folder / "vllm"
    for part in Path(file).parts:
        target.mkdir()
        for path in source.iterdir():
            if path.name != part:
                (target / path.name).symlink_to(path)
        source, target = source / part, target / part
    text = source.read_text()
    assert old in text
    target.write_text(text.replace(old, new))
    return folder


def module_of(file: str) -> str:
    return ".".join(("vllm", *Path(file).with_suffix("").parts))


def test_installed(installed):
    upstream = Upstream(installed)
    assert upstream.mismatches() == []
    assert upstream.changed() == []


@pytest.mark.parametrize(
    ("file", "old", "new", "fault"),
    [
        (
            "v1/core/single_type_kv_cache_manager.py",
            "request_id: str, num_tokens: int, num_tokens_main_model: int",
            "request_id: str, num_tokens: int, num_main_tokens: int",
            "allocate_new_blocks: takes (request_id, num_tokens, num_main_tokens), we override",
        ),
        (
            "v1/core/single_type_kv_cache_manager.py",
            "apply_admission_cap: bool = False,\n        prefill_end: int = 0,",
            "apply_admission_cap: bool = False,\n        prefill_end: int = 0,\n        one_more: int = 0,",
            "get_num_blocks_to_allocate: takes",
        ),
        (
            "v1/attention/backends/flash_attn.py",
            "kv_cache: torch.Tensor,\n        attn_metadata: FlashAttentionMetadata,",
            "attn_metadata: FlashAttentionMetadata,\n        kv_cache: torch.Tensor,",
            "FlashAttentionImpl.forward: takes (layer, query, key, value, attn_metadata, kv_cache,",
        ),
        (
            "v1/attention/backend.py",
            "block_table_tensor: torch.Tensor",
            "blocks: torch.Tensor",
            "has no block_table_tensor",
        ),
        (
            "v1/attention/backends/registry.py",
            "class_path: str",
            "path: str",
            "register_backend: does not take class_path",
        ),
        ("v1/worker/gpu/model_runner.py", "self.req_states", "self.states", "has no req_states"),
        ("v1/worker/gpu/states.py", "index_to_req_id", "ids", "has no index_to_req_id"),
        (
            "v1/core/sched/scheduler.py",
            "self.kv_cache_manager.new_step_starts()",
            "pass",
            "Scheduler.schedule: does not use new_step_starts any more",
        ),
        (
            "v1/outputs.py",
            "    @abstractmethod\n    def get_output(",
            "    @abstractmethod\n    def close(self): ...\n\n    @abstractmethod\n    def get_output(",
            "AsyncModelRunnerOutput: is abstract without close",
        ),
        ("v1/metrics/loggers.py", "class StatLoggerManager", "class StatLoggers", "no StatLoggerManager"),
        (
            "v1/worker/block_table.py",
            "    block_size: int,\n    *,",
            "    block_size: int,\n    page: int,\n    *,",
            "needs page",
        ),
    ],
)
def test_one_change_is_seen(installed, tmp_path, file, old, new, fault):
    hooks = tuple(hook for hook in HOOKS if hook.module == module_of(file))  # all of them take 2 s
    faults = Upstream(altered(installed, tmp_path, file, old, new)).mismatches(hooks)
    assert any(fault in line for line in faults), faults
    assert len(faults) <= 4, "one change, and what follows from it"


def test_a_file_that_is_gone(installed, tmp_path):
    folder = altered(installed, tmp_path, "v1/request.py", "import", "import")
    (folder / "vllm/v1/request.py").unlink()
    hooks = tuple(hook for hook in HOOKS if hook.module == "vllm.v1.request")
    assert Upstream(folder).mismatches(hooks) == [f"{hook}: no such module" for hook in hooks]


def test_a_changed_body_is_to_be_read_again(installed, tmp_path):
    folder = altered(installed, tmp_path, "v1/core/block_pool.py", "block.ref_cnt += 1", "block.ref_cnt += 2")
    upstream, hooks = Upstream(folder), tuple(hook for hook in HOOKS if hook.module == "vllm.v1.core.block_pool")
    assert upstream.mismatches(hooks) == []
    assert [line.split(":")[0] for line in upstream.changed(hooks)] == ["vllm.v1.core.block_pool.BlockPool.touch"]


def test_a_body_may_be_any_of_those_that_were_read(installed):
    upstream, touch = Upstream(installed), Hook("vllm.v1.core.block_pool", "BlockPool.touch")
    other, here = "0" * 12, upstream.fingerprint(touch)
    for bodies, num_changed in ((here, 0), (f"{here} {other}", 0), (f"{other} {here}", 0), (f"{other} {other}", 1)):
        assert len(upstream.changed((replace(touch, body=bodies),))) == num_changed


def test_a_changed_comment_is_not(installed, tmp_path):
    folder = altered(installed, tmp_path, "v1/core/sched/scheduler.py", "# NOTE(woosuk)", "# Note (woosuk)")
    assert Upstream(folder).changed(tuple(hook for hook in HOOKS if "sched.scheduler" in hook.module)) == []


@pytest.mark.parametrize("module", ["vllm.entrypoints.launchers.cli_args", "vllm.entrypoints.common.cli_args"])
@pytest.mark.parametrize(("defined", "faults"), [("make_arg_parser", 0), ("make_parser", 1)])
def test_the_parser_of_vllm_serve_is_found_where_it_is_defined(tmp_path, module, defined, faults):
    """In `launchers` up to vLLM 0.32, in `common` from 0.33 on; `vllm serve` imports it from there."""
    for name, text in (
        (module, f"def {defined}(parser): ..."),
        ("vllm.entrypoints.cli.serve", f"from {module} import make_arg_parser"),
    ):
        file = tmp_path.joinpath(*name.split(".")).with_suffix(".py")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    hooks = tuple(hook for hook in HOOKS if hook.name == "make_arg_parser")
    assert len(hooks) == 1
    assert Upstream(tmp_path).mismatches(hooks) == [f"{hook}: no make_arg_parser" for hook in hooks][:faults]


def test_an_output_that_is_not_there_yet_may_ask_for_both_methods(tmp_path):
    """The second one is new in vLLM 0.33. Another one still is a fault."""
    (tmp_path / "vllm/v1").mkdir(parents=True)
    methods = {
        name: f"    @abstractmethod\n    def {name}(self): ...\n"
        for name in ("get_output", "get_kv_connector_output", "get_moved")
    }
    hooks = tuple(hook for hook in HOOKS if hook.name == "AsyncModelRunnerOutput")
    for names, num_faults in (
        (("get_output",), 0),
        (("get_output", "get_kv_connector_output"), 0),
        (("get_output", "get_moved"), 1),
    ):
        body = "".join(methods[name] for name in names)
        (tmp_path / "vllm/v1/outputs.py").write_text(f"class AsyncModelRunnerOutput(ABC):\n{body}")
        faults = Upstream(tmp_path).mismatches(hooks)
        assert faults == [f"{hooks[0]}: is abstract without get_moved, which we do not define"][:num_faults]


def test_every_import_is_in_the_table():
    imported = {
        (node.module, alias.name)
        for tree in ENGINE
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm"
        for alias in node.names
    }
    modules = {hook.module for hook in HOOKS}
    assert len(imported) > 50
    unknown = {(module, name) for module, name in imported - KNOWN if f"{module}.{name}" not in modules}
    assert unknown == {("vllm.platforms", "current_platform")}, "made by __getattr__; its class is in the table"


def test_what_is_read_off_an_imported_module_is_in_the_table():
    """`envs.VLLM_...`, `selector._cached_get_attn_backend`: names that no import statement has."""
    modules = {hook.module for hook in HOOKS}
    read = set()
    for tree in ENGINE:
        nodes = list(ast.walk(tree))
        imported = {
            alias.asname or alias.name: f"{node.module}.{alias.name}"
            for node in nodes
            if isinstance(node, ast.ImportFrom)
            for alias in node.names
            if f"{node.module}.{alias.name}" in modules
        }
        read |= {
            (imported[node.value.id], node.attr)
            for node in nodes
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in imported
        }
    assert {module for module, _ in read} >= {"vllm.envs", "vllm.v1.attention.selector"}
    ours = {("vllm.engine.arg_utils", "register_engine_args_plugin")}  # in a vLLM with our patch
    assert read - KNOWN == ours


def test_every_overridden_method_is_in_the_table():
    called = {
        node.attr
        for tree in ENGINE
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "super()"
    }
    assert {"schedule", "build", "new_step_starts"} <= called
    assert called - MEMBERS == {"bind"}, "our own"
