"""Page mass: the attention probability that queries put on each KV page, the H2O score of a page.

reference.py says what it is, in plain torch; cpu.py computes it fast from vLLM's packed CPU cache.
"""
