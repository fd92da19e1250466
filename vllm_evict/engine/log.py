"""One logger. Its name lies below ``vllm.`` because only there vLLM installs a handler."""

from vllm.logger import init_logger

logger = init_logger("vllm.vllm_evict")
