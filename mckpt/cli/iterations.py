"""Many checkpoints of one training run by one command: --iterations, --wait-for, --watch, --keep.

The command stores no state between two runs. It finds from the output which iterations are done.
"""

from __future__ import annotations

import functools
import gc
import json
import os
import re
import shutil
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from msgspec import Struct, field

from mckpt.cli import terminal
from mckpt.cli.options import POSITIVE, in_section, together
from mckpt.cli.terminal import echo, echo_outcome, reporting
from mckpt.errors import (
    MckptError,
    SourceError,
    StorageError,
    Unprinted,
    Unreported,
    UsageError,
    counted,
)
from mckpt.formats import places
from mckpt.formats.megatron.save_directory import (
    MAPPING,
    TRACKER,
    Tracker,
    find,
    is_iteration_name,
    iteration_name,
    iteration_of,
    iterations_of,
)
from mckpt.lazy import pattern
from mckpt.storage import addresses, sparse_copy
from mckpt.storage.staging import MANIFEST, OVER, STAGING, sweep
from mckpt.values.sizes import parse_duration

REST_S = 5.0  # seconds between two looks at a checkpoint, in which nothing may have changed
TRIES = 3  # how often --watch tries to convert an iteration
FIELD = pattern(r"\{iteration(:0?\d*d)?\}")
Look = list[tuple[str, int, int]]  # name, bytes and mtime of each file of a checkpoint


class Outcome(Struct, frozen=True):
    """The result of one conversion."""

    state: str  # written, done already, portable already, planned, failed
    path: str
    text: str = ""  # for people, on stdout
    nbytes: int = 0
    seconds: float = 0.0
    exit_code: int = 0
    facts: dict[str, Any] = {}  # the manifest

    def show(self, as_json: bool) -> None:
        """Prints it as the result of a command; a plan has been printed already."""
        if self.text:
            with reporting(self.path):
                echo(json.dumps({**self.json(), **self.facts}) if as_json else self.text)

    def json(self) -> dict[str, Any]:
        return {
            "state": self.state,
            "path": self.path,
            "bytes": self.nbytes,
            "seconds": round(self.seconds, 3),
        }


Convert = Callable[..., "Outcome | None"]  # (src, dst, options) -> outcome; None: another rank

several_option = in_section("Many checkpoints")
OPTIONS = together(
    several_option(
        "--iterations",
        metavar="WHICH",
        help="Convert several iterations of SRC: latest, all, or a list of numbers and ranges such"
        " as 1000,2000 or 500:12500:500. DST contains {iteration} or {iteration:07d}, unless it is"
        " a Megatron save directory.",
    ),
    several_option(
        "--wait-for",
        metavar="TIME",
        help="Wait at most this long, such as 30m or 2h, until the checkpoint is complete.",
    ),
    several_option(
        "--watch",
        is_flag=True,
        help="Convert each iteration of SRC (or of --iterations) when it appears, until --until or"
        " a signal.",
    ),
    several_option(
        "--interval",
        default="60s",
        metavar="TIME",
        help="Time after which --watch or --wait-for looks again.",
    ),
    several_option(
        "--until",
        type=POSITIVE,
        help="--watch ends when the training run has saved iteration N, or a later one, and"
        " everything until N is converted.",
    ),
    several_option(
        "--keep",
        type=POSITIVE,
        metavar="K",
        help="Convert only the newest K iterations, and remove older output of mckpt.",
    ),
)


def repeated(to_hf: bool) -> Callable[[Convert], Callable[..., int]]:
    """Returns a decorator that lets a command convert one checkpoint or many.

    to_hf: DST is a Hugging Face directory, which has room for a single checkpoint.
    """

    def decorate(convert: Convert) -> Callable[..., int]:
        @functools.wraps(convert)
        def run(
            src: Path,
            dst: Path | None,
            iterations: str | None,
            wait_for: str | None,
            watch: bool,
            interval: str,
            until: int | None,
            keep: int | None,
            **options: Any,
        ) -> int:
            pause = parse_duration(interval, "--interval")
            src, dst = places.local(src) if addresses.url_of(src) else src, _resolved(dst)
            patience = parse_duration(wait_for, "--wait-for") if wait_for else 0.0
            if not watch and until is not None:
                raise UsageError("--until ends --watch; give --watch too")
            if iterations is None and not watch:
                if keep is not None:
                    raise UsageError("--keep needs --iterations or --watch")
                if patience:
                    wait(src, options["iteration"], patience, pause)
                if outcome := convert(src, dst, **options):
                    outcome.show(options["as_json"])
                return 0
            if options["iteration"] is not None:
                raise UsageError("--iteration and --iterations or --watch: give one of them")
            _refuse_ranks(options["workers"])
            job = _IterationsRun(convert, src, _OutputPattern(dst, to_hf), options, keep)
            if keep is not None and dst is None:
                raise UsageError("--keep removes output below DST; give DST")
            if not watch:
                job.once(str(iterations), patience, pause)
                return job.end()
            try:
                job.watch(iterations or "all", pause, until)
            except KeyboardInterrupt:
                # A signal is the ordinary end of a command that only waits for more iterations.
                if job.converting or until is not None:
                    raise
                job.print_note("stopped by a signal; the same command continues")
            return job.end()

        return OPTIONS(run)

    return decorate


