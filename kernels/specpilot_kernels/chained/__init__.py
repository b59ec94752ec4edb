"""Small kernels that stand between two products and let the second start early.

A kernel that takes part in programmatic dependent launch may begin while the one ahead of it still
runs. `w12_linear` uses that to fetch weights before its input exists, if the kernel that makes the
input lets it. Those of other libraries do so when they end, or not at all. These, norms and a gated
activation, start early themselves, do so as soon as their own input exists, and compute what the
others do.
"""
