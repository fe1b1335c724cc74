"""Checkpoints survive a full disk and a second run at their folder."""

from pathlib import Path

import pytest
import torch

from value_aware_attention.files import DiskFull, new_folder
from value_aware_study.training import checkpoints
from value_aware_study.training.checkpoints import CheckpointFiles


def test_the_last_checkpoint_survives_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = CheckpointFiles(tmp_path / "run")
    files.folder.mkdir()
    files.save_checkpoint({"global_step": 1}, files.last)

    def full(state: object, file: object) -> None:
        try:
            raise OSError(28, "No space left on device")
        except OSError as error:
            raise RuntimeError("[enforce fail at inline_container.cc:672] . unexpected") from error

    monkeypatch.setattr(checkpoints.torch, "save", full)
    with pytest.raises(DiskFull, match=f"^no space left in {files.folder}"):
        files.save_checkpoint({"global_step": 2}, files.last)
    assert [file.name for file in files.folder.iterdir()] == ["last.ckpt"]
    assert list(files.whole()) == [files.last]
    assert torch.load(files.last)["global_step"] == 1


def test_a_second_run_is_refused_by_the_folders_name(tmp_path: Path) -> None:
    files = CheckpointFiles(tmp_path / "run")
    line = f"^{files.folder} belongs to a training run that is still going: wait for it, or train"
    with files.held(), pytest.raises(ValueError, match=line), CheckpointFiles(files.folder).held():
        pass
    with files.held(), new_folder(tmp_path / "model"):
        pass
