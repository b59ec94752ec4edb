"""Recordings with known faults, for measuring and testing `specpilot diagnose`."""
