"""This app was removed in 1.1. For one release its command names what replaces it."""

import sys

if __name__ == "__main__":
    print(
        "error: pipelines.decode was removed in 1.1: python -m pipelines.probe model=PATH "
        "text=FILE caches=true measures compressed caches of your model",
        file=sys.stderr,
    )
    sys.exit(2)
