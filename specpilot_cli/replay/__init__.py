"""Exact replay: tokens that a tree policy would accept, from one lattice recording (paper §6.4).

Replay needs no GPU and no engine. It is exact because greedy verification only ever accepts the
target's own next token, and the recording holds those; only near-ties of the target can differ.
"""
