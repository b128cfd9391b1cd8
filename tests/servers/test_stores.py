"""Checkpoints in object stores, on an S3 server on loopback: commands, faults, interrupted runs."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file, save_file

import mckpt as package
from mckpt.conversion import store_journal, to_store
from mckpt.errors import SourceError, UsageError
from mckpt.execute import ranks as execute_ranks
from mckpt.storage import addresses, sparse_copy, stores
from tests.formats import test_towers
from tests.helpers import nemo_archive
from tests.helpers.commands import ROOT, TRACKER, Said, command_line, good, mckpt, refused, tree
from tests.helpers.s3_server import Fault, Server
from tests.helpers.tiny import unpack

SRC = ROOT / "fixtures" / "tiny-qwen3"
SIZES = ("--format", "torch", "--tp", "2", "--pp", "2", "--iteration", "7")
SECRET = "not-to-be-printed"
Cli = Callable[..., Said]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    found = Server(tmp_path_factory.mktemp("s3"))
    yield found
    found.stop()


@pytest.fixture(scope="module")
def local(work: Path) -> Path:
    """The checkpoint that every conversion of SRC with SIZES must equal."""
    good("hf-to-megatron", SRC, work / "local", *SIZES)
    return work / "local"


@pytest.fixture
def bucket(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A bucket that holds the model of SRC as hf/; requests are repeated at once."""
    server.set()
    name = f"{tmp_path.parent.name}-{tmp_path.name}"
    server.put(name, SRC, "hf/")
    for key, value in server.environment().items():
        monkeypatch.setenv(key, value)
    monkeypatch.setattr(stores, "WAITS", (0, 0))
    monkeypatch.setattr(store_journal, "LIVE_S", 1.0)
    soon = {"init_backoff": timedelta(milliseconds=1), "max_backoff": timedelta(milliseconds=2)}
    monkeypatch.setitem(stores.RETRIES, "backoff", {**soon, "base": 2})
    return name


@pytest.fixture
def cli(bucket: str) -> Cli:
    """A function that runs `mckpt` in this process; `s3:` in an argument is this test's bucket."""

    def call(*args: Any, code: int = 0) -> Said:
        said = mckpt(*(str(a).replace("s3:", f"s3://{bucket}/") for a in args))
        assert said.code == code, said
        assert "Traceback" not in said.err and SECRET not in said.out + said.err
        assert str(sparse_copy.TEMPORARY) not in said.out + said.err
        return said

    return call


@pytest.fixture
def fetched(server: Server, bucket: str, tmp_path: Path) -> Callable[[str], Path]:
    """A function that copies what lies below a name in the bucket to a new directory."""

    def call(name: str) -> Path:
        shutil.rmtree(tmp_path / "fetched" / name, ignore_errors=True)
        return server.fetch(bucket, f"{name}/", tmp_path / "fetched" / name)

    return call


def files(path: Path) -> dict[str, Any]:
    """Returns the files of a checkpoint; of the manifest, all but the state of the source."""
    found: dict[str, Any] = {name: data for name, data in tree(path).items() if data is not None}
    for name in found:
        if name.endswith("mckpt.json"):
            found[name] = {**json.loads(found[name]), "read": 0}
    return found


