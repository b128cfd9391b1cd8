"""Directories in which runs of mckpt write until their output is complete: their names, locks and
progress.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TypedDict

from mckpt.errors import SourceError
from mckpt.storage import sparse_copy

# prefix of a directory in which a run of mckpt writes until its output is complete
STAGING = ".mckpt-"
MANIFEST = "mckpt.json"
INTENT = "intent.json"  # in a staging directory of an object store: the names that a run writes
LOCK = "lock"  # in a staging directory: locked while a run works there
# in a staging directory: {name: [identity]} of its output, a part of which may be in DST already
PUBLISHING = "publishing"
REPLACED = (
    "replaced"  # in a staging directory: the old content of DST, until the new one is complete
)
OVER = ".over"  # suffix of a directory that is being removed
# in a staging directory: the state of the source whose bytes are in it
SOURCE = "source"


def unfinished(root: Path) -> str | None:
    """Returns a sentence on the runs of mckpt that work in a directory or were interrupted there;
    None if there are none.
    """
    sentences = []
    for folder in staging_directories(root):
        if in_place(folder):
            continue
        files = [os.stat(p) for p in (folder / "data").rglob("*") if p.is_file()]
        done, size = (
            sum(min(s.st_blocks * 512, s.st_size) for s in files),
            sum(s.st_size for s in files),
        )
        share = (
            f"about {done:,} of {size:,} bytes are written" if size else "nothing is written yet"
        )
        if (folder / "data" / MANIFEST).exists():
            share = f"all {size:,} bytes are written, and not yet in place"
        if (folder / INTENT).exists():
            num = len(list((folder / "sent").glob("*")))
            sentences.append(
                f"A run of mckpt is writing here, or was interrupted ({folder.name}): {num:,} files"
                " are in place. The same command continues where it stopped."
            )
        elif locked(folder / LOCK):
            sentences.append(f"A run of mckpt is writing here ({folder.name}): {share}.")
        else:
            sentences.append(
                f"A run of mckpt was interrupted here ({folder.name}): {share}. The same command"
                " continues where it stopped."
            )
    return " ".join(sentences) or None


def staging_directories(root: Path) -> list[Path]:
    """Returns the staging directories in a directory, without those that are being removed."""
    folders = (p for p in root.glob(f"{STAGING}*") if not p.name.endswith(OVER))
    return sorted(p for p in folders if p.is_dir())


def intended(root: Path, staging: Path | None) -> set[str]:
    """Returns the files, relative to `root`, that unfinished runs into an object store will write:
    the run with this staging directory, or with None all runs.
    """
    names: set[str] = set()
    for folder in staging_directories(root) if staging is None else [staging]:
        if announced := intent(folder):
            names.update(announced["files"])
    return names


class Intent(TypedDict):
    """The content of INTENT."""

    unit: str | None
    source: str  # the state of the source that the run reads
    files: list[str]  # relative to the destination's root


def intent(folder: Path) -> Intent | None:
    """Returns the intent in a staging directory, None if there is none that can be read."""
    import msgspec  # 8 ms, and few commands look for staging directories of stores

    # SourceError: that run has ended since the store was listed
    with suppress(SourceError, OSError, ValueError, RecursionError):
        sparse_copy.whole(folder / INTENT)
        return msgspec.json.decode((folder / INTENT).read_bytes(), type=Intent)
    return None


def refuse_half_sent(folder: Path) -> None:
    """Raises SourceError if a run into an object store is still sending the checkpoint in this
    directory, or was interrupted: its intent is there, but its manifest is not yet.
    """
    copy = sparse_copy.of(folder)
    if copy is None or (folder / MANIFEST).exists():
        return
    start = "" if folder == copy.root else f"{copy.name(folder)}/"
    if any(name.startswith(start) for name in intended(copy.root, None)):
        raise SourceError(f"{folder}: no checkpoint is here yet. {unfinished(copy.root)}")


def sync(path: Path) -> None:
    """Syncs a file or directory to disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def lock(fd: int) -> bool:
    """Tries to lock a file for one second; returns whether it did.

    It retries because `locked` in another process holds the lock for a moment.
    """
    for _ in range(20):
        with suppress(OSError):
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        time.sleep(0.05)
    return False


def locked(path: Path) -> bool:
    """Whether another process holds a lock on this file."""
    if not path.exists():
        return False
    fd = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(fd)
    return False


def mark(output: dict[str, Path], staging: Path) -> None:
    """Records which files are about to move to their final places, in addition to the files that
    killed runs have recorded.
    """
    moved = marked(staging)
    for name, there in output.items():
        moved.setdefault(name, set()).add(identity(there))
    path, beside = staging / PUBLISHING, staging / f"{PUBLISHING}.new"
    beside.write_text(json.dumps({name: sorted(identities) for name, identities in moved.items()}))
    sync(beside)
    os.replace(beside, path)
    sync(staging)


def marked(staging: Path) -> dict[str, set[str]]:
    """Returns the files that killed runs with this staging directory were moving to their final
    places: the identities of each name.
    """
    import msgspec

    with suppress(OSError, ValueError, RecursionError):  # most often there is no such file
        content = (staging / PUBLISHING).read_bytes()
        return msgspec.json.decode(content, type=dict[str, set[str]])
    return {}


def in_place(folder: Path) -> bool:
    """Returns whether all output of the run with this staging directory is in its final place. Such
    a run was killed while it cleaned up.
    """
    output, root = marked(folder), folder.parent
    with suppress(OSError):
        there = all(identity(root / name) in identities for name, identities in output.items())
        return bool(output) and there and not any(_files(folder / "data"))
    return False


def _files(folder: Path) -> Iterator[Path]:
    return (p for p in folder.rglob("*") if not p.is_dir())


def discard(folder: Path) -> None:
    """Removes a staging directory that is no longer needed.

    Renames it first, because other ranks write into it as long as they find it. Files that cannot
    be removed stay: the output is in place, and a later run removes the rest.
    """
    over = folder.with_name(f"{folder.name}{OVER}")
    shutil.rmtree(over, ignore_errors=True)
    with suppress(OSError):
        os.replace(folder, over)
    shutil.rmtree(over, ignore_errors=True)


def sweep(root: Path) -> None:
    """Removes directories in `root` that killed runs had begun to remove."""
    for over in root.glob(f"{STAGING}*{OVER}"):
        shutil.rmtree(over, ignore_errors=True)


def identity(path: Path) -> str:
    """Returns a text that differs between files of the same name, and that a rename does not
    change. For a directory, it is the identity of the first file below it.
    """
    if path.is_dir() and not path.is_symlink():
        path = min(_files(path), default=path)
    status = os.lstat(path)
    return f"{status.st_ino} {status.st_mtime_ns}"
