"""Paired timing of two servers: is the candidate faster than the baseline, beyond noise?"""
