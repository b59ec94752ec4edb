"""The cost model: how far a deployment is from its ceiling, and why (paper §3.1, Eq. 3 and 4)."""
