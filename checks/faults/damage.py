"""Cuts files and changes bits: each must be refused by name, or computed again as it was."""

import random
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from checks.faults.apps import (
    CELLS,
    CHECKPOINTS,
    DAMAGED,
    FaultCase,
    Trial,
    Undisturbed,
    difference,
    run,
    tree,
)
from checks.faults.kills import begin

READ: Mapping[str, tuple[str, str]] = {
    "corpus jsonl": ("tokens", "outputs/*/corpus/*/train.jsonl"),
    "corpus metrics": ("tokens", "outputs/*/metrics/corpus.json"),
    "tokens, causal": ("train_causal", "outputs/*/tokens/causal/train.npy"),
    "tokens, held out": ("evaluate, causal", "outputs/*/tokens/causal/evaluation.npy"),
    "tokens, masked": ("train_masked", "outputs/*/tokens/masked/**/train.npy"),
    "tokens' tokenizer.json": ("train_causal", "outputs/*/tokens/causal/tokenizer/tokenizer.json"),
    "tokens' SHA256SUMS": ("train_causal", "outputs/*/tokens/causal/SHA256SUMS"),
    "last.ckpt": ("train_causal", f"{CHECKPOINTS}/*/last.ckpt"),
    "weights": ("evaluate, causal", "outputs/*/models/causal_exponential/model.safetensors"),
    "weights to start from": ("train_masked, long", "outputs/*/models/masked_short/*.safetensors"),
    "config.json": ("evaluate, causal", "outputs/*/models/causal_exponential/config.json"),
    "tokenizer.json": ("evaluate, causal", "outputs/*/models/causal_exponential/tokenizer.json"),
    "SHA256SUMS": ("evaluate, causal", "outputs/*/models/causal_exponential/SHA256SUMS"),
    "cell": ("evaluate, masked", f"{CELLS}/*.json"),
    "record": ("report", "outputs/*/records/*.json"),
    "explored heads": ("report", "outputs/*/explored/*.json"),
    "survey record": ("report", "outputs/*/records/survey/*.json"),
    "tokens' metrics": ("report", "outputs/*/metrics/tokens.json"),
    "training metrics": ("report", "outputs/*/metrics/train/*.json"),
    "record to publish": ("publish", "outputs/*/records/*.json"),
}
"""Kind of file -> the stage that reads it, and the pattern of its files"""


def damages(run_: Undisturbed, numbers: random.Random) -> list[Trial]:
    """Cuts every kind of file at a random byte, and changes one random bit."""
    return [
        partial(damaged, run_, kind, damage, random.Random(numbers.random()))
        for kind in READ
        for damage in (cut, flip)
    ]


def damaged(
    run_: Undisturbed,
    kind: str,
    damage: Callable[[Path, random.Random], None],
    numbers: random.Random,
) -> FaultCase:
    """Damages one file of a kind and runs the stage that reads it."""
    stage, pattern = READ[kind]
    before, after = run_.trees(stage)
    if pattern.startswith(CHECKPOINTS):
        begin(run_, stage)
    else:
        run_.after(stage) if pattern.startswith(CELLS) else run_.before(stage)
    file = numbers.choice([file for file in sorted(run_.root.glob(pattern)) if file.is_file()])
    damage(file, numbers)
    name, earlier = file.relative_to(run_.root).as_posix(), tree(run_.root)
    ended = run(stage, run_.root)
    left = tree(run_.root)
    if ended.code == 0:
        outcome = "results as undisturbed"
        undamaged = {name: before[name]} if name in before and name in left else {}
        wrong = difference({**left, **undamaged}, after)
    else:
        outcome = "refused by name"
        named = ended.refusal is not None and str(file.parent) in ended.refusal
        wrong = difference(files(left), files(earlier)) if named else ended.told
    fault = f"{kind}: {damage.__name__}"
    return FaultCase(kind=DAMAGED, stage=stage, fault=fault, outcome=outcome, wrong=wrong)


def files(names: Mapping[str, str]) -> dict[str, str]:
    return {name: digest for name, digest in names.items() if digest != "folder"}


def cut(file: Path, numbers: random.Random) -> None:
    content = file.read_bytes()
    file.write_bytes(content[: numbers.randrange(len(content))])


def flip(file: Path, numbers: random.Random) -> None:
    content = bytearray(file.read_bytes())
    place = numbers.randrange(8 * len(content))
    content[place // 8] ^= 1 << place % 8
    file.write_bytes(content)
