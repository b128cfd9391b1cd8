"""One run in several processes, on one machine or on many: who does what, and how they wait for
each other.

All that passes between them are small files in the staging directory, so that a shared filesystem
is enough: no port, no library.

    ranks/{r}    a line that changes while rank r lives, with how far it is
    done/        what was done, whoever did it (execute)

A run has steps. Each rank does its share of one, says so in its line, and goes on when rank 0 says
that all have: rank 0 reads a line of every rank, the others that of rank 0, and nobody lists what
the others did, which on a shared filesystem is slow for many.

Whether a process lives is told by whether its line changes, so that no two clocks are compared.
What a dead rank left is done by rank 0: should it be alive after all, both write the same bytes to
the same place.
"""

from __future__ import annotations

import json
import os
import re
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from mckpt import errors
from mckpt.errors import StorageError, UsageError

BEAT_S = 1.0  # between two changes of a rank's line
POLL_S = 0.25  # at most, between two looks at what others have done
DEAD_S = 60.0  # without a change: a stalled filesystem may take half a minute
START_S = 600.0  # that ranks wait for rank 0 to come: it plans, and its node may start later
# between two looks at whether rank 0 is refused; two that agree are believed, for one may fall amid
# what another process does
LOOK_S = 3.0
FOLDER = "ranks"

# (rank, number of ranks, ranks on this machine, what tells this run from all others) in the
# environment, by launcher: mckpt's own workers, torchrun, srun, mpirun
LAUNCHERS = (
    ("MCKPT_RANK", "MCKPT_NUM_RANKS", "MCKPT_LOCAL_RANKS", ("MCKPT_RUN",)),
    ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", ()),
    (
        "SLURM_PROCID",
        "SLURM_STEP_NUM_TASKS",
        "SLURM_STEP_TASKS_PER_NODE",
        ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT"),
    ),
    (
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
        ("PMIX_NAMESPACE",),
    ),
)

T = TypeVar("T")


