"""What can be measured of a KV page: page mass (attention it received, H2O), key difference (how odd its keys are).

reference.py says what they are, in plain torch; cpu.py and cpu_keys.py compute them fast from vLLM's packed CPU cache,
triton.py from its paged GPU cache.
"""
