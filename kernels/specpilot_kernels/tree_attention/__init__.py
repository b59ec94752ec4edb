"""Attention of a draft tree's rows over a paged prefix and over the tree's own ancestors.

`attention` is the operation, for torch on any device, `reference` its readable definition,
`kernels` the Triton kernels, `plan` how work is laid on a GPU, `compact` what moves the accepted
rows' keys and values together afterwards. Importing the package loads none of them.
"""
