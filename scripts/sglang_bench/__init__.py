"""Parts of `scripts/measure_sglang_w12.py`: servers beside each other, and their clocks."""
