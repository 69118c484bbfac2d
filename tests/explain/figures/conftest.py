"""Subjects: a run with its own images, and with given ones."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from vitrail.explain.subject import Subject, open_subject


@pytest.fixture(scope="module", autouse=True)
def _small() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("vitrail.explain.subject.PICTURES", 4)
        patch.setattr("vitrail.explain.figures.relevance.OWN", 2)
        yield


@pytest.fixture(scope="module")
def own(trained: Path) -> Subject:
    return open_subject(trained)


@pytest.fixture(scope="module")
def given(trained: Path, digits: Path) -> Subject:
    return open_subject(trained, sorted((digits / "3").glob("*.png"))[:2], data=digits)
