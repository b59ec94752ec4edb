"""Engines behind one interface: SGLang over HTTP and the reference engine in this repository."""
