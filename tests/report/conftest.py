"""Makes the SYNTHETIC run that tests of the report share."""

import evaluated
import pytest

from value_aware_study.report.frame import Results


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
