"""Times a whole training step of the causal LM with each kernel, beside transformers' GPT-2.

    python -m benchmarks.training_step                # about six minutes on two cores
    python -m benchmarks.training_step --seconds 60   # at most, but three rounds
    python -m benchmarks.training_step --quick        # tiny; writes nothing

One step is forward, loss over the whole vocabulary of all 512 targets, backward and AdamW's update,
in fp32, dropout off: 6 layers of width 512, 8 heads, 512 tokens, a vocabulary of 50,000. GPT-2 has
the same shape, with learned positions and PyTorch's fused attention. The first GPT-2 has its
default activation gelu_new and the logits of all targets in memory. The second has our activation,
ReLU. The third also has our loss, in chunks of targets: its remaining difference to ours is the
model. All take a step in every round, in turn. Writes results/benchmarks/training_step.json and
.md.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW
from transformers import GPT2Config, GPT2LMHeadModel

from benchmarks.record import HOW, finish, header, markdown, options, setting
from benchmarks.rounds import Seconds, in_rounds, ratio, seconds, verdict
from value_aware_attention.kernels import Elu, Exponential, Kernel, Polynomial
from value_aware_attention.models import CausalLanguageModel
from value_aware_study.training.modules import CausalTraining
from value_aware_study.training.optimizers import InverseSquareRoot

SECONDS = 300.0
ADAMW = partial(AdamW, lr=1.0, betas=(0.9, 0.98), eps=1e-8, weight_decay=0.01, fused=True)
KERNELS: dict[str, Kernel] = {
    "exponential": Exponential(),
    "polynomial": Polynomial(),
    "elu": Elu(),
}
PEER, WITH_RELU, ALIKE = "GPT-2", "GPT-2 with ReLU", "GPT-2 with ReLU and our loss"
PEERS = (PEER, WITH_RELU, ALIKE)
Step = Callable[[Any], object]


@dataclass(frozen=True)
class Shape:
    """Holds the sizes of the models and their batches."""

    layers: int = 6
    width: int = 512
    heads: int = 8
    length: int = 512
    batch: int = 2
    vocabulary: int = 50_000

    def __str__(self) -> str:
        return (
            f"{self.layers} layers, width {self.width}, {self.heads} heads, batch {self.batch} x "
            f"{self.length}, vocabulary {self.vocabulary:,}, fp32"
        )


TINY = Shape(layers=1, width=16, heads=2, length=8, vocabulary=300)


def main() -> None:
    arguments = options(__doc__, SECONDS).parse_args()
    shape, limit = (TINY, 0.0) if arguments.quick else (Shape(), arguments.seconds)
    record = header("training_step") | measure(shape, limit)
    finish("training_step", record, page(record), keep=not arguments.quick)


def measure(shape: Shape, limit: float) -> dict[str, Any]:
    """Measures the seconds of every step, round by round, and the share of loading."""
    generator = torch.Generator().manual_seed(0)
    size = (shape.batch, shape.length + 1)
    rows = torch.randint(shape.vocabulary, size, generator=generator)
    steps = all_steps(shape)
    clocks = {name: partial(seconds, partial(step, rows)) for name, step in steps.items()}
    spent = in_rounds(clocks, [("exponential", peer) for peer in PEERS], limit)
    return {"shape": str(shape), "seconds": spent}


def all_steps(shape: Shape) -> dict[str, Step]:
    """Returns the compared steps by name."""
    steps = {name: ours(shape, kernel) for name, kernel in KERNELS.items()}
    relu = gpt2(shape, activation_function="relu")
    steps[PEER], steps[WITH_RELU] = own_step(gpt2(shape)), own_step(relu)
    return steps | {ALIKE: _step_of(_training(AsOurs(gpt2(shape, activation_function="relu"))))}


def ours(shape: Shape, kernel: Kernel) -> Step:
    """Returns the pipeline's step, without Lightning around it."""
    torch.manual_seed(0)
    size = {"layers": shape.layers, "width": shape.width, "heads": shape.heads}
    size |= {"feedforward": 4 * shape.width, "vocabulary_size": shape.vocabulary}
    return _step_of(_training(CausalLanguageModel(**size, kernel=kernel, dropout=0.0)))


