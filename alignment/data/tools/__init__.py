"""Commands on data files: check them, show examples, split them, derive new rows."""
