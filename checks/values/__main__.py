"""python -m checks.values"""

from checks.values.suite import main

if __name__ == "__main__":
    main()
