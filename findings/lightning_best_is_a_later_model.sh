#!/usr/bin/env bash
# One would guess that the score in a checkpoint's name, and best_model_score, were measured with the weights in that file.
# With every_n_train_steps equal to val_check_interval, Lightning saves before it validates: each file bears the score of the validation before.
# best_model_path is then the model of one interval after the best one, which no validation ever judged to be so.
# pytorch-lightning 2.6.6 with torch 2.13.0. 2026-11-27.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet --disable-pip-version-check torch==2.13.0 pytorch-lightning==2.6.6 numpy==2.4.6
venv/bin/python -I - <<'PYTHON'
import logging
import os
import sys
import warnings

import pytorch_lightning as lightning
import torch
from pytorch_lightning.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader

warnings.simplefilter("ignore")
logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)


class Walk(lightning.LightningModule):
    """A weight that grows by 0.1 a step. It is best at 4, after 40 steps."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))

    def training_step(self, batch, index):
        return -self.weight.sum()

    def validation_step(self, batch, index):
        self.log("loss", (self.weight.detach() - 4).abs().sum())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


saver = ModelCheckpoint("saved", "{step}-{loss:.1f}", monitor="loss", save_top_k=-1, every_n_train_steps=10)
trainer = lightning.Trainer(
    max_steps=60,
    val_check_interval=10,
    num_sanity_val_steps=0,
    accelerator="cpu",
    logger=False,
    callbacks=[saver],
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(Walk(), DataLoader(torch.zeros(80, 1)), DataLoader(torch.zeros(1, 1)))
best = torch.load(saver.best_model_path, weights_only=False)
loss = (best["state_dict"]["weight"] - 4).abs().item()

print("pytorch-lightning", lightning.__version__, "torch", torch.__version__)
print("guess: best_model_path is the model of step 40, the best of steps 10, 20, ... 60")
print(f"seen:  it is {os.path.basename(saver.best_model_path)}: its score is {saver.best_model_score:.1f}, the loss of its weights {loss:.1f}")
if best["global_step"] == 40 or abs(loss - 1) > 1e-3:
    sys.exit("changed: the best checkpoint is the best model")
PYTHON
