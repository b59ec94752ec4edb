"""Find where a speculative-decoding server loses time, fix it without changing its output."""

__version__ = "0.1.0"
