"""About a minute of `make fuzz` on one core: 800 damaged files and 20 command lines, always the same."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import pytest
from faults.fuzz import build, fuzz_commands, fuzz_files


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fuzz")
    build(folder, whole=False)
    return folder


def test_damaged_files_are_read_or_refused(home):
    failures = [failure for _, found in islice(fuzz_files(0, home), 20) for failure in found]
    assert not failures


def test_command_lines_end_with_a_result_or_a_sentence(home):
    failures = [failure for _, found in islice(fuzz_commands(0, home), 20) for failure in found]
    assert not failures