def _resolved(dst: Path | None) -> Path | None:
    """Returns DST; for a URL, the sparse copy of the part before {iteration}, and the rest."""
    url = addresses.url_of(dst) if dst is not None else None
    if dst is None or url is None:
        return dst
    parts = Path(url.path).parts
    first = next((i for i, part in enumerate(parts) if "{" in part), len(parts))
    return places.target(f"{url.scheme}://{Path(*parts[:first])}").joinpath(*parts[first:])


def _refuse_ranks(workers: int | None) -> None:
    from mckpt.execute.ranks import Ranks

    if workers is None and (size := Ranks.of_environment().size) > 1:
        raise UsageError(
            f"--iterations and --watch run in one process, and a launcher started {size}; use"
            " --workers N (1 for a process alone), or start a command with --iteration for each"
        )


# ------------------------------------------------------------------------------ which, and where to


def chosen(text: str, there: list[int]) -> list[int]:
    """Returns the iterations that the text of --iterations names, in ascending order.

    there: the iterations that exist. `all` and `latest` mean some of them.
    """
    if text == "all":
        return there
    if text == "latest":
        return there[-1:]
    out: set[int] = set()
    for part in text.split(","):
        numbers = re.fullmatch(r"\s*(\d+)(?::(\d+)(?::(\d+))?)?\s*", part)
        step = int(numbers[3] or 1) if numbers else 0
        if numbers is None or step == 0:
            raise UsageError(
                f"--iterations {text!r}: {part!r} is neither latest nor all nor a number nor a"
                " range such as 500:12500:500"
            )
        out.update(range(int(numbers[1]), int(numbers[2] or numbers[1]) + 1, step))
    if not out:
        raise UsageError(
            f"--iterations {text!r}: names no iteration; the end of a range is included"
        )
    return sorted(out)


class _OutputPattern:
    """Where the output of each iteration goes: the pattern DST."""

    def __init__(self, dst: Path | None, to_hf: bool) -> None:
        self.dst, text = dst, str(dst or "")
        self.fields = len(FIELD.findall(text))
        if re.search(r"[{}]", FIELD.sub("", text)):
            raise UsageError(f"{dst}: only {{iteration}} or {{iteration:07d}} may stand in braces")
        if to_hf and not self.fields:
            raise UsageError(
                f"{dst}: is one Hugging Face directory for several iterations; write for example"
                f" {dst}/iter_{{iteration}}"
            )
        if dst is not None:  # of every output, also where DST is a save directory
            text = os.path.abspath(dst if self.fields else dst / "iter_{iteration:07d}")
        self.pattern = text

    def of(self, iteration: int) -> Path | None:
        if self.dst is None or not self.fields:
            return self.dst
        return Path(str(self.dst).format(iteration=iteration))

    def outputs(self) -> dict[int, Path]:
        """Returns the output directories that exist, by iteration, in ascending order."""
        if not self.pattern:
            return {}
        parts = Path(self.pattern).parts
        first = next(i for i, part in enumerate(parts) if FIELD.search(part))
        rest = "/".join(FIELD.sub("*", part.replace("[", "[[]")) for part in parts[first:])
        out = {}
        for path in Path(*parts[:first]).glob(rest):
            for number in {int(n) for n in re.findall(r"\d+", str(path))}:
                if str(path) == self.pattern.format(iteration=number) and path.is_dir():
                    out[number] = path
        return dict(sorted(out.items()))


# ------------------------------------------------------------------------------------------ the run


