"""Dockerfile, Compose file and Kubernetes manifest: consistent with the program, and hardened."""

from __future__ import annotations

import fnmatch
import json
import os
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from torch.distributed.run import get_args_parser as torchrun_parser

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


# Training on several machines

STAND_INS = {  # programs that print their arguments instead of running
    "srun": 'while [[ $1 == --* ]]; do shift; done; exec "$@"',
    "scontrol": "echo node-3; echo node-4",
    "torchrun": "printf '%s\\n' \"$@\"",
}


def launched(script: list[str], folder: Path, **variables: str) -> list[str]:
    """The arguments with which a script starts torchrun in a folder."""
    programs = folder / "bin"
    programs.mkdir(exist_ok=True)
    for name, text in STAND_INS.items():
        (programs / name).write_text(f"#!/usr/bin/env bash\n{text}\n")
        (programs / name).chmod(0o755)
    environment = {"PATH": f"{programs}:{os.environ['PATH']}", **variables}
    said = subprocess.run(script, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert said.returncode == 0, said.stderr
    return said.stdout.splitlines()


def parsed(words: list[str]) -> tuple[Any, dict[str, Any]]:
    """What torchrun, and what vitrail make of the arguments of torchrun."""
    given = torchrun_parser().parse_args(words)
    assert given.module
    assert given.training_script == "vitrail"
    verb, *rest = given.training_script_args
    assert verb == "train"
    return given, cli.parse(verb, rest)


SLURM = {
    "SLURM_JOB_NODELIST": "node-[3-4]",
    "SLURM_NNODES": "2",
    "SLURM_GPUS_ON_NODE": "8",
    "SLURM_CPUS_PER_TASK": "64",
    "SLURM_JOB_ID": "17",
}


def test_slurm_starts_torchrun_on_every_machine_and_resumes(tmp_path):
    script = ["bash", str(ROOT / "deploy/slurm.sh"), "s3://bucket/photos", "photos", "--model", "vit_b16"]
    given, ours = parsed(launched(script, tmp_path, **SLURM))
    assert (given.nnodes, given.nproc_per_node, given.rdzv_endpoint) == ("2", "8", "node-3:29500")
    assert (ours["data"], ours["name"], ours["model"]) == ("s3://bucket/photos", "photos", "vit_b16")
    (tmp_path / "runs/photos").mkdir(parents=True)
    (tmp_path / "runs/photos/config.yaml").touch()
    _, again = parsed(launched(script, tmp_path, **SLURM))
    assert again == {"resume": "runs/photos"}
    directives = dict(re.findall(r"^#SBATCH --([\w-]+)=?(\S*)$", Path(script[1]).read_text(), re.M))
    assert directives["ntasks-per-node"] == "1"  # torchrun starts the processes of a machine
    assert "requeue" in directives


def test_the_skypilot_task_starts_torchrun_on_every_machine(tmp_path):
    (task,) = documents("skypilot.yaml")
    known = {"name", "num_nodes", "workdir", "envs", "resources", "file_mounts", "setup", "run"}
    assert set(task) <= known
    variables = {"SKYPILOT_NUM_NODES": "2", "SKYPILOT_NUM_GPUS_PER_NODE": "8", "SKYPILOT_NODE_RANK": "1"}
    variables |= {"SKYPILOT_NODE_IPS": "10.0.0.3\n10.0.0.4", **task["envs"]}
    given, ours = parsed(launched(["bash", "-c", task["run"]], tmp_path, **variables))
    assert (given.nnodes, given.node_rank, given.master_addr) == ("2", 1, "10.0.0.3")
    assert ours["data"] == task["envs"]["DATA"]
    assert ours["out"] in task["file_mounts"]
    (extra,) = re.findall(r"\[(\w+)\]", task["setup"])
    assert f"\n{extra} = [" in (ROOT / "pyproject.toml").read_text()


def test_the_pytorch_job_starts_torchrun_in_every_pod():
    (job,) = documents("pytorchjob.yaml")
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    spec = job["spec"]
    (worker,) = spec["pytorchReplicaSpecs"].values()
    policy = spec["elasticPolicy"]
    assert policy["minReplicas"] == policy["maxReplicas"] == worker["replicas"]
    pod = worker["template"]["spec"]
    (container,) = pod["containers"]
    assert container["name"] == "pytorch"
    assert container["image"].endswith(f":{VERSION}")
    program, *words = container["command"] + container["args"]
    assert program == "torchrun"
    _, ours = parsed(words)
    mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    assert ours["out"] in mounts
    assert {entry["name"]: entry["value"] for entry in container["env"]}["VITRAIL_CACHE"] in mounts
    assert set(mounts.values()) == {volume["name"] for volume in pod["volumes"]}
    assert container["resources"]["limits"]["nvidia.com/gpu"] == spec["nprocPerNode"]
    assert pod["securityContext"]["runAsNonRoot"]
    assert not container["securityContext"]["allowPrivilegeEscalation"]
