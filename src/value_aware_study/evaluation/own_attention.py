"""Records of models that attend as they were trained to, with an approximation or a mixing."""

from dataclasses import replace
from typing import Any

from value_aware_attention.measurement import Record, Task
from value_aware_attention.measurement.measure import measure_own
from value_aware_attention.models.trained_attention import TrainedAttention


def own_record(task: Task, attention: TrainedAttention, kernel: str, **options: Any) -> Record:
    """Measures a model with the attention that it was trained with; the record has no grid.

    `kernel` is the name that was asked for; where the method computes only another one, the record
    names that, and none for a mixing. `options` are those of `measure_own`.
    """
    names = [known.__name__.lower() for known in attention.kernels]
    computed = names[0] if names and kernel not in names else kernel
    return replace(
        measure_own(task, **options),
        kernel=None if attention.is_mixing else computed,
        trained_with=attention.name,
        arguments=dict(attention.arguments),
    )
