"""The files of examples/ run: the pods' commands, the Slurm jobs, the Makefile and the workflow."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from mckpt import errors
from tests.helpers.commands import good

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
MODEL = ROOT / "fixtures" / "tiny-qwen3"

# The part of the APIs that the examples use: a key is given its type or its own keys, "!" marks
# a required one. Any other key is an error, because the API would refuse it or ignore it.
CONTAINER = {
    "name!": str,
    "image!": str,
    "command": [str],
    "args": [str],
    "resources": {"requests": {str: str}, "limits": {str: str}},
    "volumeMounts": [{"name!": str, "mountPath!": str}],
}
POD = {
    "spec!": {
        "restartPolicy": str,
        "initContainers": [CONTAINER],
        "containers!": [CONTAINER],
        "volumes": [{"name!": str, "persistentVolumeClaim!": {"claimName!": str}}],
    }
}
FAILURES = {
    "rules!": [
        {
            "action!": str,
            "onExitCodes": {"containerName": str, "operator!": str, "values!": [int]},
            "onPodConditions": [{"type!": str}],
        }
    ]
}
META = {"apiVersion!": str, "kind!": str, "metadata!": {"name!": str}}
REPLICAS = {"replicas!": int, "restartPolicy!": str, "template!": POD}
SCHEMAS: dict[str, Any] = {
    "kubernetes-job.yaml": {
        **META,
        "spec!": {"backoffLimit": int, "podFailurePolicy": FAILURES, "template!": POD},
    },
    "kubernetes-sidecar.yaml": {**META, "spec!": {"backoffLimit": int, "template!": POD}},
    "pytorchjob.yaml": {
        **META,
        "spec!": {"pytorchReplicaSpecs!": {"Master!": REPLICAS, "Worker": REPLICAS}},
    },
    "rayjob.yaml": {
        **META,
        "spec!": {
            "entrypoint!": str,
            "backoffLimit": int,
            "shutdownAfterJobFinishes": bool,
            "rayClusterSpec!": {
                "headGroupSpec!": {"rayStartParams!": {str: str}, "template!": POD},
                "workerGroupSpecs": [
                    {
                        "groupName!": str,
                        "replicas": int,
                        "rayStartParams!": {str: str},
                        "template!": POD,
                    }
                ],
            },
        },
    },
}
KINDS = {
    "kubernetes-job.yaml": ("batch/v1", "Job"),
    "kubernetes-sidecar.yaml": ("batch/v1", "Job"),
    "pytorchjob.yaml": ("kubeflow.org/v1", "PyTorchJob"),
    "rayjob.yaml": ("ray.io/v1", "RayJob"),
}

# Runs a job at once, as Slurm does when its dependency ended with 0; prints its number.
SBATCH = r"""#!/bin/bash
set -u
array="" after=""
while [[ $1 == --* ]]; do
  case $1 in
    --parsable) ;;
    --dependency=afterok:*) after=${1#*afterok:} ;;
    --array=*) array=${1#*=} ;;
    *) echo "sbatch: unrecognized option $1" >&2; exit 1 ;;
  esac
  shift
done
job=$(( $(ls "$JOBS" | wc -l) + 1 ))
echo waiting > "$JOBS/$job"
echo "$job"
[[ -n $after && $(cat "$JOBS/$after") != 0 ]] && exit 0
if [[ $array =~ ^([0-9]+)-([0-9]+):([0-9]+)%[0-9]+$ ]]; then
  tasks=$(seq "${BASH_REMATCH[1]}" "${BASH_REMATCH[3]}" "${BASH_REMATCH[2]}")
elif [[ -z $array ]]; then tasks=none
else echo "sbatch: Invalid job array specification" >&2; exit 1; fi
worst=0
for task in $tasks; do
  SLURM_ARRAY_TASK_ID=$task bash "$1" >> "$JOBS.log" 2>&1 || worst=$?
