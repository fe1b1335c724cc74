"""python -m checks.values"""

from checks.values import main

if __name__ == "__main__":
    main()
