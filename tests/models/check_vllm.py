"""Do the tiny models mean the same to vLLM and to Hugging Face?

    python -m tests.models.check_vllm [NAME ...]

One in-process CPU engine per model, plugin off; greedy tokens and logits must agree. Exits 1 on the
first difference. Not part of the tests (a minute and a half); run it after changing a model.
"""

from __future__ import annotations

import os
import sys
import tempfile

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_PLUGINS", "")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import torch

from tests.models.plant import plant
from tests.models.tiny import MODELS, VOCAB_TOKENS
from tests.oracle.forward import greedy_reference, load, masked_forward
from tests.oracle.visibility import visibility_mask

PROMPT_LENGTHS_TOKENS = (1, 33, 300)
NEW_TOKENS = 48
LOGIT_TOLERANCE = 1e-4
BUILDERS = MODELS | {"plant": plant}


def engine(path: str):
    from vllm import LLM

    return LLM(
        path,
        skip_tokenizer_init=True,
        dtype="float32",
        enforce_eager=True,
        distributed_executor_backend="uni",
        kv_cache_memory_bytes=16 << 20,
        block_size=32,
        max_model_len=1024,
        max_num_batched_tokens=128,  # the longest prompt is prefilled in chunks
        max_logprobs=-1,
        logprobs_mode="raw_logits",
    )


def check(name: str) -> float:
    """Largest logit difference between vLLM and the reference over all generated tokens."""
    from vllm import SamplingParams

    generator = torch.Generator().manual_seed(11)
    prompts = [torch.randint(0, VOCAB_TOKENS, (n,), generator=generator).tolist() for n in PROMPT_LENGTHS_TOKENS]
    with tempfile.TemporaryDirectory() as folder:
        BUILDERS[name](folder)
        model = load(folder)
        sampling = SamplingParams(
            temperature=0.0, max_tokens=NEW_TOKENS, logprobs=-1, detokenize=False, ignore_eos=True
        )
        outputs = engine(folder).generate([{"prompt_token_ids": p} for p in prompts], sampling, use_tqdm=False)
    worst = 0.0
    for prompt, output in zip(prompts, outputs, strict=True):
        tokens = list(output.outputs[0].token_ids)
        expected = greedy_reference(model, prompt, NEW_TOKENS, 32, ())
        if tokens != expected:
            raise SystemExit(f"{name}, prompt of {len(prompt)} tokens: vLLM {tokens}, Hugging Face {expected}")
        sequence = prompt + tokens
        logits, _ = masked_forward(model, sequence, visibility_mask(len(sequence), 32, ()), attentions=False)
        for step, row in enumerate(output.outputs[0].logprobs):
            seen = torch.tensor([row[token].logprob for token in range(VOCAB_TOKENS)])
            worst = max(worst, (seen - logits[len(prompt) - 1 + step]).abs().max().item())
    return worst


def main(names: list[str]) -> int:
    for name in names or BUILDERS:
        difference = check(name)
        print(f"{name}: greedy tokens equal, largest logit difference {difference:.1e}", flush=True)
        if difference > LOGIT_TOLERANCE:
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