done
echo "$worst" > "$JOBS/$job"
"""


@pytest.fixture
def place(tmp_path: Path) -> dict[str, str]:
    """The environment of an example: mckpt, sbatch and pip are programs in it, MODEL a model."""
    shutil.copytree(MODEL, tmp_path / "model")
    programs = tmp_path / "bin"
    programs.mkdir()
    texts = {
        "mckpt": f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m mckpt "$@"\n',
        "sbatch": SBATCH,
        "pip": '#!/bin/sh\n[ "$*" = "install mckpt" ]\n',
    }
    for name, text in texts.items():
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    (tmp_path / "jobs").mkdir()
    return {
        **os.environ,
        "PATH": f"{programs}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "JOBS": str(tmp_path / "jobs"),
    }


def run(command: list[str], place: dict[str, str], cwd: Path, **more: str) -> str:
    done = subprocess.run(
        command, env=place | more, cwd=cwd, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def breaches(value: Any, schema: Any, where: str = "") -> Iterator[str]:
    """Yields what is wrong with a value."""
    if isinstance(schema, type):
        if type(value) is not schema:
            yield f"{where}: {value!r} is no {schema.__name__}"
    elif isinstance(schema, list):
        if not isinstance(value, list) or not value:
            yield f"{where}: is no list"
            return
        for number, one in enumerate(value):
            yield from breaches(one, schema[0], f"{where}[{number}]")
    elif not isinstance(value, dict):
        yield f"{where}: is no mapping"
    elif str in schema:
        for key, one in value.items():
            yield from breaches(one, schema[str], f"{where}.{key}")
    else:
        known = {key.rstrip("!"): one for key, one in schema.items()}
        yield from (
            f"{where}: lacks {k[:-1]}" for k in schema if k[-1] == "!" and k[:-1] not in value
        )
        for key, one in value.items():
            if key in known:
                yield from breaches(one, known[key], f"{where}.{key}")
            else:
                yield f"{where}: {key} is unknown"


def pods(value: Any) -> Iterator[dict[str, Any]]:
    """Yields each pod's spec."""
    if isinstance(value, dict):
        if "containers" in value:
            yield value
        for one in value.values():
            yield from pods(one)


def read(name: str) -> dict[str, Any]:
    return dict(yaml.safe_load((EXAMPLES / name).read_text()))


@pytest.mark.parametrize("name", SCHEMAS)
def test_a_manifest_fits_its_schema(name: str) -> None:
    found = read(name)
    assert not list(breaches(found, SCHEMAS[name]))
    assert (found["apiVersion"], found["kind"]) == KINDS[name]
    for pod in pods(found):
        mounted = {
            mount["name"]
            for kind in ("initContainers", "containers")
            for container in pod.get(kind, [])
            for mount in container["volumeMounts"]
        }
        assert mounted == {volume["name"] for volume in pod["volumes"]}


def commands(name: str, tmp_path: Path) -> list[list[str]]:
    """Returns the arguments of each mckpt of a manifest, with a folder of the test as /data."""
    found = read(name)
    lines = [shlex.split(found["spec"].get("entrypoint", ""))]
    for pod in pods(found):
        for container in [*pod.get("initContainers", []), *pod["containers"]]:
            lines.append([*container.get("command", []), *container.get("args", [])])
    ours = [line[1:] for line in lines if line[:1] == ["mckpt"]]
    assert ours
    return [[re.sub("^/data", str(tmp_path), word) for word in line] for line in ours]


@pytest.mark.parametrize("name", ["kubernetes-job.yaml", "pytorchjob.yaml", "rayjob.yaml"])
def test_the_commands_of_a_manifest_run(name: str, tmp_path: Path) -> None:
    shutil.copytree(MODEL, tmp_path / "model")
    if name != "pytorchjob.yaml":
        good("hf-to-megatron", MODEL, tmp_path / "ckpt", "--tp", 2, "--iteration", 5)
    for line in commands(name, tmp_path):
        if name == "rayjob.yaml":  # tests/servers/test_ray.py runs the engine, which needs Ray
            at = line.index("--engine")
            assert line[at : at + 2] == ["--engine", "ray"]
            del line[at : at + 2]
        good(*line)
    made = {"pytorchjob.yaml": "ckpt", "kubernetes-job.yaml": "export/iter_5"}.get(name, "export")
    good("diff", MODEL, tmp_path / made)


def test_a_failure_that_would_come_again_ends_the_job() -> None:
    """Kubernetes matches a rule without a container's name with every container of the pod."""
    rules = read("kubernetes-job.yaml")["spec"]["podFailurePolicy"]["rules"]
    (ends,) = [
        rule["onExitCodes"]["values"]
        for rule in rules
        if rule["action"] == "FailJob" and "containerName" not in rule["onExitCodes"]
    ]
    others = (errors.StorageError, errors.Unreported, errors.Cancelled)
    passing = {70, *(e.exit_code for e in others)}
    codes = {
        e.exit_code
        for e in vars(errors).values()
        if isinstance(e, type) and issubclass(e, errors.MckptError)
    }
    assert set(ends) == codes - passing


