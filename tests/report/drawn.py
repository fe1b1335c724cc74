"""Looks into charts: the rows that they draw and the parts of their specifications."""


def rows(*charts):
    """Every row of data that panels draw from."""
    return [
        row for chart in charts for data in chart.to_dict()["datasets"].values() for row in data
    ]


def parts(spec):
    """Every nested mapping of a Vega-Lite specification."""
    if isinstance(spec, dict):
        yield spec
        spec = list(spec.values())
    if isinstance(spec, list):
        for item in spec:
            yield from parts(item)
