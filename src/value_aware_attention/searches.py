"""Names how hard value-aware keys are searched, for a command line that has not imported torch."""

SEARCHES = ("fast", "default", "best")
