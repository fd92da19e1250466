"""StreamingLLM and H2O in transformers' own `generate`, on the embedded model.

Two prompts of different lengths in one batch; the long one is twice the budget. Prints the answers under each
cache, and which tokens of prompt and answer are still held in the last layer.

    python examples/reference_generate.py
"""

import itertools

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, set_seed

from vllm_evict.embedded_model import embedded_model_path
from vllm_evict.reference import EvictingCache, H2OCache, StreamingCache

BUDGET_TOKENS = 96
SINK_TOKENS = 4
NEW_TOKENS = 32

STORY = (
    "Anna keeps bees behind her house in the hills. In spring she checks every hive, feeds the weak ones and makes "
    "room for the strong. In summer the children of the village come to watch her work; she gives them honey on "
    "bread and tells them what the bees are doing. In autumn she takes the honey, but never all of it. In winter she "
    "repairs the frames, reads about mites, and listens at the hives with her ear against the wood. "
)
PROMPTS = [
    STORY * 2 + "Question: what does Anna keep behind her house?",
    "Write one sentence about the sea.",
]


def main() -> None:
    torch.set_num_threads(1)
    set_seed(0)
    path = embedded_model_path()
    # Only eager attention computes the weights that H2O counts.
    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager", dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(path, padding_side="left")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    chats = [[{"role": "user", "content": prompt}] for prompt in PROMPTS]
    inputs = tokenizer.apply_chat_template(
        chats, add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True
    )
    prompt_tokens = inputs["attention_mask"].sum(dim=1).tolist()
    print(f"prompts of {prompt_tokens} tokens, budget {BUDGET_TOKENS}, {SINK_TOKENS} sinks")

    caches = {
        "everything": DynamicCache(),
        "streaming": StreamingCache(SINK_TOKENS, BUDGET_TOKENS - SINK_TOKENS),
        "h2o, each head its own": H2OCache(BUDGET_TOKENS, SINK_TOKENS, BUDGET_TOKENS // 2),
        "h2o, one decision for all": H2OCache(BUDGET_TOKENS, SINK_TOKENS, BUDGET_TOKENS // 2, one_decision=True),
    }
    for name, cache in caches.items():
        print(f"\n=== {name}")
        generate = dict(inputs, past_key_values=cache, max_new_tokens=NEW_TOKENS, do_sample=False)
        if isinstance(cache, EvictingCache):
            with cache.attached_to(model):
                output = model.generate(**generate)
        else:
            output = model.generate(**generate)
        for row, answer in enumerate(tokenizer.batch_decode(output[:, inputs["input_ids"].shape[1] :], True)):
            print(f"[{row}] {answer.strip()!r}")
            if isinstance(cache, EvictingCache):
                # long [num_kv_heads, num_slots], -1 where a shorter row is padded
                positions = cache.layers[-1].positions[row].tolist()
                same = positions.count(positions[0]) == len(positions)
                for head, held in enumerate(positions[:1] if same else positions):
                    print(f"    {'all heads' if same else f'head {head}'}:", spans(p for p in held if p >= 0))


def spans(places) -> str:
    """`0-3 7 9-10` for 0, 1, 2, 3, 7, 9, 10."""
    runs = itertools.groupby(enumerate(places), key=lambda pair: pair[1] - pair[0])
    ends = [(run[0][1], run[-1][1]) for run in (list(group) for _, group in runs)]
    return " ".join(f"{first}" if first == last else f"{first}-{last}" for first, last in ends)


if __name__ == "__main__":
    main()
