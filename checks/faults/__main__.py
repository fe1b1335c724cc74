"""python -m checks.faults"""

from checks.faults import main

if __name__ == "__main__":
    main()
