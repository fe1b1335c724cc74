"""Puts a file of somebody else where a stage writes a folder: it must stay."""

import random
from collections.abc import Mapping
from functools import partial

from checks.faults.apps import Undisturbed, difference, run, tree
from checks.faults.case import FOREIGN, FaultCase, Trial

FOLDERS: Mapping[str, str] = {
    "corpus": "outputs/smoke/corpus",
    "tokens": "outputs/smoke/tokens",
    "train_causal": "outputs/smoke/models/causal_exponential",
    "train_masked": "outputs/smoke/models/masked_short",
    "train_masked, long": "outputs/smoke/models/masked_long",
    "train_in_context": "outputs/smoke/models/in_context_recall",
    "report": "report",
    "publish": "results/smoke",
}
"""Stage -> the folder that it replaces"""
OWN = "thesis.docx"


def foreign_files(run_: Undisturbed, numbers: random.Random) -> list[Trial]:
    """Runs stages that replace a folder over a foreign file, alone and beside earlier outputs."""
    places = ("alone", "in a folder below", "beside earlier outputs")
    return [partial(foreign, run_, stage, place) for stage in FOLDERS for place in places]


def foreign(run_: Undisturbed, stage: str, place: str) -> FaultCase:
    """Puts a file into a stage's folder and runs the stage."""
    run_.after(stage) if place == "beside earlier outputs" else run_.before(stage)
    file = run_.root / FOLDERS[stage] / ("below" if place == "in a folder below" else "") / OWN
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("years of work")
    before = tree(run_.root)
    own = {name: digest for name, digest in before.items() if name not in run_.trees(stage)[1]}
    ended = run(stage, run_.root)
    if ended.code == 0:
        outcome, wrong = "left as it is", difference(tree(run_.root), run_.trees(stage)[1] | own)
    else:
        names = (OWN, f"{file.parent} is")  # its own, or of the folder that is not ours either
        named = ended.refusal is not None and any(name in ended.refusal for name in names)
        outcome, wrong = "refused by its name", difference(tree(run_.root), before)
        wrong = wrong or ("" if named else ended.told)
    return FaultCase(
        kind=FOREIGN, stage=stage, fault=f"a file {place}", outcome=outcome, wrong=wrong
    )
