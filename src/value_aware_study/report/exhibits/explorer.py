"""The token explorer: single queries of a readable text, behind the means of other exhibits."""

from collections.abc import Mapping
from statistics import median_low

from value_aware_study.evaluation.exploration import Exploration
from value_aware_study.report import captions
from value_aware_study.report.exhibit import Exhibit
from value_aware_study.report.words import number


def explorer(explored: Exploration | None, labels: Mapping[str, str]) -> Exhibit | None:
    """Shows the models that have a label, in this order; None where none was explored."""
    shown = explored and explored.labelled(labels)
    if not shown or not shown.models:
        return None
    first, r = shown.models[0], median_low(shown.sizes)
    left = first.median_errors(shown.sizes.index(r))
    medians = " and ".join(
        f"{number(100 * error, 0 if error >= 0.1 else 1)}% for keys {name}"
        for error, name in zip(left, shown.methods, strict=True)
    )
    return Exhibit(
        "explorer",
        "Token by token: which keys each choice keeps",
        "Pick a word: what its query attends to, the r keys that each choice keeps, and the error "
        f"left in its output. With {r} keys the median error in {first.label} is {medians}.",
        [
            "A model reads this text alone. Under every token is its weight in hundredths; a "
            f"token without one is not kept, or not seen. {captions.OPTIMAL} {captions.BEST_FOUND}",
            "The hardest tokens are, for each head, the query with the largest difference between "
            "the error by weight and the error for the output. An error above 100%, which an "
            "output of zeros has, counts as 100%. The page opens on the first of them, which is "
            "no typical query: the median over all queries is shown next to it.",
            "The address of the page names what is shown, and can be copied.",
        ],
        exploration=shown,
    )
