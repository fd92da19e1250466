"""Capability 4: LoRA while pages go. The oracle is the model with the adapter's product added to its weights."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.engine import checks
from tests.engine.harness import PAGE_TOKENS as P
from tests.engine.harness import Run, random_prompt

RANK, ALPHA = 8, 16
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "up_proj")


def write_adapter(model: Path, folder: Path, *, seed: int) -> tuple[Path, Path]:
    """A random adapter in the format of peft, and the model that has it merged in."""
    generator = torch.Generator().manual_seed(seed)
    weights = load_file(model / "model.safetensors")
    adapter, merged = {}, dict(weights)
    for name, weight in weights.items():
        if name.split(".")[-2] in TARGETS:
            rows, columns = weight.shape
            a = torch.randn(RANK, columns, generator=generator) / columns**0.5
            b = torch.randn(rows, RANK, generator=generator) * 0.3
            prefix = f"base_model.model.{name.removesuffix('.weight')}"
            adapter |= {f"{prefix}.lora_A.weight": a, f"{prefix}.lora_B.weight": b}
            merged[name] = weight + ALPHA / RANK * b @ a
    paths = folder / "adapter", folder / "merged"
    for path in paths:
        path.mkdir()
    save_file(adapter, paths[0] / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": ALPHA, "bias": "none"}
    (paths[0] / "adapter_config.json").write_text(json.dumps(settings | {"target_modules": list(TARGETS)}))
    save_file(merged, paths[1] / "model.safetensors", metadata={"format": "pt"})
    for file in model.glob("*.json"):
        (paths[1] / file.name).write_text(file.read_text())
    return paths


def seen_by(run: Run, model: Path, names: set[str]) -> Run:
    """The part of a run that `model` explains."""
    return replace(run, model=model, answers={n: a for n, a in run.answers.items() if n in names}, _references={})


@pytest.mark.parametrize("policy", [None, "streaming", "h2o"])
def test_two_adapters_and_none_in_one_batch(engine, models, tmp_path, policy):
    """With None it is vLLM alone, which shows that the oracle is right. All three share their prompt's first pages.

    On CPU vLLM 0.32 gives a request without adapter, beside one with, the adapter in the last slot: that stays empty.
    """
    from vllm.lora.request import LoRARequest

    base = models("tiny")
    folders = {name: tmp_path / name for name in ("first", "second")}
    for folder in folders.values():
        folder.mkdir()
    made = {name: write_adapter(base, folder, seed=len(name)) for name, folder in folders.items()}
    prefix = random_prompt(5 * P, seed=1)
    eviction = None if policy is None else {"policy": policy, "budget": 4 * P}
    with engine(eviction=eviction, enable_lora=True, max_loras=3, max_lora_rank=RANK) as served:
        adapters = {n: LoRARequest(n, number, str(made[n][0])) for number, n in enumerate(made, start=1)}
        runs = []
        for again in ("", "-again"):  # the second round finds pages in the prefix cache, each those of its own adapter
            served.begin()
            for number, name in enumerate(("first", "second", "none")):
                prompt = prefix + random_prompt(9 + number, seed=number)
                served.add(name + again, prompt, max_tokens=3 * P, lora_request=adapters.get(name))
            runs.append(served.drain())
    assert len({answer.tokens[0] for answer in runs[0].answers.values()}) == 3
    assert all(runs[1].rows(name)[0].num_cached_tokens for name in runs[1].answers)
    by_model = {base: {"none", "none-again"}} | {merged: {n, f"{n}-again"} for n, (_, merged) in made.items()}
    for run in runs:
        for model, names in by_model.items():
            part = seen_by(run, model, names)
            checks.logits(part)
            checks.greedy_tokens(part)
            if policy is not None:
                checks.choices(part)
            if policy == "h2o":
                checks.masses(part)
        for check in (checks.positions, checks.pool, checks.slots, checks.attended, checks.written_once):
            check(run)
        if policy is not None:
            assert all(run.lines(name) for name in run.answers)
            checks.held_pages(run)
            checks.hashed_pages_are_exact(run)
