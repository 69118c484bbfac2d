"""The HTML report of a run, or of several runs compared."""
