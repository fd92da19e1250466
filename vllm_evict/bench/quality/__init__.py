"""How good the answers stay: `vllm-evict bench quality`. Results and conclusions: docs/quality.md."""
