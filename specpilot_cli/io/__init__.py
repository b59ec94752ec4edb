"""Bytes on disk: atomic writes, YAML, JSON, JSONL, safetensors, hashes. No domain knowledge."""