def _training(model: nn.Module) -> CausalTraining:
    schedule = InverseSquareRoot(peak=1e-4, warmup_steps=1)
    return CausalTraining(model, schedule=schedule, optimizer=ADAMW, seed=0).train()


def gpt2(shape: Shape, **changed: Any) -> GPT2LMHeadModel:
    """Builds transformers' model, with its default (fused) attention and no cache."""
    torch.manual_seed(0)
    size = {"n_layer": shape.layers, "n_embd": shape.width, "n_head": shape.heads}
    size |= {"n_positions": shape.length, "vocab_size": shape.vocabulary}
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    config = GPT2Config(**size, **dropout, use_cache=False, **changed)
    return GPT2LMHeadModel(config).train()


class AsOurs(nn.Module):
    """Presents GPT-2 as `CausalTraining` takes a model: hidden states and embeddings."""

    def __init__(self, model: GPT2LMHeadModel) -> None:
        super().__init__()
        self.transformer = model.transformer

    @property
    def embedding(self) -> nn.Module:
        return self.transformer.wte

    @property
    def layers(self) -> nn.Module:
        return self.transformer.h

    def hidden(self, tokens: Tensor) -> Tensor:
        states: Tensor = self.transformer(input_ids=tokens).last_hidden_state
        return states


def own_step(model: GPT2LMHeadModel) -> Step:
    """Returns a step with transformers' loss and AdamW."""
    optimizer = AdamW(model.parameters(), lr=1e-4, weight_decay=0.01, fused=True)
    return partial(step, optimizer, partial(own_loss, model))


def own_loss(model: GPT2LMHeadModel, rows: Tensor) -> Tensor:
    """Computes the loss of every next token; given `labels`, transformers leaves out the last."""
    logits, targets = model(input_ids=rows[:, :-1]).logits, rows[:, 1:].contiguous()
    vocabulary = model.config.vocab_size
    loss: Tensor = model.loss_function(logits, None, vocabulary, shift_labels=targets)
    return loss


def step(optimizer: torch.optim.Optimizer, loss: Callable[[Any], Tensor], rows: Any) -> None:
    """Takes one optimizer step on `rows`."""
    optimizer.zero_grad()
    loss(rows).backward()
    optimizer.step()


def _step_of(module: CausalTraining) -> Step:
    optimizer = module.make_optimizer(module.parameter_groups())
    for group in optimizer.param_groups:
        group["lr"] = 1e-4  # in a training the schedule multiplies it
    return partial(step, optimizer, module.loss)


def page(record: dict[str, Any]) -> str:
    """Renders the tables, and the factors of the step's lead over GPT-2."""
    spent = record["seconds"]
    headers = ["step of", "ms", *(f"/ {peer}" for peer in PEERS), "/ exponential", "rounds"]
    rows = [
        (name, f"{1000 * median(spent[name]):.0f}",
         *("1" if name == to else str(ratio(spent, name, to)) for to in (*PEERS, "exponential")),
         len(spent[name]))
        for name in spent
    ]  # fmt: skip
    return (
        "# A training step with each kernel\n\n"
        f"{record['shape']}, all targets scored. {setting(record)} {HOW} Under 1 = faster than the "
        f"column's.\n\n{markdown(headers, rows)}\n\n{cause(spent)}\n"
    )


def cause(spent: Seconds) -> str:
    """Explains the ratio to GPT-2 as a product of three: activation, loss, and model."""
    whole, rest = (ratio(spent, "exponential", peer) for peer in (PEER, ALIKE))
    activation, loss = ratio(spent, WITH_RELU, PEER), ratio(spent, ALIKE, WITH_RELU)
    return (
        f"A step of ours (exponential) takes {whole} of GPT-2's time as it comes: "
        f"{verdict(whole)}. ReLU for gelu_new alone takes GPT-2 to {activation} of its time "
        f"({verdict(activation)}), and our loss, which never has all logits in memory, from there "
        f"to {loss} ({verdict(loss)}). With both GPT-2 does the same work, and ours takes {rest} "
        f"of its time: {verdict(rest)}. Both compute attention with PyTorch's fused kernel."
    )


if __name__ == "__main__":
    main()
