"""Recordings of a running SGLang server: drive prompts, collect its lattices, join the two."""
