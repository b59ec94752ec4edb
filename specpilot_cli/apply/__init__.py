"""Apply a recipe: prepare, measure, serve stock and tuned side by side, judge, report."""
