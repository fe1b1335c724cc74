"""SYNTHETIC records of methods at equal budgets: invented, measured on nothing."""

from synthetic import ends, error, record

from value_aware_attention.measurement.record import Cell, Panel, Picture, Text
from value_aware_study.report.results import Results

TEXT = Text(description="synthetic", targets=50, units=40, recorded_units=8)


def cell(approximation, parameters, budget, layer_error, value):
    return Cell(
        approximation=approximation,
        parameters=parameters,
        error=error(
            2 * layer_error, 1.5 * layer_error, 3 * layer_error, (layer_error, 3 * layer_error)
        ),
        budget=budget,
        cost=None if budget is None else budget * 1.02,
        **ends(value, 100.0, value * 0.98, value * 1.02),
    )


def survey_record(task="causal", **more):
    """SYNTHETIC: invented numbers of one model at two budgets."""
    cells = [cell("exact", {}, None, 0.0, 100.0)]
    for budget in (16, 64):
        cells += [
            cell("optimal_v_oblivious", {"r": budget}, budget, 0.2, 110.0),
            cell("optimal_v_aware", {"r": budget}, budget, 0.02 if budget < 64 else 0.0, 101.0),
            cell("strided", {"stride": budget // 2}, budget, 0.1, 105.0),
            cell("sliding_window", {"r": budget}, budget, 0.3, 120.0),
            cell("sampled_keys", {"r": budget, "seed": 0}, budget, 0.05, 104.0),
            *(
                cell("random_keys", {"r": budget, "seed": s}, budget, 0.4, 130.0 + s)
                for s in (0, 2)
            ),
        ]
    weights = ((1.0, 0.0), (0.5, -0.25))
    panels = (
        Panel(approximation="exact", parameters={}, cost=None, weights=weights),
        Panel(approximation="nystrom", parameters={}, cost=2.5, weights=weights),
    )
    picture = Picture(tokens=("def", "f"), panels=panels)
    given = {"text": TEXT, "unit": "window", "picture": picture}
    return record(f"{task}_elu", task, "elu", 256, cells, **given | more)


def survey_results(task="causal", **more):
    """The same, tidied."""
    return Results.of([survey_record(task, **more)])
