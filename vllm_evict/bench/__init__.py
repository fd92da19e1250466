"""Benchmarks: what the plugin costs and what it brings."""
