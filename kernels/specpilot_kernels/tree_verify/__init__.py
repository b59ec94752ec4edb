"""Gated DeltaNet layers on draft trees, without a state per row (paper §4.2).

`verify` gives the outputs of all rows of a step and records what a commit replays; `commit` moves
the states of all layers on along the accepted path. `gdn_reference` is the readable definition,
`stock` what bits are compared with. Importing the package loads none of them.
"""
