"""One run in several processes, on one machine or on many: who does what, and how they wait for each other.

All that passes between them are small files in the staging directory, so that a shared filesystem is enough: no port, no library.

    ranks/0      of rank 0: a line that changes while it lives; there once all output files are laid out
    ranks/{r}    of every other: the same
    done/        what was done, whoever did it (execute)

Whether a process lives is told by whether its line changes, so that no two clocks are compared. What a dead rank left is done by rank 0:
should it be alive after all, both write the same bytes to the same place.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from mckpt import errors
from mckpt.errors import StorageError, UsageError

BEAT_S = 1.0  # between two changes of a rank's line
POLL_S = 0.05  # between two looks at what others have done
DEAD_S = 60.0  # without a change: a stalled filesystem may take half a minute
START_S = 600.0  # that ranks wait for rank 0 to lay out the files
FOLDER = "ranks"

# (rank, number of ranks, ranks on this machine, what tells this run from all others) in the environment, by launcher: mckpt's own workers,
# torchrun, srun, mpirun
LAUNCHERS = (
    ("MCKPT_RANK", "MCKPT_NUM_RANKS", "MCKPT_LOCAL_RANKS", ("MCKPT_RUN",)),
    ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", ()),
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_TASKS_PER_NODE", ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", ("PMIX_NAMESPACE",)),
)


@dataclass(frozen=True)
class Ranks:
    """This process among those that do one run.

    `run` tells the run from earlier ones, "" where nothing does; `local` is how many of them share this machine; `ended` whether a rank is
    known to have ended (False where that cannot be known).
    """

    rank: int = 0
    size: int = 1
    run: str = ""
    local: int = 1
    ended: Callable[[int], bool] = field(default=lambda rank: False, compare=False)

    @classmethod
    def of_environment(cls, environ: Mapping[str, str] = os.environ) -> Ranks:
        """What the launcher says; alone where there is none."""
        for rank, size, local, run in LAUNCHERS:
            if rank in environ and size in environ:
                here = re.match(r"[1-9]\d*", environ.get(local, ""))  # Slurm says 4(x16),2 of nodes: the first's number does for all
                try:
                    found = cls(
                        int(environ[rank]),
                        int(environ[size]),
                        ".".join(environ.get(name, "") for name in run),
                        int(here[0]) if here else 1,
                    )
                except ValueError:
                    raise UsageError(f"{rank}={environ[rank]!r} and {size}={environ[size]!r} in the environment are no numbers") from None
                if not 0 <= found.rank < found.size:
                    raise UsageError(f"{rank}={found.rank} is not below {size}={found.size} in the environment")
                return found
        return cls()

    @property
    def cores(self) -> int:
        """That this process may use, its part where several share a machine that binds none of them."""
        return max(1, min(len(os.sched_getaffinity(0)), (os.cpu_count() or 1) // self.local))

    def share(self, count: int, rank: int | None = None) -> range:
        """The items of `count` that a rank does: neighbours, so that two ranks seldom write one file."""
        rank = self.rank if rank is None else rank
        return range(rank * count // self.size, (rank + 1) * count // self.size)


class Gone(StorageError):
    """The staging directory is not there any more: rank 0 has published, or was removed together with it."""


class Session:
    """The ranks of one run at work in one staging directory. Raises what another rank failed with."""

    def __init__(self, staging: Path, ranks: Ranks) -> None:
        self.folder, self.ranks = staging / FOLDER, ranks
        self.count, self.next_beat = 0, 0.0
        self.heard: set[int] = set()
        self.seen: dict[int, tuple[str, float]] = {}  # rank: its last line, and when that was new here

    def open(self) -> None:
        """Rank 0, when all files are laid out: lets the others begin. What an earlier run left of its ranks is gone."""
        if self.ranks.size == 1:
            return
        self.folder.mkdir(exist_ok=True)
        for path in self.folder.iterdir():
            path.unlink(missing_ok=True)
        self.beat()

    def join(self, over: Callable[[], bool]) -> None:
        """The others: returns when rank 0 of this run has opened; a line that an earlier one left does not change. Raises Gone if all is over."""
        started, first = time.monotonic(), None
        while True:
            with suppress(OSError, ValueError):
                line = (self.folder / "0").read_text()
                said = json.loads(line)
                if first is None:
                    first = line
                if said["run"] == self.ranks.run and (self.ranks.run or line != first) and "error" not in said:
                    self.beat()
                    return
            if not self.folder.exists() and over():
                raise Gone(f"{self.folder.parent}: is not there any more")
            if time.monotonic() - started > START_S:
                raise StorageError(f"{self.folder.parent}: rank 0 has not begun within {START_S:.0f} s; rank {self.ranks.rank} gives up")
            time.sleep(POLL_S)

    def beat(self) -> bool:
        """Says that this rank lives, and looks whether the others failed; called often, does so once in BEAT_S, and then returns True."""
        now = time.monotonic()
        if self.ranks.size == 1 or now < self.next_beat:
            return False
        self.next_beat = now + BEAT_S
        self.count += 1
        self._say({"run": self.ranks.run, "beat": self.count})
        if self.ranks.rank:
            self._look(0)
            if not self.lives(0):
                raise StorageError(
                    f"{self.folder.parent}: rank 0 has not been heard of for {DEAD_S:.0f} s; start the run again: it goes on"
                )
        else:
            for rank in range(1, self.ranks.size):
                self._look(rank)
        return True

    def gather(self) -> None:
        """Rank 0: returns when each of the others has joined or is given up; one that came later would wait for a run that is over."""
        while any(rank not in self.heard and self.lives(rank) for rank in range(1, self.ranks.size)):
            self.beat()
            time.sleep(POLL_S)

    def listen(self) -> NoReturn:
        """The others, when they have done their share: until rank 0 is done, which ends in Gone, or failed."""
        while True:
            self.beat()
            if not self.folder.exists():
                raise Gone(f"{self.folder.parent}: is not there any more, and no checkpoint of this run is in place")
            time.sleep(POLL_S)

    def fail(self, error: BaseException) -> None:
        """Tells the others why this rank ends."""
        if self.ranks.size > 1 and self.folder.exists():
            with suppress(OSError, StorageError):
                self._say({"run": self.ranks.run, "error": [type(error).__name__, str(error)]})

    def lives(self, rank: int) -> bool:
        """Whether the rank has been heard of lately."""
        if self.ranks.ended(rank):
            return False
        return time.monotonic() - self.seen.setdefault(rank, ("", time.monotonic()))[1] < DEAD_S

    def _look(self, rank: int) -> None:
        with suppress(OSError, ValueError):
            line = (self.folder / str(rank)).read_text()
            if line != self.seen.get(rank, ("",))[0]:
                self.seen[rank] = line, time.monotonic()
                self.heard.add(rank)
            said = json.loads(line)
            if "error" in said and said["run"] == self.ranks.run:
                name, message = said["error"]
                raise getattr(errors, name, StorageError)(f"rank {rank}: {message or name}")

    def _say(self, what: dict[str, Any]) -> None:
        path = self.folder / str(self.ranks.rank)
        beside = path.with_suffix(".new")
        try:
            beside.write_text(json.dumps(what))
            os.replace(beside, path)
        except FileNotFoundError:
            raise Gone(f"{self.folder.parent}: is not there any more") from None
