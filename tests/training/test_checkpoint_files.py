"""Checkpoints survive a full disk."""

from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from value_aware_attention.files import DiskFull
from value_aware_study.training.fit import CheckpointFiles


def test_the_last_checkpoint_survives_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = CheckpointFiles(tmp_path / "run")
    files.folder.mkdir()
    files.save_checkpoint({"global_step": 1}, files.last)

    error = RuntimeError("[enforce fail at inline_container.cc:672] . unexpected")
    error.__cause__ = OSError(28, "No space left on device")
    monkeypatch.setattr(torch, "save", Mock(side_effect=error))
    with pytest.raises(DiskFull, match=f"^no space left in {files.folder}"):
        files.save_checkpoint({"global_step": 2}, files.last)
    assert [file.name for file in files.folder.iterdir()] == ["last.ckpt"]
    assert list(files.whole()) == [files.last]
    assert torch.load(files.last)["global_step"] == 1
