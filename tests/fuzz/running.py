"""Runs inputs one after the other in a process of its own, and judges how each of them ends."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import resource
import shutil
import signal
import tempfile
import time
import traceback
import warnings
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import click

from mckpt.errors import MckptError
from tests.fuzz import damage
from tests.fuzz.parsers import PARSERS, Parser, listed

LIMIT_S = 10.0
LIMIT_BYTES = 1 << 30
INTERNAL_ERROR = 70
PATIENCE_S = 30.0  # in which a process that does not even answer a signal is ended


class Finding(NamedTuple):
    """An input that did not end as it should."""

    parser: str
    seed: int
    number: int
    what: str  # the last line, and the place in mckpt
    text: str  # the traceback

    @property
    def name(self) -> str:
        """Returns what --replay takes."""
        return f"{self.parser}:{self.seed}:{self.number}"


class Ran(NamedTuple):
    """The outcome of some inputs of one parser."""

    inputs: int = 0
    accepted: int = 0  # that ended in success
    slowest: float = 0  # s
    slowest_input: int = 0
    peak: int = 0  # bytes, above those before the first input
    findings: tuple[Finding, ...] = ()

    def plus(self, other: Ran) -> Ran:
        """Returns the outcome of both."""
        slow = max(self, other, key=lambda ran: ran.slowest)
        return Ran(
            self.inputs + other.inputs,
            self.accepted + other.accepted,
            slow.slowest,
            slow.slowest_input,
            max(self.peak, other.peak),
            self.findings + other.findings,
        )


class TooLong(BaseException):
    """An input that takes longer than LIMIT_S."""


def _too_long(*_: Any) -> None:
    raise TooLong


def one(parser: Parser, seed: int, number: int, corpus: Path, work: Path) -> bool:
    """Damages and reads one input; returns whether it was accepted.

    Raises whatever the parser raises, except for errors that mckpt reports with an exit code.
    """
    random = Random(f"{parser.name}:{seed}:{number}")
    path, undo = work, []
    if parser.samples:
        path = work / random.choice(parser.samples)
        if not path.exists():
            shutil.copytree(corpus / path.name, path)
        if parser.files:
            chosen = random.choice(listed(corpus / path.name, parser.files))
            for target, data in damage.file(random, path / chosen):
                undo.append((target, corpus / target.relative_to(work)))
                target.unlink() if data is None else target.write_bytes(data)
        else:
            path = work
    weights, reads = zip(*parser.reads, strict=True)
    read = random.choices(reads, weights)[0]
    signal.setitimer(signal.ITIMER_REAL, LIMIT_S)
    try:
        read(path, random)
        return True
    except (MckptError, click.ClickException) as error:
        if error.exit_code == INTERNAL_ERROR:
            raise
        return False
    except (OSError, click.exceptions.Abort) as error:  # of the operating system: exit code 7
        if isinstance(error, OSError) and error.errno is not None:
            return False
        raise
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        for target, origin in undo:
            target.unlink(missing_ok=True)
            if origin.exists():
                shutil.copy2(origin, target)


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def _finding(parser: Parser, seed: int, number: int, error: BaseException) -> Finding:
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if f"{os.sep}mckpt{os.sep}" in f.filename] or frames
    place = f"{own[-1].filename.rpartition(f'{os.sep}mckpt{os.sep}')[2]}:{own[-1].lineno}"
    text = "".join(traceback.format_exception(error))
    what = f"{type(error).__name__} in {place}: {str(error)[:150]!r}"
    return Finding(parser.name, seed, number, what, text[-6000:])


def _limits() -> None:
    """Limits this process, and makes each warning an exception."""
    with open("/proc/self/statm") as f:
        size = int(f.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + 3 * LIMIT_BYTES,) * 2)
    signal.signal(signal.SIGALRM, _too_long)
    warnings.simplefilter("error")
    warnings.simplefilter("ignore", ResourceWarning)
    gc.disable()


def _run(name: str, seed: int, numbers: range, corpus: Path, current: Any, to: Connection) -> None:
    """Runs inputs of the parser `name` in this process, which is a new one, and sends their
    outcome.
    """
    _limits()
    parser, ran, before = PARSERS[name], Ran(), _peak()
    with tempfile.TemporaryDirectory(dir=corpus.parent) as work:
        for number in numbers:
            current.value = number
            began, found = time.perf_counter(), None
            accepted = False
            try:
                accepted = one(parser, seed, number, corpus, Path(work))
            except BaseException as error:
                found = _finding(parser, seed, number, error)
            took, peak = time.perf_counter() - began, _peak() - before
            if found is None and peak > max(LIMIT_BYTES, ran.peak):
                found = Finding(parser.name, seed, number, f"{peak >> 20} MiB", "")
            ran = ran.plus(Ran(1, accepted, took, number, peak, (found,) if found else ()))
            if number % 50 == 0:
                gc.collect()
            if peak > LIMIT_BYTES or (isinstance(found, Finding) and "MemoryError" in found.what):
                break
    to.send((ran, number + 1))


def run(parser: Parser, seed: int, numbers: range, corpus: Path) -> Ran:
    """Runs inputs in a process of its own; another one goes on behind an input that ended it."""
    # The processes are forks of a clean one, because tensorstore, if this one has used it, aborts
    # in forks of it.
    context, ran = multiprocessing.get_context("forkserver"), Ran()
    context.set_forkserver_preload([__name__])
    while numbers:
        current = context.Value("q", numbers.start, lock=False)
        receive, send = context.Pipe(duplex=False)
        args = (parser.name, seed, numbers, corpus, current, send)
        child = context.Process(target=_run, args=args)
        child.start()
        send.close()
        at, since, got = -1, time.monotonic(), None
        while (got is None and child.is_alive()) or receive.poll():
            if receive.poll(0.2):
                with contextlib.suppress(EOFError):
                    got = receive.recv()
                break
            if current.value != at:
                at, since = current.value, time.monotonic()
            elif time.monotonic() - since > PATIENCE_S:
                child.kill()
        child.join()
        if got is None:
            number = current.value
            what = f"the process ended with {child.exitcode}"
            found = Finding(parser.name, seed, number, what, "")
            got = Ran(number + 1 - numbers.start, findings=(found,)), number + 1
        ran = ran.plus(got[0])
        numbers = range(got[1], numbers.stop)
    return ran


def replay(parser: Parser, seed: int, number: int, corpus: Path, keep: Path | None) -> None:
    """Runs one input in this process; the exception of a finding is raised. keep: a folder that
    gets the damaged sample.
    """
    _limits()
    with tempfile.TemporaryDirectory() as work:
        if keep is not None:
            kept = damage.file

            def file(random: Random, path: Path) -> Iterator[tuple[Path, bytes | None]]:
                for target, data in kept(random, path):
                    yield target, data
                    shutil.copytree(Path(work), keep, dirs_exist_ok=True)

            damage.file = file
        print("accepted" if one(parser, seed, number, corpus, Path(work)) else "refused")
