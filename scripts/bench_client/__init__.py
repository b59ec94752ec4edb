"""Parts of `scripts/measure_bench_client.py`: a server of known speed, and what the client adds."""
