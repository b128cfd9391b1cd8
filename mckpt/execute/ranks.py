"""One run in several processes, on one machine or on many: how they share the work and wait for
each other.

The processes exchange small files in the staging directory, or small objects in the journal of an
object store (`conversion.store_journal`): no port, no library.

    ranks/{r}    a line that changes while rank r lives; it contains the progress of the rank
    done/        the journal: the work that is done, by any rank

A run has steps. Each rank does its share of a step, reports that in its line, and continues when
rank 0 reports that all ranks are done. Rank 0 reads the line of every rank, and the others read
that of rank 0. No rank lists the results of the others, which is slow on a shared filesystem.

A process is alive while its line changes, so that no two clocks are compared. Rank 0 does the rest
of a dead rank's share. If that rank is alive after all, both write the same bytes to the same
place.
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
from typing import Any, NamedTuple, NoReturn, TypeVar

from mckpt import errors
from mckpt.errors import StorageError, UsageError

BEAT_S = 1.0  # seconds between two changes of a rank's line
POLL_S = 0.25  # seconds; the longest pause between two looks at the others' progress
# seconds without a change after which a rank counts as dead: a stalled filesystem may take half a
# minute
DEAD_S = 60.0
# seconds that ranks wait for rank 0 to begin: it plans, and its node may start later
START_S = 600.0
# Seconds after which a rank that waits for others prints a note: the variables of a launcher may be
# those of a shell in a pod, in which nobody starts the other ranks.
NOTE_S = 1.0
# Seconds between two looks at whether rank 0 is refused. A refusal counts when two looks agree,
# since one look may happen while another process is changing the files.
LOOK_S = 3.0
FOLDER = "ranks"

# Environment variables of each launcher (mckpt's own workers, torchrun, srun, mpirun): the rank,
# the number of ranks, the ranks on this machine, and those that identify the run.
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
    """This process among the processes of one run.

    run: identifies the run, "" if the launcher does not.
    local: the number of ranks that share this machine.
    names: the environment variables that contain rank and size, for messages.
    ended: whether a rank is known to have ended; False if that cannot be known.
    """

    rank: int = 0
    size: int = 1
    run: str = ""
    local: int = 1
    names: str = field(default="", compare=False)
    ended: Callable[[int], bool] = field(default=lambda rank: False, compare=False)

    @classmethod
    def of_environment(cls, environ: Mapping[str, str] = os.environ) -> Ranks:
        """Reads the variables of the launcher; without a launcher the process is alone.

        Raises UsageError if they are not numbers or contradict each other.
        """
        for rank, size, local, run in LAUNCHERS:
            if rank in environ and size in environ:
                # Slurm writes 4(x16),2 for its nodes; the number of the first node is used for all
                here = re.match(r"[1-9]\d*", environ.get(local, ""))
                try:
                    ranks = cls(
                        int(environ[rank]),
                        int(environ[size]),
                        ".".join(environ.get(name, "") for name in run),
                        int(here[0]) if here else 1,
                        f"{rank} and {size}",
                    )
                except ValueError:
                    raise UsageError(
                        f"{rank}={environ[rank]!r} and {size}={environ[size]!r} in the environment"
                        " are not numbers"
                    ) from None
                if not 0 <= ranks.rank < ranks.size:
                    raise UsageError(
                        f"{rank}={ranks.rank} is not below {size}={ranks.size} in the environment"
                    )
                return ranks
        return cls()

    @property
    def name(self) -> str:
        """The name of the run, the same for all its ranks.

        Another run has another name if the launcher identifies runs or starts another number of
        ranks.
        """
        return f"{self.run}/{self.size}"

    def waits_for(self, others: str) -> str:
        """Returns the sentence of a rank that waits for other ranks."""
        return (
            f"rank {self.rank} of {self.size} ({self.names or 'of this run'}) waits for {others};"
            " if no launcher starts them, --workers 1 runs the command alone"
        )

    @property
    def cores(self) -> int:
        """The number of cores that this process may use.

        Ranks that share a machine and are not bound to cores get equal parts.
        """
        return max(1, min(len(os.sched_getaffinity(0)), (os.cpu_count() or 1) // self.local))

    def share(self, count: int, rank: int | None = None) -> range:
        """Returns the items, out of `count`, that a rank does (None: this rank).

        They are neighbours, so that two ranks seldom write one file.
        """
        rank = self.rank if rank is None else rank
        return range(rank * count // self.size, (rank + 1) * count // self.size)


class Gone(StorageError):
    """The staging directory is gone: rank 0 has published it, or someone removed it."""


class Seconds(NamedTuple):
    """The pace at which ranks report and look, in seconds."""

    beat: float  # between two changes of a rank's line
    dead: float  # without a change, after which a rank counts as dead
    poll: float  # the longest pause between two looks at the others' lines


class RankLines:
    """The place where the ranks of a run report, each in a line of its own: files in a directory.
    A subclass may have another place.

    public: whether other runs read the lines too, so that a run of one rank reports as well.
    """

    public = False

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @property
    def seconds(self) -> Seconds:
        return Seconds(BEAT_S, DEAD_S, POLL_S)

    def read(self, rank: int) -> str:
        """Returns the line of a rank, "" if there is none."""
        with suppress(OSError, ValueError):
            return (self.folder / str(rank)).read_text()
        return ""

    def write(self, rank: int, line: str) -> None:
        """Replaces the line of a rank. Raises Gone if the place is gone."""
        beside = self.folder / f"{rank}.{os.getpid()}.{uuid.uuid4().hex}.new"
        try:
            beside.write_text(line)
            os.replace(beside, self.folder / str(rank))
        except FileNotFoundError:
            raise Gone(f"{self.folder.parent}: no longer exists") from None

    def clear(self) -> None:
        """Makes the place, or removes the lines in it."""
        self.folder.mkdir(exist_ok=True)
        for path in self.folder.iterdir():
            path.unlink(missing_ok=True)

    def belong_to(self, run: str) -> bool:
        """Returns whether the place is there and no other run than the one with this id has taken
        it; "" is any run. In a directory, `Session` finds another run by the id in its line.
        """
        return self.folder.exists()


class Session:
    """The ranks of one run at work in one staging directory.

    Methods raise the error of another rank that failed. `on_note` is called with sentences for
    people. `lines` is the place where the ranks report, by default a part of the staging directory.

    From `open` or `join` to the end of the `with` block a thread reports that this rank lives,
    whatever the rank is busy with.
    """

    def __init__(
        self,
        staging: Path,
        ranks: Ranks,
        on_note: Callable[[str], None] = lambda text: None,
        lines: RankLines | None = None,
    ) -> None:
        self.staging, self.ranks, self.on_note = staging, ranks, on_note
        self.place = lines or RankLines(staging / FOLDER)
        self.alone = ranks.size == 1 and not self.place.public  # nobody reads this rank's line
        # Rank 0 makes a new `id` each time that it begins. Lines with another id belong to a run
        # that is over, though its processes may live on.
        self.line: dict[str, Any] = {"run": ranks.name, "id": "", "beat": 0, "steps": 0, "done": []}
        self.next_look = 0.0
        self.told = False  # whether this rank has told that it waits
        self.heard: dict[int, str] = {}  # rank -> its last line
        # rank -> the time of the last look, and the seconds for which its line has not changed
        self.watched: dict[int, tuple[float, float]] = {}
        # rank -> its last line, parsed; without the ranks that were given up
        self.lines: dict[int, dict[str, Any]] = {}
        self.writing, self.over = threading.Lock(), threading.Event()
        self.thread: threading.Thread | None = None

    def __enter__(self) -> Session:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Reports the error to the other ranks, if this rank fails."""
        self.end()  # a line that is still on its way would replace that of the error
        if error is None or self.alone or isinstance(error, Gone):
            return
        known = isinstance(error, (errors.MckptError, KeyboardInterrupt))
        message = str(error) if known else "".join(traceback.format_exception(error))
        with suppress(OSError, StorageError):
            if self.place.belong_to(self.line["id"]):
                self._write({**self.line, "error": [type(error).__name__, message]})

    def open(self) -> None:
        """Begins the run as rank 0, which owns the staging directory.

        Removes the lines of an earlier run.
        """
        if self.alone:
            return
        self.line["id"] = uuid.uuid4().hex
        self.place.clear()
        self._live()

    def end(self) -> None:
        """Ends the reports that this rank lives."""
        self.over.set()
        if self.thread is not None:
            self.thread.join()

    def join(
        self, finished: Callable[[bool], bool], refuse: Callable[[], None] = lambda: None
    ) -> None:
        """Joins the run as another rank: waits until rank 0 of this run has opened.

        It recognises the line of an earlier run, which does not change.

        finished: whether the run is done and published; its argument is whether rank 0 has been
            silent as long as a dead rank.
        refuse: raises the error that stops rank 0 before it has a directory in which to report it.

        Raises Gone if the run is finished, the error of rank 0 if it failed before this rank came,
        the error of `refuse`, and StorageError if rank 0 does not begin within START_S.
        """
        started, first, next_look = time.monotonic(), None, LOOK_S
        refused: errors.MckptError | None = None
        for _ in pauses(self.place.seconds.poll):
            waited = time.monotonic() - started
            late = waited > self.place.seconds.dead
            if waited > NOTE_S and not self.told:
                self.told = True
                self.on_note(self.ranks.waits_for("rank 0"))
            if line := self.place.read(0):
                first = first or line
                content = _parsed(line)
                ours = content.get("run") == self.ranks.name
                fresh = self.ranks.run or line != first  # else an earlier run may have written it
                if ours and "error" in content and (fresh or late):
                    raise error_of(0, *content["error"])
                if ours and "error" not in content and fresh:
                    self.line["id"] = content["id"]
                    self._live()
                    return
            elif not self.place.belong_to("") and finished(late):
                raise Gone(f"{self.staging}: no longer exists")
            if waited > next_look:
                before, refused, next_look = refused, refusal(refuse), waited + LOOK_S
                if before and refused:
                    raise refused
            if waited > START_S:
                raise StorageError(
                    f"{self.staging}: rank 0 has not begun within {START_S:.0f} s; rank"
                    f" {self.ranks.rank} gives up"
                )

    def begin(self, lay_out: Callable[[], None]) -> None:
        """Does the first step: rank 0 lays out the files, and the others wait for that."""
        if self.ranks.rank == 0:
            lay_out()
            self._reached(1)
        else:
            self._await({0}, 1, lambda rank: None)
            self._reached(1)

    def beat(self, *done: int) -> None:
        """Records the progress of this rank, and looks at the others now and then.

        Raises StorageError if rank 0 is dead.
        """
        now = time.monotonic()
        self.line["done"] = done or self.line["done"]
        if self.ranks.size == 1 or now < self.next_look:
            return
        self.next_look = now + self.place.seconds.beat
        for rank in range(1, self.ranks.size) if self.ranks.rank == 0 else (0,):
            self._look(rank)
        if self.ranks.rank and not self.lives(0):
            raise StorageError(
                f"{self.staging}: rank 0 has not been heard of for {self.place.seconds.dead:.0f} s;"
                " start the run again: it continues"
            )

    def done(self) -> list[int]:
        """Returns, on rank 0, the sum of the progress that all other ranks passed to `beat`."""
        return [
            sum(column)
            for column in zip(
                *(line["done"] for line in self.lines.values() if line["done"]), strict=True
            )
        ]

    def meet(self, do: Callable[[int], None]) -> None:
        """Ends a step: waits until every rank has done its share.

        Rank 0 calls `do` for each rank that died before it was done. A rank that never came counts
        as dead after the same time.
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
        """Waits, as a rank that has done its share, until rank 0 is done (raises Gone) or fails."""
        for _ in pauses(self.place.seconds.poll):
            self.beat()
            self._look(0)
            if not self.place.belong_to(self.line["id"]):
                break
        raise Gone(f"{self.staging}: no longer exists, and no checkpoint of this run is in place")

    def lives(self, rank: int) -> bool:
        """Returns whether the rank's line has changed lately.

        Time during which this process itself was stopped does not count.
        """
        _, silent = self.watched.get(rank, (0, 0.0))
        return not self.ranks.ended(rank) and silent < self.place.seconds.dead

    def _await(self, missing: set[int], step: int, do: Callable[[int], None]) -> None:
        started = time.monotonic()
        for _ in pauses(self.place.seconds.poll):
            absent = missing - self.heard.keys()
            if absent and not self.told and time.monotonic() - started > NOTE_S:
                self.told = True
                first, *more = sorted(absent)
                self.on_note(
                    self.ranks.waits_for(f"rank {first}{f' and {len(more)} more' * bool(more)}")
                )
            self.beat()
            for rank in sorted(missing):
                self._look(rank)
                if rank in self.lines and self.lines[rank]["steps"] >= step:
                    missing.remove(rank)
                elif self.ranks.rank == 0 and not self.lives(rank):
                    missing.remove(rank)
                    self.lines.pop(rank, None)
                    self.on_note(
                        f"rank {rank} has ended or is not heard of any more: rank 0 does its share"
                    )
                    do(rank)
            if not missing:
                return
            # all is done, and rank 0's line is already gone
            if not self.place.belong_to(self.line["id"]):
                raise Gone(f"{self.staging}: no longer exists")

    def _reached(self, step: int) -> None:
        self.line["steps"] = step
        if not self.alone:
            self._write(self.line)

    def _look(self, rank: int) -> None:
        """Reads the line of a rank. Raises the error that it reports."""
        now = time.monotonic()
        before, silent = self.watched.get(rank, (now, 0.0))
        self.watched[rank] = now, silent + min(now - before, 2 * self.place.seconds.beat)
        line = self.place.read(rank)
        if line == self.heard.get(rank) or not (content := _parsed(line)):
            return
        if content["id"] != self.line["id"]:
            if rank == 0:
                raise StorageError(
                    f"{self.staging}: rank 0 has begun anew; start rank {self.ranks.rank}"
                    " again: it joins"
                )
            return
        self.heard[rank], self.watched[rank] = line, (now, 0.0)
        if "error" in content:
            raise error_of(rank, *content["error"])
        self.lines[rank] = content

    def _live(self) -> None:
        self._write(self.line)
        self.thread = threading.Thread(target=self._beats, name="ranks", daemon=True)
        self.thread.start()

    def _beats(self) -> None:
        while not self.over.wait(self.place.seconds.beat):
            try:
                if not self.place.belong_to(self.line["id"]):
                    return
                self._write(self.line)
            except Gone:
                return
            except (OSError, StorageError):
                continue  # such as a full disk: the threads that write will report it

    def _write(self, line: dict[str, Any]) -> None:
        with self.writing:
            self.line["beat"] += 1
            self.place.write(self.ranks.rank, json.dumps({**line, "beat": self.line["beat"]}))


def _parsed(line: str) -> dict[str, Any]:
    """Returns the content of a line; {} if there is none, or if it is damaged."""
    with suppress(ValueError):
        content: dict[str, Any] = json.loads(line)
        return content
    return {}


def refusal(refuse: Callable[[], None]) -> errors.MckptError | None:
    """Returns the error that `refuse` raises, None if it raises none."""
    try:
        refuse()
    except errors.MckptError as e:
        return e
    except OSError:  # files come and go: rank 0 is at work
        return None
    return None


def error_of(rank: int, name: str, message: str) -> Exception:
    """Returns the error that the line of a rank reports, by the name of its class."""
    kind = getattr(errors, name, None)
    if isinstance(kind, type) and issubclass(kind, errors.MckptError):
        return kind(*f"rank {rank}: {message}".split("\n"))
    if name in ("KeyboardInterrupt", "Interrupted"):
        how = message or "interrupted"
        return StorageError(f"rank {rank} was {how}; start the run again: it continues")
    return RuntimeError(f"rank {rank}: {message}")


def wait_for(look: Callable[[], T | None], what: str, tick: Callable[[], None]) -> T:
    """Calls `look` until it returns something other than None, and returns that.

    look: reads a thing that another rank has written, which may take a while to appear on a network
    filesystem. Raises StorageError after DEAD_S; `what` names the missing thing.
    """
    started = time.monotonic()
    for _ in pauses():
        if (result := look()) is not None:
            return result
        if time.monotonic() - started > DEAD_S:
            break
        tick()
    raise StorageError(
        f"{what}: was written by another rank and is not there after {DEAD_S:.0f} s; run the same"
        " command again: it continues"
    )


def pauses(longest: float = POLL_S) -> Iterator[None]:
    """Yields at once, then after pauses that grow from 2 ms to `longest` seconds, without end."""
    pause = 0.002
    while True:
        yield
        time.sleep(pause)
        pause = min(longest, 1.2 * pause)