class _IterationsRun(Struct):
    """One command over many iterations."""

    convert: Convert
    src: Path
    place: _OutputPattern
    options: dict[str, Any]
    keep: int | None
    outcomes: dict[int, Outcome] = {}
    started: float = field(default_factory=time.perf_counter)
    converting: bool = False

    @property
    def as_json(self) -> bool:
        return bool(self.options["as_json"])

    def once(self, text: str, patience: float, pause: float) -> None:
        """Converts the iterations that --iterations names; with `patience` waits for each."""
        there, later = _complete(self.src)
        if later and text in ("all", "latest"):
            names = ", ".join(map(str, later))
            self.print_note(f"{self.src}: {TRACKER} does not name {names} yet; left out")
        wanted = chosen(text, there)
        missing = [n for n in wanted if n not in there and n not in later]
        if missing and not patience:
            raise SourceError(
                f"{self.src}: has no iteration {', '.join(map(str, missing))}; it has"
                f" {', '.join(map(str, there)) or 'none'}"
            )
        if not wanted:
            raise SourceError(f"{self.src}: has no complete iteration")
        for iteration in wanted[-self.keep :] if self.keep else wanted:
            if patience:
                wait(self.src, iteration, patience, pause)
            self.one(iteration)

    def watch(self, text: str, pause: float, until: int | None) -> None:
        """Converts each iteration when it is complete and at rest."""
        chosen(text, [])  # refuses a wrong text before anything is waited for
        rest = min(REST_S, pause)
        handled: dict[int, tuple[Look, int]] = {}  # the files that were converted, and the tries
        self.print_note(f"watching {self.src}")
        while not terminal.caught():
            there, _ = _complete(self.src)
            wanted = chosen(text, there)
            pending = {}
            for n in [n for n in there if n in wanted][-self.keep if self.keep else 0 :]:
                now = look(self.src / iteration_name(n))
                before, tries = handled.get(n, ([], 0))
                failed = n in self.outcomes and self.outcomes[n].exit_code != 0
                if now != before or (failed and tries < TRIES):
                    pending[n] = now, (tries if now == before else 0) + 1
            if not pending and until is not None and there and there[-1] >= until:
                return
            if pending:
                time.sleep(rest)
            for n, (before, tries) in pending.items():
                if until is not None and n > until:
                    handled[n] = before, tries
                elif look(self.src / iteration_name(n)) == before:
                    handled[n] = before, tries
                    self.one(n)
            if not pending or any(o.exit_code for o in self.outcomes.values()):
                time.sleep(pause)

    def one(self, iteration: int) -> None:
        """Converts one iteration, prints how it ended, and removes output that is too old."""
        dst = self.place.of(iteration)
        options = self.options | {"iteration": iteration, "many": True}
        self.converting = True
        try:
            outcome = self.convert(self.src, dst, **options)
        except MckptError as e:
            outcome = Outcome("failed", str(dst or ""), f"{e}", exit_code=e.exit_code)
        self.converting = False
        gc.collect()  # a plan has many objects, and the program collects seldom
        assert outcome is not None
        self.outcomes[iteration] = outcome
        if self.as_json:
            echo(json.dumps({"event": "iteration"} | self._row(iteration)), err=True)
        else:
            with suppress(Unprinted):  # `end` reports it
                echo(f"iteration {iteration}: {outcome.text}", err=outcome.exit_code != 0)
        if self.keep is not None and not outcome.exit_code and not self.options["dry_run"]:
            outputs = self.place.outputs()
            for root in {path.parent for path in outputs.values()}:
                sweep(root)
            for number, path in list(outputs.items())[: -self.keep]:
                self.print_note(remove(path) or f"iteration {number}: {path} was removed (--keep)")

    def print_note(self, text: str) -> None:
        terminal.print_note(text, self.as_json)

    def _row(self, iteration: int) -> dict[str, Any]:
        outcome = self.outcomes[iteration]
        row = {"iteration": iteration, **outcome.json(), "exit_code": outcome.exit_code}
        return row | ({"error": outcome.text} if outcome.exit_code else {})

    def end(self) -> int:
        """Prints the summary; returns the exit code of the worst iteration."""
        rows = [self._row(n) for n in sorted(self.outcomes)]
        code = max((row["exit_code"] for row in rows), default=0)
        try:
            with reporting(self.place.pattern or str(self.src)):
                self._print(rows, code)
        except Unreported:
            if not code:
                raise
        return int(code)

    def _print(self, rows: list[dict[str, Any]], code: int) -> None:
        if self.as_json:
            facts = {"iterations": rows, "exit_code": code}
            where = Path(self.place.pattern or self.src)
            echo_outcome("failed" if code else "done", self.started, facts, path=where)
            return
        for row in rows:
            echo(
                f"{row['iteration']:>10}  {row['state']:<16} {row['bytes']:>18,} bytes"
                f" {row['seconds']:>9.2f} s  {row['path']}"
            )
        states = Counter(row["state"] for row in rows)
        parts = ", ".join(f"{number} {state}" for state, number in states.items())
        echo(f"{counted(len(rows), 'iteration')}: {parts or 'nothing to do'}")