def test_the_image_is_made_of_the_extras_that_exist() -> None:
    text = (EXAMPLES / "Dockerfile").read_text()
    extras = re.search(r"/src\[([\w,]+)\]", text)
    table = re.findall(r"^(\w+) = \[", (ROOT / "pyproject.toml").read_text(), re.M)
    assert extras and set(extras[1].split(",")) <= set(table)
    assert 'ENTRYPOINT ["mckpt"]' in text  # the shell's form would keep SIGTERM from mckpt


def test_the_sidecar_exports_while_training_writes(tmp_path: Path, place: dict[str, str]) -> None:
    """It starts before the first checkpoint, and ends after the last."""
    (line,) = commands("kubernetes-sidecar.yaml", tmp_path)
    (tmp_path / "run").mkdir()
    sidecar = subprocess.Popen(
        ["mckpt", *line],
        env=place | {"MCKPT_INTERVAL": "1s"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        for iteration in (18000, 19000, 20000):
            good("hf-to-megatron", MODEL, tmp_path / "run", "--tp", 2, "--iteration", iteration)
        said, _ = sidecar.communicate(timeout=120)
    finally:
        sidecar.kill()
    assert sidecar.returncode == 0, said
    for iteration in (18000, 19000, 20000):
        good("diff", MODEL, tmp_path / "export" / f"iter_{iteration}")


def slurm(tmp_path: Path, place: dict[str, str], train: str) -> list[str]:
    """Runs the pipeline with this training job; returns the state of each job."""
    (tmp_path / "train.sbatch").write_text(f"set -e\n{train}\n")
    folders = {name.upper(): str(tmp_path / name) for name in ("model", "ckpt", "run", "out")}
    command = [str(EXAMPLES / "slurm" / "pipeline.sh")]
    more = {"TRAIN": str(tmp_path / "train.sbatch"), "ITERATIONS": "500-1000:500", **folders}
    said = run(command, place, tmp_path, **more)
    assert said == "submitted: convert 1, train 2, export 3\n"
    return [(tmp_path / "jobs" / number).read_text().strip() for number in "123"]


def test_the_slurm_jobs_run_one_after_the_other(tmp_path: Path, place: dict[str, str]) -> None:
    train = "for i in 500 1000; do mckpt hf-to-megatron $MODEL $RUN --iteration $i; done"
    states = slurm(tmp_path, place, f"test -d $CKPT/release\n{train}")
    assert states == ["0", "0", "0"], (tmp_path / "jobs.log").read_text()
    for name in ("iter_500", "iter_1000"):
        good("diff", MODEL, tmp_path / "out" / name)


def test_a_training_job_that_fails_is_not_exported(tmp_path: Path, place: dict[str, str]) -> None:
    assert slurm(tmp_path, place, "exit 5") == ["0", "5", "waiting"]
    assert not (tmp_path / "out").exists()


def test_the_makefile_runs(tmp_path: Path, place: dict[str, str]) -> None:
    make = ["make", "-f", str(EXAMPLES / "Makefile")]
    run([*make, "ckpt"], place, tmp_path)
    for i in (5, 10):
        good("hf-to-megatron", MODEL, tmp_path / "run", "--iteration", i)
    export = [*make, "-j2", "export", "RUN=run", "ITERATIONS=5 10"]
    run(export, place, tmp_path)
    for name in ("iter_5", "iter_10"):
        good("diff", tmp_path / "ckpt", tmp_path / "export" / name)
    assert run(export, place, tmp_path).count("is done already") == 2


def test_the_steps_of_the_workflow_run(tmp_path: Path, place: dict[str, str]) -> None:
    found = read("github-action.yaml")
    # YAML 1.1 reads the key `on` as true
    assert set(found) == {"name", True, "jobs"} and set(found["jobs"]) == {"convert"}
    job = found["jobs"]["convert"]
    assert set(job) == {"runs-on", "env", "steps"}
    for step in job["steps"]:
        assert set(step) in ({"uses"}, {"uses", "with"}, {"run"})
        if "run" in step:
            shell = ["bash", "-e", "-c", step["run"]]
            run(shell, place, tmp_path, RUNNER_TEMP=str(tmp_path / "temp"), **job["env"])


def test_the_list_names_every_file() -> None:
    listed = set(
        re.findall(r"`([\w./-]+)`(?=[^|]*\|[^|]*\|$)", (EXAMPLES / "README.md").read_text(), re.M)
    )
    there = {str(p.relative_to(EXAMPLES)) for p in EXAMPLES.rglob("*") if p.is_file()}
    assert listed == there - {"README.md"}
