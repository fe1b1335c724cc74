"""Models train on in-context tasks, by the module and by the app at smoke scale."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hydra.utils import instantiate
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM

from pipelines.app import composed
from tests.apps import ROOT, refusal, run_app
from value_aware_attention.measurement.masking import IGNORED
from value_aware_study.data.in_context import AssociativeRecall, InContextBatches, InContextTask
from value_aware_study.training.decoder import build_decoder, sharpest_weights
from value_aware_study.training.modules import InContextTraining
from value_aware_study.training.optimizers import LinearWarmupDecay, Muon

pytestmark = pytest.mark.filterwarnings("ignore")

RECALL = AssociativeRecall(pairs=3, prefix=12, length=18)
SIZES = {
    **{"layers": 2, "width": 16, "heads": 4, "key_value_heads": 2, "feedforward": 16},
    "initializer_range": 0.1,
}
SCORED = {
    "recall": {"accuracy", "exact_match"},
    "markov": {"nats_to_bayes"},
    "copying": {"accuracy", "exact_match"},
}


def module(task: InContextTask = RECALL) -> InContextTraining:
    torch.manual_seed(0)
    model = build_decoder(vocabulary_size=task.vocabulary_size, length=task.length, **SIZES)
    schedule = LinearWarmupDecay(peak=1e-2, warmup_proportion=0.1, steps=9)
    return InContextTraining(model, task=task, schedule=schedule, optimizer=make_muon, seed=3)


def make_muon(groups: list[dict[str, Any]]) -> Muon:
    return Muon(groups, lr=1.0)


def batch(rows: int = 6) -> dict[str, torch.Tensor]:
    return RECALL.draw(rows, torch.Generator().manual_seed(0))


def test_the_loss_is_the_cross_entropy_of_every_answer_and_has_all_gradients() -> None:
    training, rows = module(), batch()
    logits = training.model(rows["input_ids"]).logits
    expected = cross_entropy(logits.mT, rows["labels"], ignore_index=IGNORED)
    loss = training.loss(rows)
    torch.testing.assert_close(loss, expected)
    targets = training.count_targets(rows)
    assert targets == int((rows["labels"] != IGNORED).sum()) > 6 * 3
    torch.testing.assert_close(training.loss(rows, targets=2.0), expected * targets / 2)
    loss.backward()
    assert all(p.grad is not None for p in training.parameters())


def test_the_metrics_are_the_tasks_means_over_rows() -> None:
    training, rows = module(), batch()
    totals = training.totals(rows)
    metrics = training.metrics({name: float(value) for name, value in totals.items()})
    expected = RECALL.metrics(training.model(rows["input_ids"]).logits, rows)
    assert metrics.keys() == {"loss", "accuracy", "exact_match"}
    assert metrics["loss"] == pytest.approx(float(expected["nats"].mean()), rel=1e-5)
    assert metrics["accuracy"] == pytest.approx(float(expected["accuracy"].mean()))


def test_heads_that_score_all_keys_alike_weigh_each_by_one_over_their_number() -> None:
    training, rows = module(), batch()
    attention = training.model.config._attn_implementation
    training.model.model.layers[1].self_attn.q_proj.weight.data.zero_()
    first, second = sharpest_weights(training.model, rows, RECALL.prefix)
    alike = sum(1 / (n + 1) for n in range(12, 18, 2)) / 3  # keys are asked at every other position
    assert second == pytest.approx([alike] * 4, abs=1e-4)
    assert all(alike < weight <= 1 for weight in first)
    assert training.model.config._attn_implementation == attention


def test_heads_that_do_not_divide_are_refused() -> None:
    for sizes in ({"heads": 3}, {"key_value_heads": 3}, {"width": 20}):
        with pytest.raises(ValueError, match="must be a multiple of"):
            build_decoder(vocabulary_size=9, length=9, **SIZES | sizes)


@pytest.mark.parametrize("task", SCORED)
def test_the_app_writes_a_model_and_its_metrics(task: str, tmp_path: Path) -> None:
    run_app(f"train_in_context task={task}", tmp_path)
    outputs, name = tmp_path / "outputs/smoke", f"in_context_{task}"
    record = json.loads((outputs / f"metrics/in_context/{name}.json").read_text())
    assert [set(point) for point in record["curve"]] == [{"step", "loss"} | SCORED[task]] * 2
    assert [len(heads) for heads in record["sharpest_weights"]] == [4, 4]
    check_model(outputs / "models" / name, task, record)


def check_model(folder: Path, task: str, record: dict[str, Any]) -> None:
    """Checks that the Auto class loads the model and that its held-out loss is the recorded one."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        cfg = composed("train_in_context", [f"task={task}", "scale=smoke"]).train_in_context
    rows = instantiate(cfg.task)
    batches = InContextBatches(rows, steps=2, seed=cfg.seed, split="validation", **cfg.batches)
    nats = []
    for batch in (batches[0], batches[1]):
        with torch.no_grad():
            nats.append(rows.metrics(model(batch["input_ids"]).logits, batch)["nats"])
    assert record["loss"] == pytest.approx(float(torch.cat(nats).mean()), rel=1e-5)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("task=chess", ("chess", "copying", "markov", "recall")),
        ("task=recall in_context.recall.pairs=1", ("pairs is 1", "at least 2")),
        ("task=recall in_context.recall.prefix=13", ("prefix 13", "even")),
        ("task=markov in_context.markov.states=1", ("states is 1", "at least 2")),
        ("task=copying task.steps=0", ("task.steps is 0", "at least 1")),
        ("in_context.heads=3", ("in_context.width is 16", "in_context.heads, which is 3")),
        ("training.log_every=0", ("training.log_every is 0",)),
        ("trainer.accumulate=3", ("batch_size", "is 4", "trainer.accumulate, which is 3")),
    ],
)
def test_what_cannot_be_trained_ends_with_one_line(
    tmp_path: Path, override: str, words: tuple[str, ...]
) -> None:
    line = refusal(f"train_in_context {override}", tmp_path)
    assert all(word in line for word in words), line
    assert not (tmp_path / "outputs").exists()
