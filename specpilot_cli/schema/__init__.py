"""Pydantic models of every file that specpilot reads or writes."""
