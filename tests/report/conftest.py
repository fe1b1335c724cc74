"""Makes the SYNTHETIC run that tests of the report share."""

import evaluated
import pytest
from altair.utils.schemapi import debug_mode

from value_aware_study.report.frame import Results


@pytest.fixture(autouse=True, scope="session")
def _charts_are_checked_once():
    """Altair checks each chart as it is written, and not each part as it is made."""
    with debug_mode(False):
        yield


@pytest.fixture(scope="session")
def records():
    return evaluated.records()


@pytest.fixture(scope="session")
def results(records):
    return Results.of(records)


@pytest.fixture(scope="session")
def training():
    return evaluated.training()


@pytest.fixture(scope="session")
def tokens():
    return evaluated.tokens()
