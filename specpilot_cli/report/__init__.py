"""Renderers: JSON, terminal tables, figures, one self-contained HTML page."""
