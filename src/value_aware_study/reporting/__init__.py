"""Tables, figures and the page of the results, from the evaluation's records alone."""

from value_aware_study.reporting.page import headline, write_report

__all__ = ["headline", "write_report"]
