"""python -m checks.kills"""

from checks.kills.suite import main

if __name__ == "__main__":
    main()