def small_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets a tiny model have many groups of files, and uploads of several parts."""
    monkeypatch.setattr(to_store, "GROUP", 1)
    monkeypatch.setattr(stores, "PART", 32 << 10)


# -------------------------------------------------------------------------------------- conversions


@pytest.mark.parametrize(
    "options",
    [
        SIZES,
        ("--format", "torch_dist", "--tp", "2", "--iteration", "7"),
        ("--pp", "2", "--checksum", "sha256"),
        ("--dtype", "fp16"),
    ],
)
def test_a_conversion_in_a_store_writes_the_same_bytes(
    cli, fetched, tmp_path, monkeypatch, options
):
    small_groups(monkeypatch)
    good("hf-to-megatron", SRC, tmp_path / "here", *options)
    here = files(tmp_path / "here")
    cli("hf-to-megatron", "s3:hf", "s3:both", *options)
    assert files(fetched("both")) == here
    cli("hf-to-megatron", SRC, "s3:up", *options)
    assert files(fetched("up")) == here
    cli("hf-to-megatron", "s3:hf", tmp_path / "down", *options)
    assert files(tmp_path / "down") == here


def test_back_and_reshard_and_repair_write_the_same_bytes(
    cli, server, bucket, local, fetched, tmp_path, monkeypatch
):
    small_groups(monkeypatch)
    server.put(bucket, local, "m/")
    for name, (command, *options) in {
        "hf2": ("megatron-to-hf", "--max-shard-size", "64KiB"),
        "fp8": ("megatron-to-hf", "--quantize", "fp8", "--max-shard-size", "64KiB"),
        "resharded": ("reshard", "--target-tp", "4", "--target-format", "torch_dist"),
    }.items():
        good(command, local, tmp_path / name, *options)
        cli(command, "s3:m", f"s3:{name}", *options)
        assert files(fetched(name)) == files(tmp_path / name), name
    cli("reshard", "s3:m/iter_0000007", "s3:unit", "--target-tp", "1", "--target-pp", "1")
    cli("diff", "s3:unit", "s3:hf")


def test_repair_writes_to_a_store(cli, server, bucket, tmp_path):
    path = unpack("optimizer/dp_zero_gather_scatter", tmp_path / "state")
    server.put(bucket, path, "s/")
    said = cli("repair", "s3:s", code=2).err
    assert "give DST too" in said
    cli("repair", "s3:s", "s3:portable")
    good("repair", path, tmp_path / "portable")
    cli("diff", "s3:portable", tmp_path / "portable")


def test_commands_that_read_take_a_url(cli, server, bucket, local):
    server.put(bucket, local, "m/")
    for name, path in (("s3:hf", SRC), ("s3:m", local)):
        there, here = (
            json.loads(one("inspect", p, "--json").out) for one, p in ((cli, name), (good, path))
        )
        url = name.replace("s3:", f"s3://{bucket}/")
        assert there == json.loads(json.dumps(here).replace(str(path), url))
        assert "sound" in cli("check", name).out
    assert "s3://" in cli("plan", "s3:hf", "s3:new").out
    cli("diff", "s3:hf", "s3:m")
    assert f"PASS: s3://{bucket}/hf and " in cli("verify", "s3:hf", "s3:m", "--level", "bytes").out
    said = cli("verify", "s3:hf", "s3:m", code=2).err
    assert "--level forward needs a directory of this machine" in said
    log = server.control()["log"]
    assert not any(line.startswith(("PUT", "POST", "DELETE")) for line in log)


def test_diff_and_check_find_a_flipped_bit(cli, server, bucket, local):
    server.put(bucket, local, "m/")
    path = server.keys(bucket)["m/iter_0000007/mp_rank_00_000/model_optim_rng.pt"]
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    cli("diff", "s3:hf", "s3:m", code=1)
    assert "model_optim_rng.pt" in cli("check", "s3:m", code=3).out


def test_a_header_is_read_without_the_weights(
    cli, server, bucket, tmp_path, monkeypatch, tiny_model
):
    folder = tmp_path / "model"
    shutil.copytree(tiny_model("qwen3-moe"), folder)
    server.put(bucket, folder, "big/")
    monkeypatch.setattr(sparse_copy, "BLOCK", 4096)
    monkeypatch.setattr(sparse_copy, "SMALL", 0)
    size = (folder / "model.safetensors").stat().st_size
    server.set()
    cli("inspect", "s3:big")
    sent = server.control()["sent"]["GET"]
    rest = sum(p.stat().st_size for p in folder.iterdir()) - size
    assert sent - rest < size / 4, f"{sent} bytes were read of a file of {size}"


def test_iterations_and_watch(cli, server, bucket, local, tmp_path):
    server.put(bucket, local, "run/")
    good("hf-to-megatron", SRC, tmp_path / "later", *SIZES[:-1], "9")
    cli("megatron-to-hf", "s3:run", "s3:out/{iteration}", "--iterations", "all")
    cli("diff", "s3:hf", "s3:out/7")
    server.put(bucket, tmp_path / "later", "run/")
    watch = ("--watch", "--until", "9", "--keep", "1", "--interval", "1s")
    said = cli("megatron-to-hf", "s3:run", "s3:out/{iteration}", *watch)
    assert f"iteration 9: s3://{bucket}/out/9: " in said.out
    assert f"s3://{bucket}/out/7 was removed" in said.err
    assert {name.split("/")[1] for name in server.keys(bucket) if name.startswith("out/")} == {"9"}
    cli("diff", "s3:hf", "s3:out/9")
    cli(
        "reshard",
        "s3:run",
        "s3:many",
        "--iterations",
        "latest",
        "--target-tp",
        "1",
        "--target-pp",
        "1",
    )
    assert server.keys(bucket)[f"many/{TRACKER}"].read_text() == "9"


def test_workers_are_refused(cli, tmp_path):
    for src, dst in (("s3:hf", tmp_path / "out"), (SRC, "s3:out")):
        assert "threads" in cli("hf-to-megatron", src, dst, "--workers", "2", code=2).err


def test_python_reads_slices_and_pickles_keep_the_url(server, bucket, tmp_path):
    here, there = package.open(SRC), package.open(f"s3://{bucket}/hf")
    name = "layers.3.attn.q.weight"
    assert (there[name][5:9].numpy() == here[name][5:9].numpy()).all()
    held = pickle.dumps(there)
    sparse_copy.clean()
    again = pickle.loads(held)
    assert (again[name].numpy() == here[name].numpy()).all()
    sparse_copy.clean()


@pytest.mark.parametrize("mode", ["w:", "w:gz"])
def test_an_archive_of_nemo_is_read_in_the_store(mode, cli, server, bucket, tmp_path):
    folder, config = nemo_archive.zarr(tmp_path, "model.", "model_weights")
    (tmp_path / "nemo-1").mkdir()
    archive = nemo_archive.pack(
        folder, nemo_archive.described(config), tmp_path / "nemo-1" / "a.nemo", mode
    )
    server.put(bucket, archive.parent, "models/")
    assert "s3://" in cli("inspect", "s3:models/a.nemo").out
    said = cli("megatron-to-hf", "s3:models/a.nemo", tmp_path / "out", "--vocab-size", 14)
    assert ("is compressed" in said.err) == (mode == "w:gz")
    good("megatron-to-hf", archive, tmp_path / "here", "--vocab-size", 14)
    weights = "model.safetensors"
    assert files(tmp_path / "out")[weights] == files(tmp_path / "here")[weights]
    held = pickle.dumps(package.open(f"s3://{bucket}/models/a.nemo", vocab_size=14))
    sparse_copy.clean()
    again, here = pickle.loads(held)["embed.weight"], package.open(tmp_path / "here")
    assert (again.numpy() == here["embed.weight"].numpy()).all()
    assert "does not exist" in cli("inspect", "s3:models/b.nemo", code=3).err
    sparse_copy.clean()


# --------------------------------------------------------------------------- in the way, and locked


def test_a_checkpoint_in_the_way_is_kept_or_replaced(cli, server, bucket, fetched, tmp_path):
    cli("hf-to-megatron", "s3:hf", "s3:m", *SIZES)
    before = files(fetched("m"))
    assert "is done already" in cli("hf-to-megatron", "s3:hf", "s3:m", *SIZES).out
    other = (*SIZES, "--dtype", "fp16")
    assert "--overwrite" in cli("hf-to-megatron", "s3:hf", "s3:m", *other, code=6).err
    assert files(fetched("m")) == before
    cli("hf-to-megatron", "s3:hf", "s3:m", *other, "--overwrite", "--no-resume")
    good("hf-to-megatron", SRC, tmp_path / "here", *other)
    assert files(fetched("m")) == files(tmp_path / "here")
    (server.root / f"{bucket}%2Fm%2Fiter_0000007%2Fnotes.bin").write_bytes(b"mine")
    said = cli("hf-to-megatron", "s3:hf", "s3:m", *SIZES, "--overwrite", code=6).err
    assert "notes.bin" in said
    assert "is the source itself" in cli("reshard", "s3:m", "s3:m", "--target-tp", "1", code=6).err


def test_two_runs_that_start_at_once_do_not_mix(cli, server, bucket, monkeypatch):
    """The other run writes its intent between two looks of this one."""
    put, seen = sparse_copy.SparseCopy.put, []

    def races(place: sparse_copy.SparseCopy, name: str, data: Any) -> str:
        version = put(place, name, data)
        if name.endswith("intent.json") and not seen:
            seen.append(name)
            put(place, f"{sparse_copy.Path(name).parent}x/intent.json", data)
        return version

    monkeypatch.setattr(sparse_copy.SparseCopy, "put", races)
    said = cli("hf-to-megatron", "s3:hf", "s3:m", *SIZES, code=6).err
    assert "another mckpt is writing here" in said
    assert not any("/iter_" in name for name in server.keys(bucket))


def during_the_first_file(monkeypatch: pytest.MonkeyPatch, call: Callable[[], Any]) -> None:
    """Lets `call` happen once, when a run is about to send its first file of weights."""
    put, seen = sparse_copy.SparseCopy.put, []

    def hooked(place: sparse_copy.SparseCopy, name: str, data: Any) -> Any:
        if not seen and name.endswith(".pt"):
            seen.append(name)
            call()
        return put(place, name, data)

    monkeypatch.setattr(sparse_copy.SparseCopy, "put", hooked)


def test_the_tracker_does_not_go_back(cli, server, bucket, monkeypatch, tmp_path):
    (tmp_path / TRACKER).write_text("200")
    during_the_first_file(monkeypatch, lambda: server.put(bucket, tmp_path, "m/"))
    cli("hf-to-megatron", "s3:hf", "s3:m", *SIZES)
    assert server.keys(bucket)[f"m/{TRACKER}"].read_text() == "200"


def changed(model: Path) -> Path:
    """Makes a copy of SRC with other weights."""
    shutil.copytree(SRC, model)
    path = model / "model.safetensors"
    data = bytearray(path.read_bytes())
    start = int.from_bytes(data[:8], "little") + 8
    data[start::2] = bytes(one ^ 1 for one in data[start::2])
    path.write_bytes(data)
    return model


def test_a_journal_does_not_vouch_for_files_that_were_replaced(
    cli, server, bucket, fetched, local, monkeypatch, tmp_path
):
    small_groups(monkeypatch)
    server.set(Fault("PUT", r"mp_rank_01", "403", 99))
    cli("hf-to-megatron", SRC, "s3:m", *SIZES, code=7)
    cli("hf-to-megatron", SRC, "s3:n", *SIZES, code=7)
    server.set()
    other = changed(tmp_path / "model")
    cli("hf-to-megatron", other, "s3:m", *SIZES, "--overwrite")
    before = files(fetched("m"))
    assert "--overwrite" in cli("hf-to-megatron", SRC, "s3:m", *SIZES, code=6).err
    assert files(fetched("m")) == before
    name, path = next(one for one in server.keys(bucket).items() if one[0].endswith(".pt"))
    there = server.keys(bucket)[name.replace("m/", "n/", 1)]
    there.write_bytes(path.read_bytes())  # by another program: the journal stays
    assert "was replaced" in cli("hf-to-megatron", SRC, "s3:n", *SIZES, code=6).err
    for name in "mn":
        cli("hf-to-megatron", SRC, f"s3:{name}", *SIZES, "--overwrite")
        assert files(fetched(name)) == files(local)


def test_a_second_run_is_refused_while_the_first_one_writes(
    cli, bucket, fetched, local, monkeypatch, tmp_path
):
    small_groups(monkeypatch)
    monkeypatch.setattr(store_journal, "BEAT_S", 0.2)
    before = "from mckpt.conversion import store_journal as j; j.LIVE_S = 3.0"
    url, other = f"s3://{bucket}/m", changed(tmp_path / "model")
    line = command_line("hf-to-megatron", other, url, *SIZES, "--overwrite", before=before)
    said = []
    during_the_first_file(
        monkeypatch, lambda: said.append(subprocess.run(line, capture_output=True, text=True))
    )
    cli("hf-to-megatron", SRC, "s3:m", *SIZES)
    assert said[0].returncode == 6 and "another mckpt is writing here" in said[0].stderr
    assert files(fetched("m")) == files(local)


def test_what_is_done_is_known_by_the_content_of_the_source(
    cli, server, bucket, monkeypatch, tmp_path
):
    """Objects that are put again have another time; local files may keep size and mtime."""
    model = tmp_path / "model"
    shutil.copytree(SRC, model)
    for source, put in ((str(model), None), ("s3:hf", server)):
        line = ("hf-to-megatron", source, f"s3:m{put is not None}", *SIZES)
        cli(*line)
        shutil.copytree(model, tmp_path / "again", dirs_exist_ok=True, copy_function=shutil.copy)
        shutil.copytree(tmp_path / "again", model, dirs_exist_ok=True)
        if put:
            time.sleep(1.1)  # stores tell whole seconds
            put.put(bucket, model, "hf/")
        said = cli(*line)
        assert "comparing the content" in said.err and "is done already" in said.out
        assert "comparing" not in cli(*line).err, "the manifest is refreshed"
    path = model / "model.safetensors"
    data, before = bytearray(path.read_bytes()), path.stat().st_mtime_ns
    data[-1] ^= 1
    path.write_bytes(data)
    os.utime(path, ns=(0, before))
    cli("hf-to-megatron", str(model), "s3:mFalse", *SIZES, code=6)
    server.put(bucket, model, "hf/")
    assert "The source differs" in cli(*line, code=6).err


def test_files_of_another_source_do_not_count_as_sent(cli, server, bucket, monkeypatch, tmp_path):
    """Size and mtime of the source stay between two runs, and one that is killed at its end is
    only cleaned up.
    """
    small_groups(monkeypatch)
    model = tmp_path / "model"
    shutil.copytree(SRC, model)
    line = ("hf-to-megatron", str(model), "s3:m", *SIZES)
    server.set(Fault("PUT", r"metadata|mckpt\.json", "403", 99))
    cli(*line, code=7)
    server.set()
    path = model / "model.safetensors"
    data, before = bytearray(path.read_bytes()), path.stat().st_mtime_ns
    start = int.from_bytes(data[:8], "little") + 8
    data[start::2] = bytes(one ^ 1 for one in data[start::2])
    path.write_bytes(data)
    os.utime(path, ns=(0, before))
    with monkeypatch.context() as patch:
        patch.setattr(store_journal.StoreJournal, "remove", lambda journal: None)
        assert "continues" not in cli(*line).err
    cli("diff", str(model), "s3:m")
    server.set()
    cli(*line)
    log = server.control()["log"]
    assert not [one for one in log if one.startswith("PUT") and ".pt" in one]
    assert not [name for name in server.keys(bucket) if ".mckpt-" in name]


def test_a_run_that_was_taken_for_dead_sends_nothing_more(cli, server, bucket, monkeypatch):
    def end() -> None:
        for name, path in server.keys(bucket).items():
            if "/.mckpt-" in name:
                path.unlink()

    during_the_first_file(monkeypatch, end)
    small_groups(monkeypatch)
    assert "taken this run for dead" in cli("hf-to-megatron", SRC, "s3:m", *SIZES, code=6).err
    there = [name for name in server.keys(bucket) if name.startswith("m/")]
    assert sum(name.endswith(".pt") for name in there) <= to_store.FILES
    assert not any(name.endswith("mckpt.json") or "/.mckpt-" in name for name in there)


def test_a_conversion_that_is_refused_keeps_the_old_checkpoint(cli, fetched, tmp_path):
    cli("hf-to-megatron", SRC, "s3:m", *SIZES)
    before = files(fetched("m"))
    model = changed(tmp_path / "model")
    arrays = load_file(model / "model.safetensors")
    next(iter(arrays.values())).reshape(-1)[0] = 1e30
    save_file(arrays, model / "model.safetensors")
    cli("hf-to-megatron", model, "s3:m", *SIZES, "--dtype", "fp16", "--overwrite", code=2)
    after = files(fetched("m"))
    assert {name: after.get(name) for name in before} == before


def test_checkpoints_with_other_carried_tensors_are_refused(cli, fetched, tmp_path):
    model = test_towers.write(tmp_path / "model", "qwen3_vl")
    cli("hf-to-megatron", model, "s3:m", "--iteration", "1")
    cli("hf-to-megatron", model, "s3:m", "--iteration", "2")
    arrays = load_file(model / "model.safetensors")
    arrays["model.visual.position_ids"][2] += 1
    save_file(arrays, model / "model.safetensors")
    before = files(fetched("m"))
    said = cli("hf-to-megatron", model, "s3:m", "--iteration", "3", code=6).err
    assert "carried.safetensors: is not the source's" in said
    after = {name: data for name, data in files(fetched("m")).items() if ".mckpt-" not in name}
    assert after == before


def test_runs_leave_no_temporary_directories(tmp_path, monkeypatch, bucket):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    plan = package.plan(SRC, f"s3://{bucket}/m")
    held = len(list(tmp_path.iterdir()))
    plan.run()
    assert len(list(tmp_path.iterdir())) == held
    sparse_copy.clean()


def test_runs_of_other_checkpoints_are_let_alone(cli, server, bucket, tmp_path):
    other = tmp_path / "run" / ".mckpt-other"
    other.mkdir(parents=True)
    (other / "intent.json").write_text('{"unit": "iter_0000009", "files": []}')
    server.put(bucket, other.parent, "m/")
    server.set(Fault("GET", "mckpt-other/intent.json", "404", 99))  # it ended since the listing
    assert "interrupted" not in cli("hf-to-megatron", "s3:hf", "s3:m", *SIZES).err
    assert "m/.mckpt-other/intent.json" in server.keys(bucket)


def test_checkpoints_of_one_model_share_its_large_files(cli, tmp_path):
    shutil.copytree(SRC, tmp_path / "model")
    (tmp_path / "model" / "LICENSE").write_bytes(b"words " * 70_000)
    cli("hf-to-megatron", tmp_path / "model", "s3:m", "--iteration", "1")
    cli("hf-to-megatron", tmp_path / "model", "s3:m", "--iteration", "2")


# ------------------------------------------------------------------------------------------- faults


@pytest.mark.parametrize(
    ("fault", "tries"),
    [
        (Fault("GET", r"model.safetensors", "500", 2), 3),
        (Fault("GET", r"model.safetensors", "cut", 2), 3),
        (Fault("GET", r"model.safetensors", "drop", 2), 3),
        (Fault("GET", r"list-type", "503", 2), 3),
        (Fault("PUT", r"model_optim_rng.pt", "503", 2), 3),
        (Fault("PUT", r"partNumber=2", "500", 2), 3),
        (Fault("PUT", r"partNumber=2", "drop", 2), 3),
        (Fault("POST", r"uploads", "503", 1), 2),
        (Fault("POST", r"uploadId", "500", 1), 2),
        (Fault("PUT", r"latest_checkpointed", "503", 2), 3),
        (Fault("POST", r"delete", "503", 1), 2),
        (Fault("GET", r"model.safetensors", "slow", 2, seconds=0.3), 1),
    ],
    ids=lambda one: f"{one.method}-{one.what}-{one.pattern}" if isinstance(one, Fault) else "",
)
def test_a_fault_that_passes_is_survived(cli, server, fetched, local, monkeypatch, fault, tries):
    small_groups(monkeypatch)
    server.set(fault)
    cli("hf-to-megatron", "s3:hf", "s3:m", *SIZES)
    assert [one["times"] for one in server.control()["faults"]] == [0], "the fault did not happen"
    assert files(fetched("m")) == files(local)


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (Fault("GET", r"model.safetensors", "403", 99), ("refused access", "credentials")),
        (Fault("PUT", r"mp_rank_01", "403", 99), ("refused access", "credentials")),
        (
            Fault("PUT", r"mp_rank_01", "500", 99),
            ("answered with an error", "continues where it stopped"),
        ),
        (Fault("PUT", r"mckpt.json|metadata.json", "503", 99), ("answered with an error",)),
        (
            Fault("PUT", r"mp_rank_01", "503", 99),
            ("answered with an error", "continues where it stopped"),
        ),
        (Fault("GET", r"model.safetensors", "cut", 99), ("model.safetensors",)),
        (Fault("PUT", r"mckpt.json", "500", 99), ("mckpt.json",)),
        (Fault("PUT", r"latest_checkpointed", "500", 99), (TRACKER,)),
    ],
    ids=lambda one: f"{one.method}-{one.what}-{one.pattern}" if isinstance(one, Fault) else "",
)
def test_a_fault_that_stays_leaves_nothing_loadable_and_the_same_command_goes_on(
    cli, server, bucket, fetched, local, monkeypatch, fault, words
):
    small_groups(monkeypatch)
    monkeypatch.setitem(stores.RETRIES, "max_retries", 2)
    server.set(fault)
    said = cli("hf-to-megatron", "s3:hf", "s3:m", *SIZES, code=7).err
    assert f"s3://{bucket}/" in said and all(word in said for word in words), said
    assert said.count("mckpt: ") == 1
    assert f"m/{TRACKER}" not in server.keys(bucket)
    sent = {n for n in server.keys(bucket) if n.endswith(".pt")}
    server.set()
    if fault.method == "PUT" and fault.pattern != "latest_checkpointed":  # the last object
        for name in ("s3:m", "s3:m/iter_0000007"):
            assert "was interrupted" in cli("inspect", name, code=3).err
    cli("hf-to-megatron", "s3:hf", "s3:m", *SIZES)
    again = [
        line for line in server.control()["log"] if line.startswith("POST") and "?uploads" in line
    ]
    assert not [name for name in sent if any(name in line for line in again)], "sent twice"
    assert files(fetched("m")) == files(local)


def test_a_source_that_changes_is_not_mixed(server, bucket, tmp_path):
    plan = package.plan(f"s3://{bucket}/hf", tmp_path / "out")
    path = server.keys(bucket)["hf/model.safetensors"]
    data = path.read_bytes()
    time.sleep(0.01)
    path.write_bytes(data[:-2] + b"\1\1")
    with pytest.raises(SourceError, match="was changed while it was read"):
        plan.run()
    assert not (tmp_path / "out" / "release").exists()
    sparse_copy.clean()


def test_a_run_that_ended_between_two_side_files_goes_on(cli, server, bucket, local, fetched):
    server.set(Fault("PUT", "m/hf/tokenizer_config.json", "403", 99))
    cli("hf-to-megatron", "s3:hf", "s3:m", *SIZES, code=7)
    names = {name for name in server.keys(bucket) if name.startswith("m/hf/")}
    assert names and "m/hf/config.json" not in names  # it comes last, when all others are there
    server.set()
    cli("hf-to-megatron", "s3:hf", "s3:m", *SIZES)
    assert tree(fetched("m") / "hf") == tree(local / "hf")


def test_a_killed_run_goes_on_from_the_journal_in_the_store(
    cli, server, bucket, fetched, local, tmp_path
):
    """The process dies while the third file is sent, and the journal is all that the next one
    knows.
    """
    server.set(Fault("PUT", r"mp_rank_01_000", "slow", 1, seconds=60))
    before = (
        "from mckpt.conversion import store_journal, to_store;"
        "to_store.GROUP = to_store.FILES = store_journal.LIVE_S = 1"
    )
    line = command_line(
        "hf-to-megatron", f"s3://{bucket}/hf", f"s3://{bucket}/m", *SIZES, before=before
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)}
    process = subprocess.Popen(line, env=environment, stderr=subprocess.DEVNULL)
    end = time.monotonic() + 60
    while server.control()["faults"][0]["times"] and time.monotonic() < end:
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait()
    left = list(tmp_path.glob(f"{sparse_copy.TEMPORARY}*"))
    sent = {n.split("/")[-2] for n in server.keys(bucket) if n.endswith("model_optim_rng.pt")}
    assert left and 0 < len(sent) < 4
    said = cli("inspect", "s3:m", code=3).err
    assert f"{len(sent)} files are in place" in said and "continues where it stopped" in said
    assert (
        "already contains"
        in cli("hf-to-megatron", "s3:hf", "s3:m", *SIZES, "--dtype", "fp16", code=6).err
    )
    server.set()
    done = subprocess.run(line, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert not list(tmp_path.glob(f"{sparse_copy.TEMPORARY}*")), (
        "the killed run left its files here"
    )
    puts = [one for one in server.control()["log"] if one.startswith("PUT") and ".pt" in one]
    assert len(puts) == 4 - len(sent)
    assert "continues an interrupted run, which has written " in done.stderr
    assert files(fetched("m")) == files(local)


def test_the_marker_is_the_last_object(cli, server, bucket):
    cli("hf-to-megatron", "s3:hf", "s3:m", "--iteration", "7")
    order = [one.partition(f"/{bucket}/")[2] for one in server.control()["log"] if one[:3] == "PUT"]
    order = [one.partition("?")[0] for one in order if ".mckpt-" not in one]
    unit = "m/iter_0000007"
    assert order[-3:] == [f"{unit}/mckpt.json", f"{unit}/metadata.json", f"m/{TRACKER}"]
    server.set()
    cli("megatron-to-hf", "s3:m", "s3:h")
    order = [one.partition(f"/{bucket}/")[2] for one in server.control()["log"] if one[:3] == "PUT"]
    assert [one for one in order if ".mckpt-" not in one][-2:] == ["h/mckpt.json", "h/config.json"]


# ----------------------------------------------------------------------------- credentials and URLs


def test_a_url_with_a_secret_is_refused_and_not_shown(cli):
    for url in (
        "s3:hf?X-Amz-Signature=abc",
        "https://user:abc@host/path",
        "s3://AKIAKEY:a/abc@bucket/key",
        "s3://AKIAKEY:a/b@abc@bucket/key",
        "https://abc@host/path",
        "https://user:a?bc/abc@host/abc",
        "abfss://user:abc@host/path",
    ):
        said = cli("inspect", url, code=2).err
        assert "abc" not in said and "AKIAKEY" not in said and "credentials" in said
    for url in ("s3://bucket/a@b/c", "abfss://container@account/key"):
        assert str(addresses.url_of(url)) == url


def test_names_that_are_not_there(cli, server, bucket):
    said = cli("inspect", "s3:nothing", code=3).err
    assert f"s3://{bucket}/nothing: the store has no objects under this name" in said
    server.set(Fault("GET", r"model\.safetensors", "404", 99))
    said = cli("inspect", "s3:hf", code=3).err
    assert f"s3://{bucket}/hf/model.safetensors: is not there" in said and "<" not in said
    refused(2, "names no bucket", args=("inspect", "s3://"))
    with pytest.raises(UsageError, match="names no bucket"):
        package.open("s3://")


def test_a_missing_bucket_is_named(bucket, tmp_path):
    for code, args in (
        (3, ("inspect", "s3://no-such-one/hf")),
        (3, ("hf-to-megatron", "s3://no-such-one/hf", tmp_path / "m")),
        (3, ("reshard", "s3://no-such-one", tmp_path / "m", "--iterations", "all")),
        (6, ("hf-to-megatron", SRC, "s3://no-such-one/m")),
        (6, ("plan", SRC, "s3://no-such-one/m")),
    ):
        said = refused(code, "the bucket s3://no-such-one does not exist", args=args)
        assert "<" not in said and "http" not in said, said
    assert not list(tmp_path.iterdir())


def test_what_the_store_answers_is_shown_without_markup(cli, server):
    server.set(Fault("GET", "list-type", "403", 99))
    said = cli("inspect", "s3:hf", code=7).err
    assert (
        "refused access" in said and "403 Forbidden: Fault: Fault for" in said and "<" not in said
    )
    server.set(Fault("GET", "list-type", "400", 99))
    said = cli("inspect", "s3:hf", code=7).err
    assert "answered with an error (tries: 3)" in said and "<" not in said


def test_an_unreachable_store_is_named(cli, monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    assert "no answer" in cli("inspect", "s3:hf", code=7).err


def test_without_credentials_the_error_says_where_they_belong(cli, monkeypatch, tmp_path):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("HOME", str(tmp_path))
    # instances of a cloud ask this address for their credentials
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setitem(stores.RETRIES, "max_retries", 1)
    assert "no credentials were found" in cli("inspect", "s3:hf", code=7).err


def test_the_profiles_of_aws_are_used(cli, server, monkeypatch, tmp_path):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_REGION"):
        monkeypatch.delenv(name)
    (tmp_path / "credentials").write_text(
        f"[team]\naws_access_key_id = OFPROFILE\naws_secret_access_key = {SECRET}\n"
    )
    (tmp_path / "config").write_text("[profile team]\nregion = eu-west-1\n")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_PROFILE", "team")
    cli("inspect", "s3:hf")
    assert server.control()["users"] == ["OFPROFILE"]


def test_nothing_secret_is_stored(cli, server, bucket):
    cli("hf-to-megatron", "s3:hf", "s3:m", *SIZES)
    held = b"".join(path.read_bytes() for path in server.keys(bucket).values())
    for secret in (SECRET, "AKIAEXAMPLE", server.url, sparse_copy.TEMPORARY):
        assert secret.encode() not in held


def test_without_the_extra_one_error_says_so(monkeypatch):
    monkeypatch.setitem(sys.modules, "obstore", None)
    for args in (("hf-to-megatron", "s3://b/x", "out"), ("hf-to-megatron", SRC, "s3://b/x")):
        refused(9, "obstore", "pip install 'mckpt[stores]'", args=args)


def test_other_schemes_are_refused():
    for args in (("inspect", "gcs://b/x"), ("hf-to-megatron", SRC, "memory://b/x")):
        refused(2, "s3://, s3a://, gs://", "mount the store", args=args)


# -------------------------------------------------------------------------------------------- ranks


RANKS = """
from mckpt.conversion import store_journal as j, to_store as t
from mckpt.execute import ranks as r
t.GROUP, j.BEAT_S, j.DEAD_S, j.LIVE_S, r.LOOK_S, t.LOOK_S = 1, 0.2, 3.0, 1.0, 0.5, 0.5
"""
DIES = RANKS + "import os; t.StorePublisher._send = lambda *a: os._exit(9)"


def ranks(
    bucket: str, *before: str, options: tuple[str, ...] = ()
) -> list[subprocess.CompletedProcess[str]]:
    """Runs one conversion with a process for each text of Python, and returns how they ended."""
    started = []
    for rank, text in enumerate(before):
        line = command_line(
            *("hf-to-megatron", f"s3://{bucket}/hf", f"s3://{bucket}/m", *SIZES, *options),
            before=text,
        )
        own = {"RANK": str(rank), "WORLD_SIZE": str(len(before)), "PYTHONPATH": str(ROOT)}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        started.append(subprocess.Popen(line, env={**os.environ, **own}, **pipes))  # type: ignore[call-overload]
    out = []
    for process in started:
        said = process.communicate(timeout=100)
        out.append(subprocess.CompletedProcess(process.args, process.returncode, *said))
    return out


def test_ranks_share_a_run_through_the_store_alone(server, bucket, fetched, local):
    found = ranks(bucket, RANKS, RANKS)
    assert [one.returncode for one in found] == [0, 0], found
    assert files(fetched("m")) == files(local)
    puts = [one for one in server.control()["log"] if one.startswith("PUT") and ".pt" in one]
    assert len(puts) == 4, "a file was sent by two ranks"
    assert not [name for name in server.keys(bucket) if ".mckpt-" in name]


def test_a_slow_rank_is_not_taken_for_dead(server, bucket, fetched, local):
    server.set(Fault("PUT", r"mp_rank_01_001", "slow", 1, seconds=4.5))
    found = ranks(bucket, RANKS, RANKS)
    assert [one.returncode for one in found] == [0, 0], found
    assert "rank 0 does its share" not in found[0].stderr
    assert files(fetched("m")) == files(local)


def test_a_checkpoint_of_an_earlier_source_ends_no_rank_well(server, bucket, cli, tmp_path):
    cli("hf-to-megatron", "s3:hf", "s3:m", *SIZES)
    time.sleep(0.01)
    server.put(bucket, changed(tmp_path / "model"), "hf/")
    found = ranks(bucket, RANKS, RANKS)
    assert [one.returncode for one in found] == [6, 6], found


def test_the_share_of_a_dead_rank_is_done_by_rank_0(bucket, fetched, local):
    found = ranks(bucket, RANKS, DIES)
    assert [one.returncode for one in found] == [0, 9], found
    assert "does its share" in found[0].stderr
    assert files(fetched("m")) == files(local)


def test_an_error_of_rank_0_reaches_the_others(server, bucket):
    server.set(Fault("PUT", r"mp_rank_00_000", "403", 99))
    found = ranks(bucket, RANKS, RANKS)
    assert [one.returncode for one in found] == [7, 7], found
    assert "rank 0: " in found[1].stderr and "refused access" in found[1].stderr


def test_an_error_of_another_rank_reaches_rank_0(server, bucket, cli, fetched, local):
    server.set(Fault("PUT", r"mp_rank_01_001", "403", 1))
    found = ranks(bucket, RANKS, RANKS)
    assert [one.returncode for one in found] == [7, 7], found
    assert "rank 1: " in found[0].stderr and "refused access" in found[0].stderr
    cli("hf-to-megatron", "s3:hf", "s3:m", *SIZES)
    assert files(fetched("m")) == files(local)


def test_another_run_that_lives_ends_all_ranks_within_seconds(bucket, monkeypatch, tmp_path):
    """The other run writes the same checkpoint of another source."""
    monkeypatch.setattr(store_journal, "BEAT_S", 0.2)
    found: list[subprocess.CompletedProcess[str]] = []
    begun = []

    def start() -> None:
        begun.append(time.monotonic())
        found.extend(ranks(bucket, RANKS, RANKS, options=("--overwrite",)))
        begun.append(time.monotonic())

    during_the_first_file(monkeypatch, start)
    good("hf-to-megatron", changed(tmp_path / "model"), f"s3://{bucket}/m", *SIZES)
    assert [one.returncode for one in found] == [6, 6], found
    assert all("another mckpt is writing here" in one.stderr for one in found), found
    assert begun[1] - begun[0] < execute_ranks.START_S / 4


def test_what_is_in_the_way_of_rank_0_ends_the_others(bucket, cli):
    cli("hf-to-megatron", "s3:hf", "s3:m", "--iteration", 7)
    found = ranks(bucket, RANKS, RANKS)
    assert [one.returncode for one in found] == [6, 6], found
    assert all("already contains" in one.stderr for one in found)


def test_ranks_end_well_if_the_output_of_a_touched_source_is_there(server, bucket, cli):
    """Rank 0 still compares the content when the other rank has done so."""
    cli("hf-to-megatron", "s3:hf", "s3:m", *SIZES)
    time.sleep(1.1)
    server.put(bucket, SRC, "hf/")
    slow = (
        "import time; from mckpt.conversion import done; differing = done.differing\n"
        "done.differing = lambda *a: time.sleep(4) or differing(*a)"
    )
    found = ranks(bucket, f"{RANKS}{slow}", RANKS)
    assert [one.returncode for one in found] == [0, 0], found


def test_a_rank_that_waits_lists_the_store_now_and_then(server, bucket):
    """The listing of a large destination takes seconds."""
    server.set()
    waits = "r.START_S, r.LOOK_S, t.LOOK_S = 5.0, 3.0, 3.0"
    found = ranks(bucket, "import os; os._exit(0)", f"{RANKS}{waits}")
    assert "rank 0 has not begun" in found[1].stderr, found
    lists = [one for one in server.control()["log"] if "list-type" in one]
    assert len(lists) <= 12, lists


def test_the_images_of_a_model_card_go_to_a_store_and_come_back(cli, tmp_path):
    model = Path(shutil.copytree(SRC, tmp_path / "model"))
    (model / "README.md").write_text("![](figures/a.png)")
    (model / "figures").mkdir()
    for name in ("a.png", "b.png"):
        (model / "figures" / name).write_text(name)
    cli("hf-to-megatron", model, "s3:card")
    cli("megatron-to-hf", "s3:card", "s3:card-hf")
    cli("hf-to-megatron", "s3:card-hf", tmp_path / "back")
    assert [p.name for p in (tmp_path / "back/hf/figures").iterdir()] == ["a.png"]
    assert (tmp_path / "back/hf/figures/a.png").read_text() == "a.png"


@pytest.mark.parametrize("cloud", ["s3", "gs"])
def test_arrays_of_orbax_are_read_from_the_store(
    cloud: str, server: Server, bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """tensorstore reads them, of the server that the environment names."""
    pytest.importorskip("tensorstore")
    key = {"client_email": "", "private_key": "", "private_key_id": "", "disable_oauth": True}
    key["gcs_base_url"] = server.url
    monkeypatch.setenv("GOOGLE_SERVICE_ACCOUNT_KEY", json.dumps(key))  # of obstore
    monkeypatch.setenv("TENSORSTORE_GCS_HTTP_URL", server.url)
    monkeypatch.setenv("GOOGLE_AUTH_TOKEN_FOR_TESTING", SECRET)
    good("hf-to-megatron", SRC, tmp_path / "out", "--format", "orbax")
    runs = f"maxtext-{cloud}"
    server.put(runs, tmp_path / "out/release", "run/")
    items = f"{cloud}://{runs}/run/items"
    server.set()
    assert "format: orbax" in good("inspect", items).out
    assert "sound" in good("check", items, "--like", SRC).out
    good("megatron-to-hf", items, tmp_path / "hf", "--like", SRC)
    assert good("diff", SRC, tmp_path / "hf").out.startswith("the same to the last bit")
    log = server.control()["log"]
    json_api = "/storage/v1/b/maxtext-gs/o/run%2Fitems%2Fparams.params."
    asked = json_api if cloud == "gs" else f"/{runs}/run/items/params.params."
    assert any(f"GET {asked}" in line for line in log), log
    for name, path in server.keys(runs).items():
        if not name.endswith(("wo.kernel/0.1.0", "wo.kernel/zarr.json", "/_METADATA")):
            continue
        raw = path.read_bytes()
        path.write_bytes(raw[: len(raw) // 2])
        said = mckpt("megatron-to-hf", items, tmp_path / "cut", "--like", SRC)
        assert said.code in (2, 3) and "Traceback" not in said.err, said
        assert not (tmp_path / "cut").exists()
        path.write_bytes(raw)
