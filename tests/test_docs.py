"""What the docs say is what the program says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from vitrail.cli import VERBS
from vitrail.models import table

DOCS = Path(__file__).parent.parent / "docs"
README = DOCS.parent / "README.md"


def test_the_table_of_models_is_that_of_the_command():
    rows = re.findall(
        r"^\| (vit_\w+) \| ([\d,]+) \| ([\d.]+) \| (\d+) \| (\w+) \|$", (DOCS / "models.md").read_text(), re.M
    )
    expected = [
        (r.name, f"{r.params:,}", f"{r.macs / 1e9:.2f}", str(r.tokens), f"{r.img_size[0]}x{r.img_size[1]}")
        for r in table()
    ]
    assert rows == expected


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_a_page_that_the_readme_links_to(verb):
    assert (DOCS / f"{verb}.md").read_text().startswith(f"# `vitrail {verb}")
    assert f"docs/{verb}.md" in README.read_text()


@pytest.mark.parametrize("page", [README, *sorted(DOCS.glob("*.md"))], ids=lambda page: page.name)
def test_links_and_pictures_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), target
