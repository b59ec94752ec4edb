"""W12, the lossless 12-bit form of BF16 weights: layout, container, reference and fast codec.

`layout` holds the constants and the bit order, `encoded` the container, `reference` the readable
definition, `codec` the compiled encoder and decoder. Importing the package loads none of them.
"""
