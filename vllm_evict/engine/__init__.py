"""The only package that imports vLLM. Importing it changes nothing."""
