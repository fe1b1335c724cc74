"""python -m checks.kills"""

from checks.kills import main

if __name__ == "__main__":
    main()
