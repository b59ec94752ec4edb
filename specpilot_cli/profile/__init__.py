"""Step profiles from the traces of a real engine: read, attribute, count, sum up per step."""
