"""The paper's recipe, from vocabularies and targets to the settings of Table 4 and appendix A.2."""

import json
from pathlib import Path

import numpy as np
import pytest
from omegaconf import OmegaConf

from pipelines.app import composed as compose
from value_aware_study.data.batches import masked_sequences
from value_aware_study.data.corpora import write_corpus
from value_aware_study.data.text import HubArticles
from value_aware_study.data.tokenization import ByteLevelBPE, WordLevel
from value_aware_study.data.tokens import write_tokens
from value_aware_study.evaluation.texts import context_windows
from value_aware_study.training.optimizers import InverseSquareRoot

ROOT = Path(__file__).parents[1]
WIKITEXT = ROOT / "tests/data/fixtures/wikitext103"


def test_the_word_level_vocabulary_of_wikitext_2() -> None:
    """Its published 33,278 types have `<unk>` and the line's end; `<s>` and `<pad>` are new."""
    words = [f"w{number}" for number in range(33_278 - 2)]
    text = "\n".join([*words, "<unk>", *words[:9]])
    assert len(WordLevel(padding_multiple=8).build([text])) == 33_280


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """Writes a corpus from files in WikiText's layout, with a cache folder of its own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))
        splits = {"train": "train", "test": "evaluation"}
        wikitext = HubArticles(
            path=str(WIKITEXT), name="wikitext-103-v1", splits=splits, field="text"
        )
        write_corpus({"wikitext103": wikitext}, tmp_path / "corpus", 0, 0.5)
    return tmp_path / "corpus"


def lines(split: str) -> list[str]:
    file = WIKITEXT / "wikitext-103-v1" / f"{split}.jsonl"
    return [json.loads(line)["text"] for line in file.read_text().splitlines()]


@pytest.mark.parametrize("score_first", [True, False])
def test_every_word_and_line_end_of_wikitext_is_a_target_once(
    corpus: Path, tmp_path: Path, score_first: bool
) -> None:
    built = WordLevel().build(lines("train"))
    write_tokens(
        corpus=corpus, sources={"wikitext103": {}}, build=WordLevel().build, seed=0,
        scratch=tmp_path, stream_folder=tmp_path / "causal", score_first=score_first,
    )  # fmt: skip
    stream = np.load(tmp_path / "causal/evaluation.npy")
    targets = [
        int(token)
        for _, first, end in context_windows(len(stream) - 1, 16, 12)
        for token in stream[first + 1 : end + 1]
    ]
    words = [word for line in lines("test") for word in [*line.split(), "</s>"]]
    expected = built.convert_tokens_to_ids(words)
    assert built.unk_token_id in expected and len(set(expected)) > 20
    assert targets == (expected if score_first else expected[1:])
    assert stream[0] == (built.eos_token_id if score_first else expected[0])
    train = np.load(tmp_path / "causal/train.npy")  # every word and line end, articles in any order
    assert len(train) == sum(len(line.split()) + 1 for line in lines("train"))


def test_eight_wrapped_instances_are_one_long_sequence(corpus: Path, tmp_path: Path) -> None:
    counts = write_tokens(
        corpus=corpus, sources={"wikitext103": {"train": 17}}, seed=0, scratch=tmp_path,
        build=ByteLevelBPE(vocabulary_size=280, training_characters=10**5).build,
        instance_folder=tmp_path / "masked", instance_lengths=[16],
    )["sources"]["wikitext103"]["train"]  # fmt: skip
    assert counts["instances"] == 17 and counts["instance_tokens"] == 17 * 14  # 510 in Table 3
    folder = tmp_path / "masked"
    instances = np.load(folder / "16/wikitext103/train.npy")
    long = masked_sequences(folder=folder, split="train", length=128, fraction=0.15)
    assert len(long) == 2
    for index, sequence in enumerate(long.tokens(range(2)).numpy()):
        parts = sequence.reshape(8, 16)
        assert (parts[:, 0] == 0).all() and (parts[:, -1] == 2).all()  # each is <s> ... </s>
        assert np.array_equal(parts, instances[8 * index : 8 * index + 8])


def test_inverse_square_root_is_fairseqs_at_every_step() -> None:
    """fairseq adds a constant while it warms up, then multiplies a decay factor."""
    schedule = InverseSquareRoot(peak=5e-4, warmup_steps=4000)
    rate, expected = 1e-7, []
    for n in range(31_520):
        expected.append(rate if n < 4000 else 5e-4 * 4000**0.5 * n**-0.5)
        rate += (5e-4 - 1e-7) / 4000
    np.testing.assert_allclose([schedule(n) for n in range(31_520)], expected, rtol=1e-9)


MASKED = {
    "positions.block": 512,
    "module.schedule.peak": 5e-6,
    "module.schedule.warmup_proportion": 0.1,
    "module.schedule.steps": 2_476_000,
    "fit.steps": 2_476_000,
    "module.schedule._target_": "value_aware_study.training.optimizers.LinearWarmupDecay",
    "module.optimizer._target_": "value_aware_study.training.optimizers.BertAdam",
    "module.optimizer.betas": [0.9, 0.98],
    "module.optimizer.weight_decay": 0.01,
    "module.optimizer.max_grad_norm": 5.0,
    "positions.dropout": 0.0,
    "seed": 42,
    "trainer.accumulate": 1,
    "fraction": 0.15,
}
"""Table 4's settings of both lengths, which read 8 x 512 tokens a step."""
SETTINGS: dict[str, tuple[str, dict[str, object]]] = {
    "ROBERTA-512": (
        "train_masked length=short",
        MASKED | {"positions.length": 512, "batches.batch_size": 8},
    ),
    "ROBERTA-4096": (
        "train_masked length=long",
        MASKED | {"positions.length": 4096, "batches.batch_size": 1},
    ),
    "causal": (
        "train_causal",
        {
            "model.layers": 6,
            "model.width": 512,
            "model.heads": 8,
            "batches.length": 512,
            "batches.batch_size": 128,
            "fit.steps": 20 * 1_576,
            "module.schedule.peak": 5e-4,
            "module.schedule.warmup_steps": 4000,
            "module.schedule._target_": "value_aware_study.training.optimizers.InverseSquareRoot",
            "module.optimizer._target_": "torch.optim.AdamW",
            "module.optimizer.betas": [0.9, 0.98],
            "module.optimizer.eps": 1e-8,
            "module.optimizer.weight_decay": 0.01,
        },
    ),
    "evaluation": ("evaluate", {"task.length": 512, "task.context": 400, "task.units": None}),
    "tokens": ("tokens", {"score_first": True}),
}
"""Table 4 and appendix A.2: an app with its group, and the values of its keys."""


@pytest.mark.parametrize(("command", "expected"), SETTINGS.values(), ids=SETTINGS)
def test_the_papers_scale_has_the_settings_of_table_4_and_appendix_a2(
    command: str, expected: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    app, *group = command.split()
    cfg = compose(app, ["scale=paper", *group])[app]
    assert {key: OmegaConf.select(cfg, key) for key in expected} == expected
