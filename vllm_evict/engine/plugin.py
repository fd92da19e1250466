"""Entry point ``vllm.general_plugins``: runs in every vLLM process, several times.

vLLM swallows an import error here, so this module stays trivial.
"""


def register() -> None:
    """Teach vLLM the ``--kv-eviction`` flags and ``--attention-backend XFORMERS``. Nothing else changes."""
    from vllm_evict.engine.compat import add_attention_backend, hook_engine_args

    hook_engine_args()
    add_attention_backend("XFORMERS", "vllm_evict.engine.attention.xformers.XFormersBackend")
