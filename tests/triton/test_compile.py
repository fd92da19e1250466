"""The Triton kernels compiled for real GPUs, without one."""

from pathlib import Path

import pytest

pytest.importorskip("triton", reason="no Triton here")

from vllm_evict.bench.kernel_table import ARCHITECTURES, Row, compile_for, measure, table, variants

ROOT = Path(__file__).parents[2]
SMALL_KERNELS = ("normalisers", "add_to_page_mass", "key_anchors", "gather_row", "join_splits")


@pytest.fixture(scope="module", autouse=True)
def no_cache_left_behind(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))
        yield


def chosen(kernel, **constants):
    """The first variant of a kernel that has these constants."""
    return next(
        v for v in variants() if v.kernel == kernel and all(v.constants.get(k) == c for k, c in constants.items())
    )


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_decode_of_llama_3_fits_a_multiprocessor_many_times(architecture):
    variant = chosen("page_sums", HEAD_SIZE=128, HEADS_PER_KV_HEAD=4, TILE_QUERIES=4)
    found = compile_for(variant, architecture)
    assert found.stack_bytes == 0
    # 8 programs of 128 threads: 65536 registers, 164 KiB of shared memory (sm_80; 228 KiB of sm_90).
    assert 8 * 128 * found.registers <= 65536 * 1.25 and found.shared_bytes < 24 << 10


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_attention_and_page_mass_of_llama_3_fit_a_multiprocessor_three_times(architecture):
    found = compile_for(chosen("attend_tiles", HEAD_SIZE=128, HEADS_PER_KV_HEAD=4), architecture)
    assert found.stack_bytes == 0
    # Three programs have 96 KiB of K and V under way.
    assert 3 * 128 * found.registers <= 65536 and found.shared_bytes < 48 << 10


@pytest.mark.parametrize("kernel", ["key_direction_sums", "add_to_key_difference", *SMALL_KERNELS])
def test_others_do_not_spill(kernel):
    assert compile_for(chosen(kernel), 90).stack_bytes == 0


@pytest.mark.parametrize("keys", ["fp8e4nv", "fp8e5", "fp32"])
def test_key_types_compile(keys):
    assert compile_for(next(v for v in variants() if v.keys == keys), 90).stack_bytes == 0


@pytest.mark.slow
def test_nothing_spills_up_to_heads_of_128_and_the_document_is_current():
    rows = [*measure()]
    for row in rows:
        if row.variant.constants.get("HEAD_SIZE", 0) <= 128:
            assert all(found.stack_bytes == 0 for found in row.resources.values()), row
    assert table(rows) in (ROOT / "docs" / "performance.md").read_text()


def test_the_table():
    variant = next(v for v in variants() if v.keys == "fp8e4nv")
    lines = table([Row(variant, {90: compile_for(variant, 90)})]).splitlines()
    assert "sm_80: registers" in lines[0] and "sm_90: registers" in lines[0]
    cells = [cell.strip() for cell in lines[2].split("|")[1:-1]]
    assert cells[:5] == ["`page_sums`", variant.describe(), "-", "-", "-"]
    assert int(cells[5]) > 0 and int(cells[6].replace(",", "")) > 0 and cells[7] == "0"
