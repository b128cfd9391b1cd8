"""Runs `mckpt` as a user does, damages checkpoints on purpose, and reads the files that
a run left.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np

from mckpt import api, cli
from mckpt.containers import dcp_metadata, safe_pickle, torch_file
from tests.helpers.tiny import tiny_random

ROOT = Path(__file__).resolve().parents[2]
PT = "model_optim_rng.pt"  # the file of one rank in the format `torch`
TRACKER = "latest_checkpointed_iteration.txt"
Arrays = dict[str, Any]


class Said(NamedTuple):
    """The exit code and the output of one run of mckpt."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


def mckpt(*args: Any) -> Said:
    """Runs `mckpt` with these arguments in this process."""
    out, err = io.StringIO(), io.StringIO()
    with (
        mock.patch.object(sys, "argv", ["mckpt", *map(str, args)]),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        try:
            cli.main()
            code: Any = 0
        except SystemExit as e:
            code = e.code or 0
    return Said(code, out.getvalue(), err.getvalue())


def good(*args: Any) -> Said:
    """Runs `mckpt` in this process; it must exit with 0."""
    said = mckpt(*args)
    assert said.code == 0, f"mckpt {' '.join(map(str, args))} ended with {said.code}:\n{said.err}"
    return said


def refused(code: int, *words: str, args: tuple[Any, ...], untouched: Path | None = None) -> str:
    """Runs `mckpt`, which must exit with `code` and one error that contains these words, without a
    traceback, and leave `untouched` unchanged. Returns the error.
    """
    before = None if untouched is None else tree(untouched)
    said = mckpt(*args)
    assert said.code == code, f"wanted exit {code}, got {said.code}:\n{said.out}{said.err}"
    assert "Traceback" not in said.err and "internal error" not in said.err, said.err
    assert said.out == "", said.out
    missing = [w for w in words if w not in said.err]
    assert not missing, f"the error does not say {missing}:\n{said.err}"
    starts = re.findall("^(?:mckpt|Error): ", said.err, re.MULTILINE)
    assert len(starts) == 1, f"one error is wanted:\n{said.err}"
    if untouched is not None:
        assert tree(untouched) == before, f"{untouched} was changed"
    return said.err


def command_line(*args: Any, before: str = "") -> list[str]:
    """Returns the command line that runs `mckpt` with these arguments in a process of its own.
    `before` is Python that runs first, such as a change of a part of mckpt.
    """
    argv = ["mckpt", *map(str, args)]
    if not before:
        return [sys.executable, "-m", *argv]
    return [
        sys.executable,
        "-c",
        f"import sys\n{before}\nfrom mckpt import cli\nsys.argv = {argv}\ncli.main()",
    ]


def run(arguments: list[Any], code: int = 0, **how: Any) -> subprocess.CompletedProcess[str]:
    """Runs a command in the repository, at most 100 s; it must end with this exit code."""
    how = {"cwd": ROOT, "capture_output": True, "text": True, "timeout": 100, **how}
    done = subprocess.run([str(one) for one in arguments], **how)
    assert done.returncode == code, f"exit {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done


def python(code: str, *args: Any) -> str:
    """Runs Python code in a process of its own, which must end well; returns what it printed."""
    return run([sys.executable, "-c", textwrap.dedent(code), *args]).stdout


def tree(path: Path) -> dict[str, bytes | None]:
    """Returns every file below a directory, hidden ones too, with its bytes; directories as None.
    The result is empty where the directory does not exist.
    """
    return (
        {
            str(p.relative_to(path)): p.read_bytes() if p.is_file() else None
            for p in sorted(path.rglob("*"))
        }
        if path.exists()
        else {}
    )


def hf(path: Path, case: str = "qwen3", **how: Any) -> Path:
    return tiny_random(case, path, **how)


def shard(path: Path) -> tuple[dict[str, Any], bytes]:
    """Returns header and data of a .safetensors file."""
    raw = path.read_bytes()
    n = int.from_bytes(raw[:8], "little")
    return json.loads(raw[8 : 8 + n]), raw[8 + n :]


def write_shard(path: Path, header: Any, data: bytes) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def edit_json(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    found = json.loads(path.read_text())
    change(found)
    path.write_text(json.dumps(found))


class Pt:
    """A torch.save file taken apart without torch. `value` may be changed (tensors are records),
    and `data` holds the storages.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        fd = os.open(path, os.O_RDONLY)
        try:
            self.value, ranges = torch_file.read(fd, str(path))
            self.data = {k: os.pread(fd, n, at) for k, (at, n) in ranges.items()}
        finally:
            os.close(fd)

    def put(self, dtype: str, shape: tuple[int, ...], data: bytes) -> Any:
        """Returns the record of a new tensor."""
        key = str(len(self.data) + 1000)
        self.data[key] = data
        return safe_pickle.tensor(dtype, shape, key)

    def save(self, path: Path | None = None) -> None:
        save_pt(path or self.path, self.value, self.data)


def save_pt(path: Path, value: Any, data: dict[str, bytes]) -> None:
    """Writes a torch.save file of records and storages."""
    laid = torch_file.lay_out(value, path.stem)
    raw = bytearray(laid.size)
    for key, (at, n) in laid.data.items():
        raw[at : at + n] = data[key][:n]
    for at, piece in laid.fixed():
        raw[at : at + len(piece)] = piece
    path.write_bytes(raw)
    restate(path)


def restate(path: Path) -> None:
    """Makes the manifests of a checkpoint state what a test has done to one of its files: another
    size, or none if it is gone.
    """
    directory = path.parent.parent
    for folder in (path.parent, directory, directory / "release"):
        manifest = folder / "mckpt.json"
        if not manifest.exists():
            continue
        found = json.loads(manifest.read_text())
        name = os.path.relpath(path, folder)
        if not path.exists():
            found["files"].pop(name, None)
        elif name in found["files"]:
            found["files"][name]["bytes"] = path.stat().st_size
        manifest.write_text(json.dumps(found))


def as_trained(
    source: Path,
    out: Path,
    change: Callable[[dict[str, Any]], Any] = lambda args: None,
    **wanted: Any,
) -> Path:
    """Writes `source` as a training run would leave it in the format `torch`; returns `out`.

    `change` edits the args of each rank. The files that only mckpt writes are removed.
    """
    api.plan(source, out, format="torch", **wanted).run()
    for path in (out / "release").glob(f"mp_rank_*/{PT}"):
        file = Pt(path)
        args = dict(safe_pickle.fields(file.value["args"]))
        change(args)
        file.value["args"] = safe_pickle.namespace(**args)
        file.save()
    for stray in (out / "release" / "mckpt.json", *(out / "hf").glob("*")):
        stray.unlink()
    (out / "hf").rmdir()
    return out


def hostile_pickle(mark: Path) -> bytes:
    """Returns a pickle that would run `touch mark` if a reader called a function that it names."""
    return f"cos\nsystem\n(S'touch {mark}'\ntR.".encode()


def save_hostile(path: Path, mark: Path) -> None:
    """Writes a torch.save file with such a pickle."""
    made = torch_file.TorchFile(path.stem, hostile_pickle(mark), {})
    path.write_bytes(b"".join(piece for _, piece in made.fixed()))


def emit(tensors: dict[str, Any], items: list[Any]) -> bytes:
    """Returns the .metadata of `tensors`, (dtype, shape, [(offsets, sizes)]) or None for an object,
    and of `items`, (key, offsets, file, offset, length). Tensors and items are written one by one,
    so they may contradict each other.
    """
    files = list(dict.fromkeys(file for _, _, file, _, _ in items))
    pieces = dcp_metadata.emit_metadata(
        {key: tensor[:2] for key, tensor in tensors.items() if tensor},
        [key for key, tensor in tensors.items() if not tensor],
        [
            dcp_metadata.Chunks(key, np.array([o]), sizes)
            for key, tensor in tensors.items()
            if tensor
            for o, sizes in tensor[2]
        ],
        [
            dcp_metadata.Items(
                [key],
                None,
                None if o is None else np.array([o]),
                np.array([files.index(file)]),
                np.array([at]),
                length,
            )
            for key, o, file, at, length in items
        ],
        files,
    )
    return b"".join(piece.data() for piece in pieces)
