"""Speed and memory, measured beside a peer in the same run: python -m benchmarks.<name>."""
