"""Dockerfile, Compose file and Kubernetes manifest: consistent with the program, and hardened."""

from __future__ import annotations

import fnmatch
import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from vitrail import cli
from vitrail.serve.guard import OPEN
from vitrail.serve.metrics import ROUTES
from vitrail.version import VERSION

ROOT = Path(__file__).parent.parent
DOCKERFILE = (ROOT / "Dockerfile").read_text(encoding="utf-8")


def instructions() -> list[tuple[str, str]]:
    """The instructions of the Dockerfile, with their lines joined."""
    text = re.sub(r"^\s*#.*\n", "", DOCKERFILE, flags=re.M)
    lines = re.sub(r"\\\n\s*", "", text).splitlines()
    return [(line.split(maxsplit=1)[0], line.split(maxsplit=1)[1]) for line in lines if line.strip()]


def of(kind: str) -> list[str]:
    return [arguments for found, arguments in instructions() if found == kind]


def documents(name: str) -> Any:
    return list(yaml.safe_load_all((ROOT / "deploy" / name).read_text(encoding="utf-8")))


def command_words() -> list[str]:
    return [*json.loads(of("ENTRYPOINT")[-1]), *json.loads(of("CMD")[-1])]


def test_the_image_runs_a_command_that_parses():
    program, verb, *words = command_words()
    assert program == "vitrail"
    given = cli.parse(verb, words)
    assert given["host"] == "0.0.0.0"
    (port,) = of("EXPOSE")
    assert int(port) == next(argument.default for argument in cli.arguments(verb) if argument.name == "port")


def test_the_image_is_slim_pinned_and_not_root():
    assert all(re.fullmatch(r"python:3\.1[0-3]-slim( AS \w+)?", stage) for stage in of("FROM"))
    kinds = [kind for kind, _ in instructions()]
    last = len(kinds) - 1 - kinds[::-1].index("FROM")
    assert "USER" in kinds[last:]
    assert int(of("USER")[-1]) > 0
    assert kinds[last:].index("USER") > kinds[last:].index("RUN")
    assert not [kind for kind in kinds if kind in ("ADD", "MAINTAINER")]
    for run in of("RUN"):
        assert not re.search(r"\b(sudo|curl|wget|apt-get upgrade)\b", run)
        assert "pip install" not in run or "==" in run or "--constraint" in run
    assert "whl/cpu" in DOCKERFILE


def test_what_is_copied_exists_and_is_in_the_build_context():
    allowed = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    for copy in of("COPY"):
        sources = [word for word in shlex.split(copy)[:-1] if not word.startswith("--")]
        if "--from=" not in copy:
            for source in sources:
                assert (ROOT / source).exists()
                assert any(fnmatch.fnmatch(source, pattern) for pattern in allowed), source


def test_the_health_check_asks_a_route_that_needs_no_key():
    (check,) = of("HEALTHCHECK")
    program = json.loads(check[check.index("CMD") + 3 :])[-1]
    compile(program, "HEALTHCHECK", "exec")
    assert re.search(r"http://127\.0\.0\.1:8000(/\w+)", program)[1] in OPEN


def test_the_extras_of_the_image_are_those_of_the_package():
    extras = re.findall(r"^(\w+) = \[", (ROOT / "pyproject.toml").read_text(), re.M)
    wanted = re.search(r'"\.\[(.*?)\]"', DOCKERFILE)[1].split(",")
    assert set(wanted) <= set(extras)


def test_compose_is_hardened_and_prometheus_scrapes_the_service():
    (compose,) = documents("compose.yaml")
    service = compose["services"]["vitrail"]
    assert service["read_only"]
    assert service["cap_drop"] == ["ALL"]
    assert all(port.startswith("127.0.0.1:") for each in compose["services"].values() for port in each["ports"])
    assert all(volume.endswith(":ro") for volume in service["volumes"])
    assert re.fullmatch(r"\S+:v\d\S*", compose["services"]["prometheus"]["image"])  # a version, not the latest
    (scraped,) = documents("prometheus.yaml")
    (job,) = scraped["scrape_configs"]
    assert job["static_configs"][0]["targets"] == ["vitrail:8000"]
    assert "/metrics" in ROUTES  # Prometheus' default path
    mounted = compose["services"]["prometheus"]["configs"][0]["target"]
    assert job["authorization"]["credentials_file"] == mounted


@pytest.fixture
def pod() -> Any:
    return documents("kubernetes.yaml")[0]["spec"]["template"]["spec"]


def test_kubernetes_runs_the_image_as_it_was_built(pod):
    (container,) = pod["containers"]
    assert container["image"] == f"vitrail:{VERSION}"
    assert container["args"] == command_words()[2:]
    assert str(pod["securityContext"]["runAsUser"]) == of("USER")[-1]
    assert container["ports"][0]["containerPort"] == int(of("EXPOSE")[-1])
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container[probe]["httpGet"]["path"] in OPEN


def test_kubernetes_is_hardened_and_ends_gracefully(pod):
    (container,) = pod["containers"]
    assert pod["securityContext"]["runAsNonRoot"]
    assert not pod["automountServiceAccountToken"]
    limits = container["securityContext"]
    assert limits["readOnlyRootFilesystem"]
    assert not limits["allowPrivilegeEscalation"]
    assert limits["capabilities"] == {"drop": ["ALL"]}
    assert set(container["resources"]) == {"requests", "limits"}
    pause = int(container["lifecycle"]["preStop"]["exec"]["command"][1])
    timeout = next(argument.default for argument in cli.arguments("serve") if argument.name == "timeout")
    assert pod["terminationGracePeriodSeconds"] > pause + timeout
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}


def test_kubernetes_labels_select_the_pods():
    deployment, service, budget = documents("kubernetes.yaml")
    labels = deployment["spec"]["template"]["metadata"]["labels"].items()
    selectors = [deployment["spec"]["selector"]["matchLabels"], service["spec"]["selector"]]
    for selector in (*selectors, budget["spec"]["selector"]["matchLabels"]):
        assert selector.items() <= labels
