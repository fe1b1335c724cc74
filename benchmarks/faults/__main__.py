"""python -m benchmarks.faults"""

from benchmarks.faults import main

if __name__ == "__main__":
    main()
