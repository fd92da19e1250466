"""Benchmarks: what eviction costs and what it brings (`vllm-evict bench NAME`)."""
