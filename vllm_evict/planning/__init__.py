"""How much memory a model's KV cache takes, without and with eviction. Imports no vLLM, and torch only to count."""
