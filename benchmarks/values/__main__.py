"""python -m benchmarks.values"""

from benchmarks.values import main

if __name__ == "__main__":
    main()
