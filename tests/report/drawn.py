"""Looks into charts: the rows that they draw and the parts of their specifications."""


def rows(*charts):
    return [
        row for chart in charts for data in chart.to_dict()["datasets"].values() for row in data
    ]


def parts(spec):
    """Yields every nested mapping of a Vega-Lite specification."""
    if isinstance(spec, dict):
        yield spec
        spec = list(spec.values())
    if isinstance(spec, list):
        for item in spec:
            yield from parts(item)
