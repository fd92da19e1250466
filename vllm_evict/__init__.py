"""KV cache eviction for vLLM."""

__version__ = "0.1.0"
