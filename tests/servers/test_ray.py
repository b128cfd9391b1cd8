"""`--engine ray` on a cluster of several raylets: the output is that of one process, whatever dies.

Ray has 260 MB and is not in the extra `test`, so these tests need `pip install ray`; without it
they are skipped.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.helpers import commands
from tests.helpers.s3_server import Server
from tests.helpers.tiny import TinyModel

ray = pytest.importorskip("ray")

pytestmark = pytest.mark.slow

# Python that each process of the cluster and of mckpt runs when it starts: a tiny model has many
# units, and each slab waits and leaves a line.
CUSTOM = """
import os
import mckpt.execute.units as u
u.UNIT, u.SLAB = 32 << 10, 8 << 10
if "RAY_RAYLET_PID" in os.environ:
    import pathlib, time, mckpt.execute.engine as e
    place, move = pathlib.Path(__file__).parent, e._JobState.move
    def slow(self, slab, *rest):
        time.sleep(float((place / "pace").read_text()))
        with open(place / "log", "a") as log:
            log.write(f"{os.environ['RAY_RAYLET_PID']} {slab}\\n")
        return move(self, slab, *rest)
    e._JobState.move = slow
"""


class Nodes:
    """A Ray cluster of processes on this machine, which Ray gives half a minute each to start."""

    def __init__(self, place: Path, nodes: int, server: Server) -> None:
        from ray.cluster_utils import Cluster

        place.mkdir()
        self.server = server
        (place / "sitecustomize.py").write_text(CUSTOM)
        self.place, self.log = place, place / "log"
        path = os.pathsep.join([str(place), str(commands.ROOT)])
        self.environ = {**os.environ, **self.server.environment(), "PYTHONPATH": path}
        with mock.patch.dict(os.environ, self.environ):
            self.cluster = Cluster()
            # the head has no CPU, as with KubeRay, so that no task runs beside the driver
            for cpus in (0, *[1] * nodes):
                self.cluster.add_node(num_cpus=cpus, include_dashboard=False)
        self.environ["RAY_ADDRESS"] = self.cluster.address

    def begin(self, pace: float) -> None:
        """Forgets what was copied. Each slab then waits `pace` seconds."""
        self.log.write_text("")
        (self.place / "pace").write_text(str(pace))

    def start(self, *arguments: Any) -> subprocess.Popen[str]:
        """Starts mckpt with --engine ray; in a store each file is sent alone."""
        before = "from mckpt.conversion import to_store; to_store.GROUP = 1"
        line = commands.command_line(*arguments, "--engine", "ray", before=before)
        pipe = subprocess.PIPE
        return subprocess.Popen(line, env=self.environ, stdout=pipe, stderr=pipe, text=True)

    def run(self, *arguments: Any, code: int = 0) -> tuple[str, str]:
        process = self.start(*arguments)
        out, err = process.communicate(timeout=300)
        assert process.returncode == code, f"exit {process.returncode}\n{out}\n{err}"
        return out, err

    def moved(self) -> list[tuple[int, int]]:
        """Returns the raylet and the slab of each copy."""
        lines = self.log.read_text().splitlines()
        return [(int(raylet), int(slab)) for raylet, slab in map(str.split, lines)]

    def await_moves(self, number: int, process: subprocess.Popen[str]) -> None:
        for _ in range(3000):
            if len(self.moved()) >= number:
                return
            assert process.poll() is None, process.communicate()
            time.sleep(0.02)
        raise AssertionError(f"{number} slabs were not copied within a minute: {self.moved()}")

    def raylets(self) -> dict[int, Any]:
        """Returns the nodes that copy, by the process id of their raylet."""
        return {
            node.all_processes["raylet"][0].process.pid: node for node in self.cluster.worker_nodes
        }


@pytest.fixture(scope="module")
def cluster(work: Path) -> Iterator[Nodes]:
    server = Server(work / "s3")
    try:
        made = Nodes(work / "nodes", nodes=2, server=server)
        try:
            yield made
        finally:
            made.cluster.shutdown()
    finally:
        server.stop()


@pytest.fixture
def nodes(cluster: Nodes) -> Nodes:
    cluster.begin(pace=0)
    return cluster


@pytest.fixture
def source(tiny_model: TinyModel) -> Path:
    return tiny_model("qwen3-moe")


@pytest.fixture
def one(source: Path, tmp_path: Path) -> Path:
    """What one process writes."""
    commands.good("hf-to-megatron", source, tmp_path / "one", "--tp", 2)
    return tmp_path / "one"


def test_a_killed_driver_goes_on(nodes: Nodes, source: Path, one: Path, tmp_path: Path) -> None:
    arguments = ("hf-to-megatron", source, tmp_path / "two", "--tp", 2)
    nodes.begin(pace=0.2)
    process = nodes.start(*arguments)
    nodes.await_moves(24, process)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert not (tmp_path / "two" / "release").exists()
    time.sleep(3)  # Ray ends the tasks of the driver
    at = len(nodes.moved())
    time.sleep(1)
    assert len(nodes.moved()) == at, "tasks go on without their driver"
    nodes.begin(pace=0)
    nodes.run(*arguments)
    assert commands.tree(tmp_path / "two") == commands.tree(one)
    again = {slab for _, slab in nodes.moved()}
    assert again and min(again) > 0, "the first slabs were copied once more"
    assert "is done already" in nodes.run(*arguments)[0]


def test_errors_are_those_of_one_process(nodes: Nodes, source: Path, tmp_path: Path) -> None:
    """A value that fp16 cannot hold is found on a node, and named as if it were found here."""
    import numpy as np

    big = commands.hf(tmp_path / "big")
    shard = next(big.glob("*.safetensors"))
    header, data = commands.shard(shard)
    name = next(n for n in header if n.endswith("q_proj.weight"))
    raw = bytearray(data)
    at = header[name]["data_offsets"][0]
    raw[at : at + 2] = np.array([0x7F00], "<u2").tobytes()  # 1.7e38 in bfloat16
    commands.write_shard(shard, header, bytes(raw))
    arguments = ("hf-to-megatron", big, tmp_path / "out", "--dtype", "fp16")
    here = commands.mckpt(*arguments, "--json")
    _, err = nodes.run(*arguments, "--json", code=here.code)
    assert here.code == 2 and json.loads(err.splitlines()[-1]) == json.loads(
        here.err.splitlines()[-1]
    )
    assert not (tmp_path / "out" / "release").exists()


def test_many_iterations_and_a_job_run_on_the_cluster(
    nodes: Nodes, source: Path, tmp_path: Path
) -> None:
    for iteration in (5, 10):
        commands.good("hf-to-megatron", source, tmp_path / "run", "--iteration", iteration)
    pattern = tmp_path / "out" / "iter_{iteration}"
    out, _ = nodes.run("megatron-to-hf", tmp_path / "run", pattern, "--iterations", "all")
    assert "2 iterations: 2 written" in out
    for iteration in (5, 10):
        good = ("diff", source, tmp_path / "out" / f"iter_{iteration}")
        commands.good(*good)
    assert nodes.moved(), "nothing was copied by the cluster"


@pytest.mark.parametrize("form", ["hf", "torch", "torch_dist"])
def test_the_files_of_every_format_can_be_sent(form: str, source: Path, tmp_path: Path) -> None:
    """What makes the fixed bytes of a file are functions, which Ray sends to the nodes."""
    from mckpt import api

    if form == "hf":
        commands.good("hf-to-megatron", source, tmp_path / "ckpt", "--tp", 2)
        planned = api.plan(tmp_path / "ckpt", tmp_path / "out", format="hf")
    else:
        planned = api.plan(source, tmp_path / "out", format=form)
    sent = ray.cloudpickle.loads(ray.cloudpickle.dumps(planned.outputs))
    for ours, theirs in zip(planned.outputs, sent, strict=True):
        crc_of = lambda at, nbytes: at ^ nbytes  # noqa: E731
        assert list(ours.fixed(crc_of)) == list(theirs.fixed(crc_of)), ours.path


SIZES = ("--tp", 2, "--ep", 2, "--format", "torch")


def files(path: Path) -> dict[str, Any]:
    """Returns the files of a checkpoint; of the manifest, all but the state of the source."""
    found: dict[str, Any] = {name: data for name, data in commands.tree(path).items() if data}
    for name in found:
        if name.endswith("mckpt.json"):
            found[name] = {**json.loads(found[name]), "read": 0}
    return found


def test_nodes_share_a_run_through_a_store(nodes: Nodes, source: Path, tmp_path: Path) -> None:
    commands.good("hf-to-megatron", source, tmp_path / "one", *SIZES)
    one, server = files(tmp_path / "one"), nodes.server
    server.put("b", source, "hf/")
    nodes.run("hf-to-megatron", "s3://b/hf", "s3://b/both", *SIZES)
    assert files(server.fetch("b", "both/", tmp_path / "both")) == one
    assert nodes.moved(), "nothing was copied by the cluster"
    nodes.begin(pace=0)
    nodes.run("hf-to-megatron", "s3://b/hf", tmp_path / "down", *SIZES)
    assert files(tmp_path / "down") == one and nodes.moved()
    nodes.begin(pace=0)
    over = (*SIZES, "--overwrite", "--no-resume", "--checksum", "sha256")
    nodes.run("hf-to-megatron", source, "s3://b/both", *over)
    commands.good("hf-to-megatron", source, tmp_path / "again", *over)
    assert files(server.fetch("b", "both/", tmp_path / "both")) == files(tmp_path / "again")
    assert nodes.moved()


def test_other_ways_to_share_the_work_are_refused(source: Path, tmp_path: Path) -> None:
    arguments = ("hf-to-megatron", source, tmp_path / "out", "--engine", "ray", "--workers", 2)
    commands.refused(2, "--workers 2", "--engine ray", args=arguments)


@pytest.mark.parametrize("store", [False, True], ids=["directory", "store"])
def test_a_killed_node_changes_nothing(
    nodes: Nodes, source: Path, tmp_path: Path, store: bool
) -> None:
    """The last test of the file, because a new node takes the place of the killed one."""
    commands.good("hf-to-megatron", source, tmp_path / "one", *SIZES)
    src, dst = str(source), str(tmp_path / "two")
    if store:
        nodes.server.put("b", source, "hf/")
        src, dst = "s3://b/hf", "s3://b/two"
    nodes.begin(pace=0.5 if store else 0.2)
    process = nodes.start("hf-to-megatron", src, dst, *SIZES)
    while {raylet for raylet, _ in nodes.moved()} != set(nodes.raylets()):
        assert process.poll() is None, "not every node works"
        time.sleep(0.02)
    victim = min(nodes.raylets())
    workers = subprocess.run(["pgrep", "-P", str(victim)], capture_output=True, text=True).stdout
    nodes.cluster.remove_node(nodes.raylets()[victim], allow_graceful=False)
    for pid in map(int, workers.split()):  # they would live for some more seconds
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    before = len(nodes.moved())
    _, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    two = nodes.server.fetch("b", "two/", tmp_path / "two") if store else tmp_path / "two"
    assert files(two) == files(tmp_path / "one")
    later = nodes.moved()[before:]
    assert later and victim not in {raylet for raylet, _ in later}
    if not store:  # there, each group numbers its slabs anew
        slabs = {slab for _, slab in nodes.moved()}
        assert slabs == set(range(len(slabs))), "a slab is lost"
    with mock.patch.dict(os.environ, nodes.environ):
        nodes.cluster.add_node(num_cpus=1, include_dashboard=False)