@dataclass(frozen=True)
class Ranks:
    """This process among those that do one run.

    `run` tells the run from earlier ones, "" where nothing does; `local` is how many of them share
    this machine; `ended` whether a rank is known to have ended (False where that cannot be known).
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
                # Slurm says 4(x16),2 of nodes: the first's number does for all
                here = re.match(r"[1-9]\d*", environ.get(local, ""))
                try:
                    found = cls(
                        int(environ[rank]),
                        int(environ[size]),
                        ".".join(environ.get(name, "") for name in run),
                        int(here[0]) if here else 1,
                    )
                except ValueError:
                    raise UsageError(
                        f"{rank}={environ[rank]!r} and {size}={environ[size]!r} in the environment"
                        " are no numbers"
                    ) from None
                if not 0 <= found.rank < found.size:
                    raise UsageError(
                        f"{rank}={found.rank} is not below {size}={found.size} in the environment"
                    )
                return found
        return cls()

    @property
    def name(self) -> str:
        """Of this run, the same for all its ranks; that of another run differs, where anything
        tells them apart.
        """
        return f"{self.run}/{self.size}"

    @property
    def cores(self) -> int:
        """That this process may use, its part where several share a machine that binds none of
        them.
        """
        return max(1, min(len(os.sched_getaffinity(0)), (os.cpu_count() or 1) // self.local))

    def share(self, count: int, rank: int | None = None) -> range:
        """The items of `count` that a rank does: neighbours, so that two ranks seldom write one
        file.
        """
        rank = self.rank if rank is None else rank
        return range(rank * count // self.size, (rank + 1) * count // self.size)


class Gone(StorageError):
    """The staging directory is not there any more: rank 0 has published, or was removed together
    with it.
    """


class Session:
    """The ranks of one run at work in one staging directory.

    Raises what another rank failed with; `tell` gets what people should know.

    From `open` or `join` to the end of the block a thread says that this rank lives, whatever the
    rank is busy with.
    """

    def __init__(
        self, staging: Path, ranks: Ranks, tell: Callable[[str], None] = lambda text: None
    ) -> None:
        self.staging, self.folder, self.ranks, self.tell = staging, staging / FOLDER, ranks, tell
        # `id` is rank 0's, new for each time that it begins: lines of another are of a run that is
        # over, though its processes may live on
        self.line: dict[str, Any] = {"run": ranks.name, "id": "", "beat": 0, "steps": 0, "done": []}
        self.next_look = 0.0
        self.heard: dict[int, str] = {}  # rank: its last line
        # rank: when it was last looked at, and for how long that has shown nothing new
        self.watched: dict[int, tuple[float, float]] = {}
        # rank: what its last line says; of those that were not given up
        self.lines: dict[int, dict[str, Any]] = {}
        self.writing, self.over = threading.Lock(), threading.Event()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Tells the others why this rank ends, if it fails."""
        self.over.set()
        if (
            error is None
            or self.ranks.size == 1
            or isinstance(error, Gone)
            or not self.folder.exists()
        ):
            return
        known = isinstance(error, (errors.MckptError, KeyboardInterrupt))
        said = str(error) if known else "".join(traceback.format_exception(error))
        with suppress(OSError, StorageError):
            self._say({**self.line, "error": [type(error).__name__, said]})

    def open(self) -> None:
        """Rank 0, when the staging directory is its own.

        What an earlier run left of its ranks is gone.
        """
        if self.ranks.size == 1:
            return
        self.line["id"] = uuid.uuid4().hex
        self.folder.mkdir(exist_ok=True)
        for path in self.folder.iterdir():
            path.unlink(missing_ok=True)
        self._live()

    def join(
        self, finished: Callable[[bool], bool], refuse: Callable[[], None] = lambda: None
    ) -> None:
        """The others: returns when rank 0 of this run has opened; a line that an earlier one left
        does not change.

        Raises Gone if all is done: what `finished` says, which gets whether rank 0 has been waited
        for as long as one that died. What rank 0 failed with before this rank came. What `refuse`
        raises: rank 0 is refused alike, before it has a place to say so.
        """
        started, first, next_look = time.monotonic(), None, LOOK_S
        refused: errors.MckptError | None = None
        for _ in patience():
            waited = time.monotonic() - started
            with suppress(OSError, ValueError):
                line = (self.folder / "0").read_text()
                said = json.loads(line)
                if first is None:
                    first = line
                ours = said["run"] == self.ranks.name
                fresh = self.ranks.run or line != first  # else it may be of an earlier run
                if ours and "error" in said and (fresh or waited > DEAD_S):
                    raise _error_of(0, *said["error"])
                if ours and "error" not in said and fresh:
                    self.line["id"] = said["id"]
                    self._live()
                    return
            if not self.folder.exists() and finished(waited > DEAD_S):
                raise Gone(f"{self.staging}: is not there any more")
            if waited > next_look:
                before, refused, next_look = refused, _refusal(refuse), waited + LOOK_S
                if before and refused:
                    raise refused
            if waited > START_S:
                raise StorageError(
                    f"{self.staging}: rank 0 has not begun within {START_S:.0f} s; rank"
                    f" {self.ranks.rank} gives up"
                )

    def begin(self, lay_out: Callable[[], None]) -> None:
        """The first step is rank 0's alone: the others write into files that it has laid out."""
        if self.ranks.rank == 0:
            lay_out()
            self._reached(1)
        else:
            self._await({0}, 1, lambda rank: None)
            self._reached(1)

    def beat(self, *done: int) -> None:
        """Says how much this rank has done, and looks at the others; called often, does so once in
        BEAT_S.
        """
        now = time.monotonic()
        self.line["done"] = done or self.line["done"]
        if self.ranks.size == 1 or now < self.next_look:
            return
        self.next_look = now + BEAT_S
        for rank in range(1, self.ranks.size) if self.ranks.rank == 0 else (0,):
            self._look(rank)
        if self.ranks.rank and not self.lives(0):
            raise StorageError(
                f"{self.staging}: rank 0 has not been heard of for {DEAD_S:.0f} s; start the run"
                " again: it goes on"
            )

    def done(self) -> list[int]:
        """Rank 0: what `beat` was told by all the others, added up."""
        return [
            sum(column)
            for column in zip(
                *(line["done"] for line in self.lines.values() if line["done"]), strict=True
            )
        ]

    def meet(self, do: Callable[[int], None]) -> None:
        """Ends a step, of which this rank has done its share; returns when all is done.

        Rank 0 calls `do` for each rank that died before.

        One that never came is waited for as long as one that is not heard of any more: it would
        wait for a run that is over.
        """
        step = self.line["steps"] + 1
        if self.ranks.size == 1:
            return
        if self.ranks.rank:
            self._reached(step)
            self._await({0}, step, do)
        else:
            self._await(set(range(1, self.ranks.size)), step, do)
            self._reached(step)

    def listen(self) -> NoReturn:
        """The others, when they have done their share: until rank 0 is done, which ends in Gone, or
        failed.
        """
        for _ in patience():
            self.beat()
            self._look(0)
            if not self.folder.exists():
                break
        raise Gone(
            f"{self.staging}: is not there any more, and no checkpoint of this run is in place"
        )

    def lives(self, rank: int) -> bool:
        """Whether the rank has been heard of lately.

        A time in which this process was stopped itself does not count.
        """
        return not self.ranks.ended(rank) and self.watched.get(rank, (0, 0.0))[1] < DEAD_S

    def _await(self, missing: set[int], step: int, do: Callable[[int], None]) -> None:
        for _ in patience():
            self.beat()
            for rank in sorted(missing):
                self._look(rank)
                if rank in self.lines and self.lines[rank]["steps"] >= step:
                    missing.remove(rank)
                elif self.ranks.rank == 0 and not self.lives(rank):
                    missing.remove(rank)
                    self.lines.pop(rank, None)
                    self.tell(
                        f"rank {rank} has ended or is not heard of any more: rank 0 does its share"
                    )
                    do(rank)
            if not missing:
                return
            if not self.folder.exists():  # all is done, and rank 0's line came and went
                raise Gone(f"{self.staging}: is not there any more")

    def _reached(self, step: int) -> None:
        self.line["steps"] = step
        if self.ranks.size > 1:
            self._say(self.line)

    def _look(self, rank: int) -> None:
        now = time.monotonic()
        before, silent = self.watched.get(rank, (now, 0.0))
        self.watched[rank] = now, silent + min(now - before, 2 * BEAT_S)
        with suppress(OSError, ValueError):
            line = (self.folder / str(rank)).read_text()
            if line == self.heard.get(rank):
                return
            said = json.loads(line)
            if said["id"] != self.line["id"]:
                if rank == 0:
                    raise StorageError(
                        f"{self.staging}: rank 0 has begun anew; start rank {self.ranks.rank}"
                        " again: it joins"
                    )
                return
            self.heard[rank], self.watched[rank] = line, (now, 0.0)
            if "error" in said:
                raise _error_of(rank, *said["error"])
            self.lines[rank] = said

    def _live(self) -> None:
        self._say(self.line)
        threading.Thread(target=self._beats, name="ranks", daemon=True).start()

    def _beats(self) -> None:
        while not self.over.wait(BEAT_S):
            try:
                self._say(self.line)
            except Gone:
                return
            except OSError:
                continue  # a full disk, say: who works there meets it

    def _say(self, what: dict[str, Any]) -> None:
        path = self.folder / str(self.ranks.rank)
        beside = path.with_name(f"{path.name}.{os.getpid()}.{id(self):x}.new")
        with self.writing:
            self.line["beat"] += 1
            try:
                beside.write_text(json.dumps({**what, "beat": self.line["beat"]}))
                os.replace(beside, path)
            except FileNotFoundError:
                raise Gone(f"{self.staging}: is not there any more") from None


