"""Gated DeltaNet on draft trees."""
