"""Measure what a GPU reaches: read bandwidth, GEMM rate, and GEMM time against rows."""
