"""Renders self-contained HTML pages.

Templates escape all text; chart data is JSON escaped for use inside a script element. A content security policy blocks
all external resources.
"""

from __future__ import annotations

import json
import re
from base64 import b64encode
from datetime import date
from functools import cache
from hashlib import sha256
from itertools import count
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from jinja2.utils import htmlsafe_json_dumps
from markupsafe import Markup

from vitrail.charts.kinds import Chart
from vitrail.report import sections, tables, text
from vitrail.report.charts import fit
from vitrail.report.facts import RunFacts
from vitrail.report.images import Album
from vitrail.report.internals import inside
from vitrail.version import VERSION

_ASSETS = Path(__file__).parent / "assets"
# Runs before the page is drawn, so that it does not flash.
_THEME = Markup(
    'document.documentElement.dataset.theme = matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";'
)


def run_page(facts: RunFacts, workers: int) -> str:
    """The page of one run."""
    album = Album()
    data = facts.data
    return render(
        "run.html",
        title=facts.name,
        subject=facts.name,
        facts=facts,
        headline=text.headline(facts),
        measures=text.measures(facts),
        # In order of importance, because the album is limited: mistakes before examples of the training data.
        mistakes=sections.mistakes(facts, album, workers),
        views=sections.views(facts, album, workers),
        inside=inside(facts, album, workers),
        window=sections.window(data, album, workers) if data is not None else sections.Window(),
        data=sections.data_table(data, album, workers) if data is not None else None,
        samples=sections.samples(data, album, workers) if data is not None else [],
        results=[fit(chart) for chart in facts.task.charts(facts.scores)] if facts.scores is not None else [],
        scores=tables.scores(facts),
        sizes=sections.sizes(data) if data is not None else [],
        curves=list(map(fit, facts.task.curves(facts.rows, facts.config, facts.kept))) if facts.rows else [],
        health=text.health(facts),
        training=text.training(facts),
        settings=text.settings(facts.config, text.verb(facts)),
        commands=text.commands(facts),
        elsewhere=text.elsewhere(facts),
        here=Path.cwd(),
    )


def render(template: str, **content: Any) -> str:
    """Renders a template with style, script and the charting library embedded."""
    environment = _environment()
    specs: dict[str, Any] = {}
    numbers = count(1)

    def chart(chart: Chart) -> str:
        name = f"chart-{next(numbers)}"
        specs[name] = chart.to_json()
        return name

    def specs_json() -> Markup:
        return htmlsafe_json_dumps(specs, dumps=json.dumps, allow_nan=False, separators=(",", ":"))

    return environment.get_template(template).render(
        **content,
        chart=chart,
        specs=specs_json,  # called at the end of the page, when all charts are known
        css=_asset("report.css"),
        theme=_THEME,
        js=_asset("report.js"),
        echarts=_asset("echarts/echarts.min.js"),
        policy=_policy(),
        version=VERSION,
        today=date.today().isoformat(),
    )


@cache
def _policy() -> str:
    """The content security policy: only the page's own scripts and style, by their hashes, and nothing external."""
    scripts = " ".join(map(_hash, (_THEME, _asset("echarts/echarts.min.js"), _asset("report.js"))))
    return (
        f"default-src 'none'; img-src data:; script-src {scripts}; style-src {_hash(_asset('report.css'))}; "
        "base-uri 'none'; form-action 'none'"
    )


def _hash(text: str) -> str:
    return f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'"


@cache
def _environment() -> Environment:
    return Environment(
        loader=PackageLoader("vitrail.report", "assets"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


@cache
def _asset(name: str) -> Markup:
    """An unescaped file of the package; asserted to contain no closing tags or comments."""
    text = (_ASSETS / name).read_text(encoding="utf-8")
    assert not re.search("</script|</style|<!--", text), name
    return Markup(text)
