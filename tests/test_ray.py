"""`--engine ray` on a cluster of several raylets: the output is that of one process, whatever dies.

Ray has 260 MB and is not in the extra `test`, so these tests need `pip install ray`; without it
they are skipped.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import door
from tests.tiny import TinyModel

ray = pytest.importorskip("ray")

pytestmark = pytest.mark.slow

# Python that each process of the cluster and of mckpt runs when it starts: a tiny model has many
# units, and each slab takes a while and leaves a line.
CUSTOM = """
import os
import mckpt.execute.units as u
u.UNIT, u.SLAB = 32 << 10, 8 << 10
if "PACE" in os.environ:
    import time, mckpt.execute.engine as e
    move = e._Run.move
    def slow(self, slab, *rest):
        time.sleep(float(os.environ["PACE"]))
        with open(os.environ["LOG"], "a") as log:
            log.write(f"{os.environ.get('RAY_NODE_ID', '')} {os.getpid()} {slab}\\n")
        return move(self, slab, *rest)
    e._Run.move = slow
"""


class Nodes:
    """A Ray cluster of processes on this machine. Its processes take a minute to start if others
    use the cores.

    pace: seconds that each slab waits before it is copied.
    """

    def __init__(self, place: Path, pace: float, nodes: int) -> None:
        os.environ["RAY_raylet_start_wait_time_s"] = "300"
        from ray.cluster_utils import Cluster

        place.mkdir()
        (place / "sitecustomize.py").write_text(CUSTOM)
        self.log = place / "log"
        self.log.touch()
        path = os.pathsep.join([str(place), str(door.ROOT)])
        self.environ = {**os.environ, "PYTHONPATH": path, "LOG": str(self.log), "PACE": str(pace)}
        before = dict(os.environ)
        os.environ.update(self.environ)
        self.cluster = Cluster()
        try:
            # the head has no CPU, as with KubeRay, so that no task runs beside the driver
            for cpus in (0, *[1] * nodes):
                self.cluster.add_node(num_cpus=cpus, include_dashboard=False)
        finally:
            os.environ.clear()
            os.environ.update(before)
        self.environ["RAY_ADDRESS"] = self.cluster.address

    def start(self, *arguments: Any) -> subprocess.Popen[str]:
        """Starts mckpt with --engine ray."""
        line = door.command_line(*arguments, "--engine", "ray")
        pipe = subprocess.PIPE
        return subprocess.Popen(line, env=self.environ, stdout=pipe, stderr=pipe, text=True)

    def run(self, *arguments: Any, code: int = 0) -> tuple[str, str]:
        process = self.start(*arguments)
        out, err = process.communicate(timeout=300)
        assert process.returncode == code, f"exit {process.returncode}\n{out}\n{err}"
        return out, err

    def moved(self) -> list[str]:
        """Returns a line for each slab that was copied: node, process, slab."""
        return self.log.read_text().splitlines()

    def await_moves(self, number: int, process: subprocess.Popen[str]) -> None:
        for _ in range(3000):
            if len(self.moved()) >= number:
                return
            assert process.poll() is None, process.communicate()
            time.sleep(0.02)
        raise AssertionError(f"{number} slabs were not copied within a minute: {self.moved()}")


@pytest.fixture(scope="module")
def cluster(work: Path) -> Iterator[Nodes]:
    made = Nodes(work / "nodes", pace=0.2, nodes=2)
    try:
        yield made
    finally:
        made.cluster.shutdown()


@pytest.fixture
def nodes(cluster: Nodes) -> Nodes:
    cluster.log.write_text("")
    return cluster


@pytest.fixture
def source(tiny_model: TinyModel) -> Path:
    return tiny_model("qwen3-moe")


@pytest.fixture
def one(source: Path, tmp_path: Path) -> Path:
    """What one process writes."""
    door.good("hf-to-megatron", source, tmp_path / "one", "--tp", 2)
    return tmp_path / "one"


def test_a_killed_driver_goes_on(nodes: Nodes, source: Path, one: Path, tmp_path: Path) -> None:
    arguments = ("hf-to-megatron", source, tmp_path / "two", "--tp", 2)
    process = nodes.start(*arguments)
    nodes.await_moves(12, process)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert not (tmp_path / "two" / "release").exists()
    time.sleep(3)  # Ray ends the tasks of the driver
    at = len(nodes.moved())
    time.sleep(1)
    assert len(nodes.moved()) == at, "tasks go on without their driver"
    nodes.run(*arguments)
    assert door.tree(tmp_path / "two") == door.tree(one)
    slabs = [line.split()[2] for line in nodes.moved()]
    assert len(nodes.moved()) - at < len(set(slabs)), "everything was copied once more"
    assert set(slabs) == {str(i) for i in range(len(set(slabs)))}
    assert "is done already" in nodes.run(*arguments)[0]


def test_errors_are_those_of_one_process(nodes: Nodes, source: Path, tmp_path: Path) -> None:
    """A value that fp16 cannot hold is found on a node, and named as if it were found here."""
    import numpy as np

    big = door.hf(tmp_path / "big")
    shard = next(big.glob("*.safetensors"))
    header, data = door.shard(shard)
    name = next(n for n in header if n.endswith("q_proj.weight"))
    raw = bytearray(data)
    at = header[name]["data_offsets"][0]
    raw[at : at + 2] = np.array([0x7F00], "<u2").tobytes()  # 1.7e38 in bfloat16
    door.write_shard(shard, header, bytes(raw))
    arguments = ("hf-to-megatron", big, tmp_path / "out", "--dtype", "fp16")
    here = door.mckpt(*arguments, "--json")
    _, err = nodes.run(*arguments, "--json", code=here.code)
    assert here.code == 2 and json.loads(err.splitlines()[-1]) == json.loads(
        here.err.splitlines()[-1]
    )
    assert not (tmp_path / "out" / "release").exists()


def test_many_iterations_and_a_job_run_on_the_cluster(
    nodes: Nodes, source: Path, tmp_path: Path
) -> None:
    for iteration in (5, 10):
        door.good("hf-to-megatron", source, tmp_path / "run", "--iteration", iteration)
    pattern = tmp_path / "out" / "iter_{iteration}"
    out, _ = nodes.run("megatron-to-hf", tmp_path / "run", pattern, "--iterations", "all")
    assert "2 iterations: 2 written" in out
    for iteration in (5, 10):
        good = ("diff", source, tmp_path / "out" / f"iter_{iteration}")
        door.good(*good)
    assert nodes.moved(), "nothing was copied by the cluster"


def test_other_ways_to_share_the_work_are_refused(source: Path, tmp_path: Path) -> None:
    arguments = ("hf-to-megatron", source, tmp_path / "out", "--engine", "ray", "--workers", 2)
    door.refused(2, "--workers 2", "--engine ray", args=arguments)


def test_a_killed_node_changes_nothing(
    nodes: Nodes, source: Path, one: Path, tmp_path: Path
) -> None:
    """The last test of the file, because the node stays away."""
    process = nodes.start("hf-to-megatron", source, tmp_path / "two", "--tp", 2)
    nodes.await_moves(8, process)
    used = {line.split()[0] for line in nodes.moved()}
    assert len(used) > 1, f"only one node works: {used}"
    victim = next(n for n in nodes.cluster.worker_nodes if n.unique_id in used)
    nodes.cluster.remove_node(victim, allow_graceful=False)
    before = len(nodes.moved())
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    assert len(nodes.moved()) > before, "the node was killed after the work was done"
    assert door.tree(tmp_path / "two") == door.tree(one)
    slabs = {line.split()[2] for line in nodes.moved()}
    assert slabs == {str(i) for i in range(len(slabs))}