# ---------------------------------------------------------------------------- complete, and at rest


def _complete(src: Path) -> tuple[list[int], list[int]]:
    """Returns the iterations of a save directory that training has completed, and those that it may
    still be writing: Megatron updates the tracker after it has written the last file.
    """
    sparse_copy.refresh(src)
    there, tracked = iterations_of(src), Tracker(src).content()
    if not tracked.isdecimal():  # no tracker, or the one of a release, names no iteration
        return ([], there) if tracked else (there, [])
    return [n for n in there if n <= int(tracked)], [n for n in there if n > int(tracked)]


def look(path: Path) -> Look:
    """Returns name, bytes and mtime of every file below a directory, sorted."""
    out = []
    sparse_copy.refresh(path)
    for folder, _, names in os.walk(path):
        for name in names:
            with suppress(FileNotFoundError):
                file = os.path.join(folder, name)
                status = os.stat(file)
                out.append((file, status.st_size, status.st_mtime_ns))
    return sorted(out)


def wait(src: Path, iteration: int | None, patience: float, pause: float) -> None:
    """Returns when the checkpoint that `src` (and `iteration`) means is complete and at rest.

    patience: seconds after which it raises SourceError, which names what was missing at the end.
    """
    end, step = time.monotonic() + patience, min(REST_S, pause)
    before: Look | None = None
    while True:
        path, lacking = _awaited(src, iteration)
        now = look(path) if path else None
        if now and now == before:
            return
        before = now
        if time.monotonic() + step > end:
            why = lacking or "its files are still changing"
            raise SourceError(f"{src}: {why}, after {patience:,.0f} s (--wait-for)")
        time.sleep(step)


def _awaited(src: Path, iteration: int | None) -> tuple[Path | None, str]:
    """Returns the directory of a checkpoint if it is complete; else None and what is missing."""
    sparse_copy.refresh(src)
    if not src.is_dir():
        return None, "is not there"
    try:
        directory = find(src, iteration)
    except (SourceError, UsageError) as e:
        return None, f"{e}".removeprefix(f"{os.path.realpath(src)}: ")
    tracked = Tracker(directory.root).content() if is_iteration_name(directory.name) else ""
    if not tracked and directory.path != Path(os.path.realpath(src)):
        return None, f"has no {TRACKER} yet"
    number = iteration_of(directory.name) if tracked.isdecimal() else None
    if number is not None and number > int(tracked):
        return None, f"{TRACKER} names {tracked} and not yet {number}"
    if (
        not tracked
        and any(directory.path.glob("*.distcp"))
        and not (directory.path / ".metadata").exists()
    ):
        return None, f"{directory.path / '.metadata'} is not there"
    return directory.path, ""


# ------------------------------------------------------------------------------------------- --keep


def remove(path: Path) -> str:
    """Removes an output directory of mckpt; returns "" or the reason why it was left.

    Only a directory all of whose files a manifest of mckpt names is removed.
    """
    from mckpt.storage import manifest

    if path.is_symlink():
        return f"{path}: is kept, because it is a link"
    sparse_copy.refresh(path)
    roots = [path, *path.glob("iter_*"), *path.glob("release")]
    known = {str(path / TRACKER), str(path / MAPPING)}
    for root in roots:
        with suppress(SourceError, StorageError):
            if written := manifest.read(root):
                beside = (f"{manifest.BESIDE}{name}" for name in written.get("hf", ()))
                names = [*written["files"], *beside]
                known |= {str(root / MANIFEST), *(os.path.normpath(root / name) for name in names)}
    links = [str(p) for p in path.rglob("*") if p.is_symlink() and p.is_dir()]
    foreign = [name for name in [*(n for n, _, _ in look(path)), *links] if name not in known]
    if len(known) == 2 or foreign:
        ours = len(known) > 2
        what = f"holds {foreign[0]}, which mckpt did not write" if ours else f"has no {MANIFEST}"
        return f"{path}: is kept, because it {what}"
    if Tracker(path.parent).content() in (path.name, str(int(re.sub(r"\D", "", path.name) or 0))):
        return f"{path}: is kept, because {path.parent / TRACKER} names it"
    if sparse_copy.remove(path):
        return ""
    aside = path.with_name(f"{STAGING}removed-{path.name}{OVER}")
    shutil.rmtree(aside, ignore_errors=True)
    os.rename(path, aside)
    shutil.rmtree(aside)
    return ""
