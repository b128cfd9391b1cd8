"""Does the work of one run on a Ray cluster: a task for each range of units, then one for each
range of files.

Ray places the tasks, runs those of a lost node on another one, and ends them when the driver ends.
A task that runs again skips the work that the journal lists. All nodes must see a source and a
destination that are directories at the same paths. A URL is opened on each node.
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from mckpt import errors
from mckpt.errors import MckptError, MissingExtra, StorageError, UsageError
from mckpt.execute.engine import Step, Task, Tick
from mckpt.execute.mover import Overflow
from mckpt.execute.ranks import DEAD_S, Ranks, pauses
from mckpt.execute.threads import TICK
from mckpt.storage import sparse_copy
from mckpt.storage.sparse_copy import SparseCopy
from mckpt.version import __version__

# Tasks of a step for each process that the cluster has room for: nodes differ in speed, and the
# last tasks of a step leave nodes idle.
PARTS = 8
# for a cluster that has no node with a CPU until its autoscaler has started one
CORES_UNKNOWN = 1
ANSWER_S = 10  # seconds; Ray itself tries for a quarter of an hour if nothing answers


def require() -> None:
    """Raises MissingExtra if Ray is not installed."""
    try:
        import ray  # noqa: F401
    except ImportError:
        raise MissingExtra(
            "--engine ray needs ray, not installed here: pip install 'mckpt[ray]'"
        ) from None


class RayCluster:
    """The cluster that RAY_ADDRESS names, or that the caller has connected to. Without both it is
    the one on this machine, which Ray starts if there is none.
    """

    def __init__(self) -> None:
        require()
        import ray

        if not ray.is_initialized():
            _connect()
        nodes = [node["Resources"].get("CPU", 0) for node in ray.nodes() if node["Alive"]]
        self._cpus = [int(num) for num in nodes if num >= 1]

    @property
    def cores(self) -> int:
        """The cores of the smallest node, so that a task fits on every node."""
        return min(self._cpus, default=CORES_UNKNOWN)

    def do(self, job: Task, step: Step, count: int, tick: Tick) -> Iterator[range]:
        """Does a step for `count` units, files or groups; see engine.Cluster.

        Raises the first error of a task, and cancels the others.
        """
        import ray

        cpus = min(job.threads, self.cores)
        places = sum(num // cpus for num in self._cpus)
        parts = Ranks(size=min(count, PARTS * max(1, places)))
        # SPREAD: each node has its own way to the filesystem
        task = ray.remote(num_cpus=cpus, scheduling_strategy="SPREAD")(_do)
        running: dict[Any, range] = {}
        try:
            # once for all tasks; Ray sends it to each node once
            ray.util.register_serializer(type(Path()), serializer=_place_of, deserializer=_path_at)
            try:
                shared = ray.put(job)
            finally:
                ray.util.deregister_serializer(type(Path()))
            marks = __version__, job.mark()
            for part in range(parts.size):
                items = parts.share(count, part)
                running[task.remote(shared, step, items, *marks)] = items
            while running:
                ready, _ = ray.wait(list(running), timeout=TICK)
                for ref in ready:
                    if failed := ray.get(ref):
                        raise _error(*failed)
                    yield running.pop(ref)
                tick()
        except ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, MckptError):  # such as a library of stores that lacks
                raise error.cause.with_hint("on a node of the Ray cluster") from error
            if lacking := re.search(r"No module named '\S+'", str(error)):
                raise MissingExtra(
                    f"a node of the Ray cluster cannot run mckpt: {lacking[0]}; install mckpt"
                    f" {__version__} there, in the Python of Ray"
                ) from error
            raise  # a bug of mckpt
        except ray.exceptions.RayError as error:
            what = " ".join(str(error).split())
            raise StorageError(
                f"Ray could not run a part of the work: {what} Run the same command again: it"
                " continues"
            ) from error
        finally:
            for ref in running:
                with suppress(ray.exceptions.RayError):
                    ray.cancel(ref, force=True)


def _connect() -> None:
    import logging
    import socket  # here, as no other conversion needs it, and it takes 2 ms

    import ray

    where = os.environ.get("RAY_ADDRESS", "")
    host, _, port = where.removeprefix("ray://").rpartition(":")
    host = host.strip("[]")  # of an IPv6 address
    before = signal.getsignal(signal.SIGTERM)
    try:
        if host and port.isdecimal():
            socket.create_connection((host, int(port)), ANSWER_S).close()
        # stdout and stderr are those of the command
        ray.init(logging_level=logging.ERROR, log_to_driver=False, include_dashboard=False)
    except (OSError, RuntimeError, ValueError) as error:
        what = f"RAY_ADDRESS={where}: cannot connect to this" if where else "cannot start a local"
        raise StorageError(f"{what} Ray cluster: {error}") from error
    finally:
        # Ray ends the process on SIGTERM in its own way
        with suppress(ValueError, TypeError):  # not the main thread, or no handler of Python
            signal.signal(signal.SIGTERM, before)


def _place_of(path: Path) -> tuple[SparseCopy | None, str]:
    """Returns a path in a form in which another machine finds it. A path in a sparse copy is
    returned with that copy, which the other machine makes anew.
    """
    place = sparse_copy.of(path)
    return (None, str(path)) if place is None else (place, place.name(path))


def _path_at(place: tuple[SparseCopy | None, str]) -> Path:
    """Returns the path on this machine that `_place_of` has described on another one."""
    return Path(place[1]) if place[0] is None else place[0].root / place[1]


def _do(job: Task, step: Step, items: range, version: str, mark: str) -> tuple[Any, ...] | None:
    """Does a part of a step on a node; returns the class and the arguments of its error."""
    import socket

    where = f"on the Ray node {socket.gethostname()}"
    try:
        if version != __version__:
            raise UsageError(
                f"mckpt is {__version__}, and the command is that of {version}; install one version"
                " on all nodes"
            )
        _find(job, mark)
        job.do(step, items, lambda: None)
    except Overflow as error:
        return "Overflow", error.tensor, error.place
    except MckptError as error:
        kind = next(one for one in type(error).__mro__ if one.__module__ == errors.__name__)
        return kind.__name__, *error.args, where
    except OSError as error:
        what = f"{error.filename or 'input/output'}: {error.strerror or error}"
        return StorageError.__name__, what, where
    return None


def _find(job: Task, mark: str) -> None:
    """Waits until this node finds the place of the task, with this mark.

    A network filesystem may need a while to show it. Raises UsageError after DEAD_S.
    """
    started = time.monotonic()
    for _ in pauses():
        if job.mark() == mark:
            return
        if time.monotonic() - started > DEAD_S:
            break
    raise UsageError(
        f"{job.place} is not there, or is another one than where the command runs; mount source and"
        " destination at the same paths on all nodes; for a URL, give all nodes the same endpoint"
    )


def _error(name: str, *arguments: Any) -> MckptError:
    """Returns the error of a task."""
    kind = Overflow if name == "Overflow" else getattr(errors, name)
    error: MckptError = kind(*arguments)
    return error
