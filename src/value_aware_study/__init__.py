"""The study: it reproduces the paper with the library, from corpus to report."""
