"""What the compiler makes of the Triton kernels, without a GPU: registers, shared memory, spills.

    vllm-evict bench kernels [--arch 80 90]

Every kernel is compiled for NVIDIA GPUs by compute capability, with the types and alignments that vLLM's tensors have;
the `cuobjdump` in Triton's wheel reads the result. Says nothing about speed, but registers spilled to a stack, or so
much shared memory that few programs fit a multiprocessor, would show.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from vllm_evict.bench.report import markdown_table

ARCHITECTURES = (80, 90)
HEAD_SIZES, HEADS_PER_KV_HEAD = (64, 128, 256), (1, 4, 8)

_INT32, _FLOAT32 = "*i32", "*fp32"
#: Of every parameter that is neither a count nor a stride (int32).
_TYPES = {
    **dict.fromkeys(("block_table", "token", "row", "visible_tokens", "num_tokens", "enabled"), _INT32),
    **dict.fromkeys(("table", "slots", "lens", "out_table", "out_lens"), _INT32),
    **dict.fromkeys(("log_sum_exp", "k_scale", "sums", "peaks", "normaliser", "page_mass"), _FLOAT32),
    **dict.fromkeys(("page_directions", "program_directions", "anchors", "key_difference"), _FLOAT32),
    **dict.fromkeys(("split_output", "split_peak", "split_total"), _FLOAT32),
    **dict.fromkeys(("factor", "softcap", "weight"), "fp32"),
}


@dataclass(frozen=True)
class Variant:
    """A kernel and what it is compiled for.

    Args:
        kernel: name in `vllm_evict.scores.triton_kernels` or `triton_decode_kernels`.
        constants: of its `constexpr` parameters and of those that are None.
        query, keys: Triton's names of their types.
        least_architecture: where `keys` exists.

    """

    kernel: str
    constants: dict[str, Any]
    query: str = "bf16"
    keys: str = "bf16"
    least_architecture: int = 80

    def describe(self) -> str:
        c = self.constants
        words = [f"head {c['HEAD_SIZE']}"] if "HEAD_SIZE" in c else []
        if "HEADS_PER_KV_HEAD" in c:
            queries = f", {c['TILE_QUERIES']} queries" if "TILE_QUERIES" in c else ""
            words.append(f"{c['HEADS_PER_KV_HEAD']}:1{queries}")
        if "PAGE_TOKENS" in c:
            words.append(f"page {c['PAGE_TOKENS']}")
        if "peaks" in c:
            words.append("log-sum-exp given")
        if self.keys != self.query:
            words.append(f"keys {self.keys}")
        elif self.query != "bf16":
            words.append(self.query)
        return ", ".join(words)


@dataclass(frozen=True)
class Resources:
    """Registers and bytes of stack (spilled registers) of a thread, bytes of shared memory of a program."""

    registers: int
    shared_bytes: int
    stack_bytes: int


@dataclass(frozen=True)
class Row:
    variant: Variant
    resources: dict[int, Resources] = field(default_factory=dict)  # by architecture


def variants() -> Iterator[Variant]:
    """What vLLM's models make of the kernels: bfloat16 unless said otherwise."""
    from vllm_evict.scores.triton import BLOCK, BLOCK_ROWS, KEY_TILE_TOKENS, NORMALISER_BLOCK, page_sums_constants
    from vllm_evict.scores.triton_decode import decode_constants

    def page_sums(page: int, heads: int, head_size: int, queries: int, **options: Any) -> Variant:
        without = options.pop("without", "log_sum_exp")
        constants = page_sums_constants(
            page_tokens=page,
            heads_per_kv_head=heads,
            head_size=head_size,
            queries_per_row=queries,
            has_softcap=False,
        )
        return Variant("page_sums", {**constants, without: None, "k_scale": None}, **options)

    def attend_tiles(page: int, heads: int, head_size: int, element_bytes: int = 2, **types: str) -> Variant:
        constants = decode_constants(
            page_tokens=page,
            heads_per_kv_head=heads,
            head_size=head_size,
            element_bytes=element_bytes,
            has_softcap=False,
        )
        return Variant("attend_tiles", constants, **types)

    for head_size in HEAD_SIZES:
        for heads in HEADS_PER_KV_HEAD:
            yield page_sums(16, heads, head_size, 1)
        yield page_sums(32, 4, head_size, 1)
        yield page_sums(16, 4, head_size, 1, without="peaks")
        yield page_sums(16, 4, head_size, 64)
    yield page_sums(16, 4, 128, 1, keys="fp8e4nv", least_architecture=90)
    yield page_sums(16, 4, 128, 1, keys="fp8e5")
    yield page_sums(16, 4, 128, 1, query="fp32", keys="fp32")
    pages = {"PAGE_TOKENS": 16, "TILE_PAGES": 4}
    yield Variant("normalisers", {**pages, "BLOCK": NORMALISER_BLOCK})
    adding = {**pages, "BLOCK": BLOCK, "BLOCK_HEADS": BLOCK_ROWS}
    yield Variant("add_to_page_mass", adding)
    yield Variant("add_to_page_mass", {**adding, "peaks": None, "normaliser": None})
    for head_size in HEAD_SIZES:
        head = {"HEAD_SIZE": head_size, "HEAD_SIZE_PADDED": head_size}
        yield Variant("key_direction_sums", {"PAGE_TOKENS": 16, "TILE_PAGES": KEY_TILE_TOKENS // 16, **head})
        yield Variant("key_anchors", {**head, "BLOCK": BLOCK_ROWS})
        yield Variant("add_to_key_difference", {"PAGE_TOKENS": 16, **head, "BLOCK": BLOCK_ROWS})
    yield Variant("gather_row", {"PAGE_TOKENS": 16, "BLOCK": BLOCK})
    for head_size in HEAD_SIZES:
        for heads in HEADS_PER_KV_HEAD:
            yield attend_tiles(16, heads, head_size)
        yield attend_tiles(64, 4, head_size)
        yield Variant(
            "join_splits", {**pages, "HEAD_SIZE": head_size, "HEAD_SIZE_PADDED": head_size, "BLOCK": BLOCK_ROWS}
        )
    yield attend_tiles(128, 4, 128)
    yield attend_tiles(16, 4, 128, 4, query="fp32", keys="fp32")


def compile_for(variant: Variant, architecture: int) -> Resources:
    """Compile for a compute capability (90 for 9.0)."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from vllm_evict.scores import triton_decode_kernels, triton_kernels

    home = triton_kernels if hasattr(triton_kernels, variant.kernel) else triton_decode_kernels
    function = getattr(home, variant.kernel)
    types = {
        **_TYPES,
        **dict.fromkeys(("query", "output"), f"*{variant.query}"),
        **dict.fromkeys(("key_cache", "value_cache"), f"*{variant.keys}"),
    }
    signature = {
        name: "constexpr" if name in variant.constants else types.get(name, "i32") for name in function.arg_names
    }
    # As the JIT finds vLLM's tensors: pointers and the strides of what attention takes and gives are multiples of 16.
    aligned = {
        (parameter.num,): [["tt.divisibility", 16]]
        for parameter in function.params
        if (signature[parameter.name].startswith("*") and not parameter.do_not_specialize_on_alignment)
        or parameter.name.startswith(("query_", "key_", "value_", "output_"))
    }
    compiled = triton.compile(
        ASTSource(function, signature, dict(variant.constants), aligned), target=GPUTarget("cuda", architecture, 32)
    )
    registers, stack_bytes = _registers_and_stack(compiled.asm["cubin"])
    return Resources(registers, compiled.metadata.shared, stack_bytes)


def _registers_and_stack(cubin: bytes) -> tuple[int, int]:
    import triton

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        report = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", report)
    assert found is not None, report
    return int(found[1]), int(found[2])


def measure(architectures: tuple[int, ...] = ARCHITECTURES) -> Iterator[Row]:
    for variant in variants():
        yield Row(variant, {a: compile_for(variant, a) for a in architectures if a >= variant.least_architecture})


def table(rows: list[Row], architectures: tuple[int, ...] = ARCHITECTURES) -> str:
    """Markdown."""
    header = ["kernel", "for"]
    for a in architectures:
        header += [f"sm_{a}: registers", "shared memory, bytes", "spilled, bytes"]
    cells = []
    for row in rows:
        line = [f"`{row.variant.kernel}`", row.variant.describe()]
        for a in architectures:
            r = row.resources.get(a)
            line += ["-", "-", "-"] if r is None else [str(r.registers), f"{r.shared_bytes:,}", str(r.stack_bytes)]
        cells.append(line)
    return markdown_table(header, cells)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--arch", type=int, nargs="+", default=[*ARCHITECTURES], help="compute capabilities, 90 for 9.0 (default: all)"
    )


def run(args: argparse.Namespace) -> int:
    try:
        import triton
    except ImportError:
        print("bench kernels: Triton is not installed; `pip install triton==3.7.1` (no GPU needed)")
        return 1
    architectures = tuple(args.arch)
    print(f"Triton {triton.__version__}, 4 warps.\n")
    print(table([*measure(architectures)], architectures))
    return 0
