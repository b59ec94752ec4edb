"""Turn a BF16 checkpoint into a W12 folder and back, bit for bit (paper §4.1)."""
