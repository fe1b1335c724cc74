"""Prints requirements.lock from reports of `pip install --dry-run --report`: versions and hashes.

python .ci/lock.py REPORT...    # of one platform; a package of two builds has the hashes of both
"""

import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

HEAD = """\
# requirements.txt and requirements-dev.txt with the hashes of the archives that are tested:
# {platform}, torch from PyPI, with what it needs of CUDA, and as PyTorch's build
# for CPUs. CONTRIBUTING.md says how to install with it and how to make it again; `make` does not
# enforce it.
"""


def lines(reports: Iterable[dict]) -> Iterator[str]:
    """A pinned requirement and its archives' hashes, in the order of names."""
    found: dict[str, set[str]] = {}
    for item in (item for report in reports for item in report["install"]):
        version = item["metadata"]["version"].partition("+")[0]
        pinned = f"{item['metadata']['name']}=={version}"
        digest = item["download_info"]["archive_info"]["hashes"]["sha256"]
        found.setdefault(pinned, set()).add(digest)
    for pinned, digests in sorted(found.items(), key=lambda pair: pair[0].lower()):
        yield " ".join([pinned, *(f"--hash=sha256:{one}" for one in sorted(digests))]) + "\n"


if __name__ == "__main__":
    read = [json.loads(Path(name).read_text()) for name in sys.argv[1:]]
    on = read[0]["environment"]
    platform = f"CPython {on['python_version']}, {on['platform_system']} {on['platform_machine']}"
    sys.stdout.writelines([HEAD.format(platform=platform), *lines(read)])
