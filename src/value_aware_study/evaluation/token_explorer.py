"""The token explorer's share of an evaluation: which keys each head keeps on a readable text."""

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from value_aware_attention.approximations import (
    LeaveOneOutKeys,
    OptimalValueAware,
    OptimalValueOblivious,
    SlidingWindow,
)
from value_aware_attention.measurement import Task
from value_aware_study.tasks.exploration import Exploration
from value_aware_study.tasks.explorer import explored_model

EXPLORED = {
    "chosen by weight (OVO)": OptimalValueOblivious,
    "chosen for the output (OVA)": OptimalValueAware,
    "leave one out": LeaveOneOutKeys,
    "sliding window": SlidingWindow,
}
"""Labels and classes of the methods that the token explorer compares."""


def exploration(
    name: str,
    task: Task,
    tokenizer: PreTrainedTokenizerBase,
    *,
    tokens: int,
    sizes: Sequence[int],
) -> Exploration:
    """Explores the first `tokens` of the recorded text with the most tokens that are words."""
    calls = task.layer_calls()
    texts = [
        [str(tokenizer.decode([token])) for token in task.first_tokens(tokens, unit)]
        for unit in range(len(calls[0].query))
    ]
    unit = max(range(len(texts)), key=lambda unit: sum(t.strip().isalpha() for t in texts[unit]))
    shown = [call.unit(unit) for call in calls]
    model = explored_model(name, shown, texts[unit], EXPLORED, sizes)
    return Exploration(tuple(sizes), tuple(EXPLORED), (model,))
