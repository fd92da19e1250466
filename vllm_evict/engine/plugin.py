"""Entry point ``vllm.general_plugins``: runs in every vLLM process, several times.

vLLM swallows an import error here, so this module stays trivial.
"""


def register() -> None:
    """Teach vLLM the ``--kv-eviction`` flags. Without them nothing else changes."""
    from vllm_evict.engine.compat import hook_engine_args

    hook_engine_args()
