"""StreamingLLM and H2O token by token on Hugging Face models: to read, to teach, to test against.

    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager")
    cache = H2OCache(max_budget=512, sink_size=4, recent_size=256)
    with cache.attached_to(model):
        model.generate(**prompts, past_key_values=cache)

========================  ===============================================================
``choose.kept_slots``     the rule of both papers, ten lines
``h2o``, ``streaming``    one cache each: what a token is worth
``cache``                 around each attention: mask, positions, weights, then evict
``layer``                 what one layer holds: keys, values, and where they came from
``mask``                  who may look at whom when the cache has gaps
``rotary``                positions inside the cache
``support``               where a model's attention is; what is refused
``perplexity``            ``python -m vllm_evict.reference.perplexity --text FILE``
========================  ===============================================================

Needs torch and transformers 5, never vLLM.
"""

from vllm_evict.reference.cache import EvictingCache
from vllm_evict.reference.choose import kept_slots
from vllm_evict.reference.h2o import H2OCache
from vllm_evict.reference.streaming import StreamingCache

__all__ = ["EvictingCache", "H2OCache", "StreamingCache", "kept_slots"]
