"""The HTML report: its page, charts and tables, for one run or a whole recipe."""
