"""Time and peak memory of one encoder layer, or of its attention alone, for every method."""
