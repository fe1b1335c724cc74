"""The study: what reproduces the paper with the library, from corpus to report."""
