"""Names the levels of value-aware search, for command lines that have not imported torch."""

SEARCHES = ("fast", "default", "best")
