"""Commands of the command line that are not stages of training."""
