"""The table of what we rely on in vLLM: complete, true of the installed one, and able to tell another one."""

import ast
from importlib.util import find_spec
from pathlib import Path

import pytest

import vllm_evict
from vllm_evict.engine.upstream import Upstream
from vllm_evict.engine.upstream_table import HOOKS

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


def test_a_changed_comment_is_not(installed, tmp_path):
    folder = altered(installed, tmp_path, "v1/core/sched/scheduler.py", "# NOTE(woosuk)", "# Note (woosuk)")
    assert Upstream(folder).changed(tuple(hook for hook in HOOKS if "sched.scheduler" in hook.module)) == []


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


def test_every_overridden_method_is_in_the_table():
    called = {
        node.attr
        for tree in ENGINE
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "super()"
    }
    assert {"schedule", "build", "new_step_starts"} <= called
    assert called - MEMBERS == {"bind"}, "our own"
