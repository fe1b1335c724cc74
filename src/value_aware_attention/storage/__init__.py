"""What lies on the disk: written whole or not at all, named where it is damaged, checked by sha256.

Nothing here needs torch.
"""

from value_aware_attention.storage.atomic import (
    check_replaceable,
    held,
    new_file,
    new_files,
    new_folder,
    remove_left_overs,
    write_text,
)
from value_aware_attention.storage.checksums import (
    CARD,
    CHECKSUMS,
    check_checksums,
    checksum,
    listed,
    unnamed,
    write_checksums,
)
from value_aware_attention.storage.full_disk import DiskFull, full_disk_named
from value_aware_attention.storage.json_checksums import with_checksum, without_checksum
from value_aware_attention.storage.reading import read_json, reading

__all__ = [
    "CARD",
    "CHECKSUMS",
    "DiskFull",
    "check_checksums",
    "check_replaceable",
    "checksum",
    "full_disk_named",
    "held",
    "listed",
    "new_file",
    "new_files",
    "new_folder",
    "read_json",
    "reading",
    "remove_left_overs",
    "unnamed",
    "with_checksum",
    "without_checksum",
    "write_checksums",
    "write_text",
]
