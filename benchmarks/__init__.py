"""Speed and memory, measured beside a peer in the same run: python -m benchmarks.<name>.

`python -m benchmarks` says which of the results are of the present code.
"""
