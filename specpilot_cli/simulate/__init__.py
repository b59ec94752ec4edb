"""Regimes: what batching and two-level verification would do, from recordings and step times."""