def _refusal(refuse: Callable[[], None]) -> errors.MckptError | None:
    """What it raises."""
    try:
        refuse()
    except errors.MckptError as e:
        return e
    except OSError:  # files come and go: rank 0 is at work
        return None
    return None


def _error_of(rank: int, name: str, message: str) -> Exception:
    kind = getattr(errors, name, None)
    if isinstance(kind, type) and issubclass(kind, errors.MckptError):
        return kind(f"rank {rank}: {message}")
    if name == "KeyboardInterrupt":
        return StorageError(f"rank {rank} was interrupted; start the run again: it goes on")
    return RuntimeError(f"rank {rank}: {message}")


def awaited(look: Callable[[], T | None], what: str, tick: Callable[[], None]) -> T:
    """What `look` finds, which another rank has written: on a network filesystem it may take a
    while to appear.
    """
    started = time.monotonic()
    for _ in patience():
        if (found := look()) is not None:
            return found
        if time.monotonic() - started > DEAD_S:
            break
        tick()
    raise StorageError(
        f"{what}: was written by another rank and is not there after {DEAD_S:.0f} s; run the same"
        " command again: it goes on"
    )


def patience() -> Iterator[None]:
    """Turns of a wait that takes as long as it takes: soon after each other at first, POLL_S apart
    in the end.
    """
    pause = 0.002
    while True:
        yield
        time.sleep(pause)
        pause = min(POLL_S, 1.2 * pause)
