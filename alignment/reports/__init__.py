"""Pages of finished runs: HTML reports of a run or a recipe, model cards, comparisons, and `doctor`'s findings."""
