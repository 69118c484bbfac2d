"""Opening a subject."""

from __future__ import annotations

import pytest

from vitrail.errors import UserError
from vitrail.explain.subject import open_subject


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"target": "11"}, "has no class '11'"),
        ({"instead": "cat"}, "has no class 'cat'"),
        ({"target": "1", "instead": "1"}, "must be different classes, but both are '1'"),
    ],
)
def test_unknown_classes_raise(trained, settings, message):
    with pytest.raises(UserError, match=message):
        open_subject(trained, **settings)
