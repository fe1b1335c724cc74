"""Measures speed and memory beside a peer in the same run: python -m benchmarks.<name>.

`python -m benchmarks` says which results are from the present code.
"""
