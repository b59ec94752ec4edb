"""Figures of a report: one per file, each `draw(data) -> ReportFigure`, drawn with matplotlib.

Every figure states its finding in the title and its condition below, carries the table of its
numbers, and takes only plain values, so that it can be drawn from a saved result.
"""
