"""Entry point ``vllm.general_plugins``: runs in every vLLM process, several times.

vLLM swallows an import error here, so this module stays trivial.
"""


def register() -> None:
    """Teach vLLM the ``--kv-eviction`` flags and ``--attention-backend XFORMERS``. Nothing else changes."""
    from vllm_evict.engine.compat import hook_engine_args, xformers_backend

    hook_engine_args()
    xformers_backend()
