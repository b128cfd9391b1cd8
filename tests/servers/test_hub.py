"""Models on the Hugging Face Hub, on a server on loopback: names, downloads, faults, uploads."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mckpt.storage import addresses, descriptors, sparse_copy
from mckpt.storage import hub as storage_hub
from tests.helpers import nemo_archive
from tests.helpers.commands import ROOT, Said, good, mckpt, refused, run, tree
from tests.helpers.hub_server import SIGNATURE, TOKEN, Fault, Hub, serving

SRC = ROOT / "fixtures" / "tiny-qwen3"
MODEL = "org/tiny"


@pytest.fixture
def hub() -> Iterator[Hub]:
    with serving() as found:
        yield found


@pytest.fixture(scope="module")
def sharded(work: Path) -> Path:
    """An export of several safetensors files with an index, made of iteration 7."""
    good("hf-to-megatron", SRC, work / "megatron", "--iteration", 7)
    good("megatron-to-hf", work / "megatron", work / "export", "--max-shard-size", "64KiB")
    assert len(list((work / "export").glob("*.safetensors"))) > 2
    return work / "export"


@pytest.fixture
def cli(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function that runs `mckpt` in this process, against the server; it must exit with `code`.

    huggingface_hub reads its variables when it is imported, so the constants are replaced.
    """
    from huggingface_hub import constants

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(storage_hub, "WAITS", (0, 0, 0))
    url = hub.url + "/{repo_id}/resolve/{revision}/{filename}"
    for name, value in {
        "ENDPOINT": hub.url,
        "HUGGINGFACE_CO_URL_TEMPLATE": url,
        "HF_HUB_CACHE": str(tmp_path / "hf-home" / "hub"),
        "HF_TOKEN_PATH": str(tmp_path / "token"),
        "HF_HUB_OFFLINE": False,
        "HF_HUB_DISABLE_XET": True,
    }.items():
        monkeypatch.setattr(constants, name, value)

    def call(*args: Any, code: int = 0, token: str = "", **replaced: Any) -> Said:
        monkeypatch.setenv("HF_TOKEN", token)
        for name, value in replaced.items():
            monkeypatch.setattr(constants, name, value)
        said = mckpt(*args)
        assert said.code == code, said
        assert "Traceback" not in said.err and TOKEN not in said.out + said.err
        assert not hub.leaks, "the token was sent to the host of the files"
        return said

    return call


@pytest.fixture
def process(hub: Hub, tmp_path: Path) -> Any:
    """A function that runs Python in a process of its own, set up as a user does."""

    def call(*args: Any, code: int = 0, **environment: str) -> Any:
        ours = {
            "PATH": os.environ["PATH"],
            "PYTHONPATH": str(ROOT),
            "HF_ENDPOINT": hub.url,
            "HF_HOME": str(tmp_path / "hf-home"),
            "HF_HUB_DISABLE_XET": "1",
            "HOME": str(tmp_path),
        }
        done = run(
            [sys.executable, *args],
            code=code,
            env={**ours, **environment},
            cwd=tmp_path,
        )
        for secret in (TOKEN, SIGNATURE):
            assert secret not in done.stdout + done.stderr
        assert "Traceback" not in done.stderr and "it/s]" not in done.stderr
        assert not hub.leaks, "the token was sent to the host of the files"
        return done

    return call


def reads(hub: Hub) -> list[str]:
    """Returns the names of the files that were asked for."""
    return [found[1] for r in hub.asked if (found := re.match(r"HEAD .*/resolve/\w+/(.+)", r))]


# ---------------------------------------------------------------------------------------- names


@pytest.mark.parametrize(
    ("text", "repo", "revision"),
    [
        ("Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B", None),
        ("Qwen/Qwen3-0.6B@v1.0", "Qwen/Qwen3-0.6B", "v1.0"),
        ("org/name@refs/pr/3", "org/name", "refs/pr/3"),
        ("hf://org/name@iter_5", "org/name", "iter_5"),
        ("hf://gpt2", "gpt2", None),
    ],
)
def test_a_name_is_a_repository_and_a_revision(text, repo, revision, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert addresses.hub_name_of(text) == addresses.hub_name_of(Path(text)) == (repo, revision)


@pytest.mark.parametrize("text", ["gpt2", "a/b/c", "/org/name", "../name", "org/n@", ".a/b"])
def test_other_paths_are_local(text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert addresses.hub_name_of(text) is None


def test_what_exists_here_is_local(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org" / "name").mkdir(parents=True)
    assert addresses.hub_name_of("org/name") is None
    assert addresses.hub_name_of("org/nome") is None
    assert addresses.hub_name_of("hf://org/name") == ("org/name", None)
    refused(3, "org/nome: does not exist", "give hf://org/nome", args=("inspect", "org/nome"))
    assert "hf://" not in refused(3, "does not exist", args=("inspect", "gone"))


def test_without_huggingface_hub_one_error_gives_both_cures(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    refused(
        9,
        "pip install 'mckpt[hub]'",
        "`hf download org/name --revision v1 --local-dir name`",
        args=("hf-to-megatron", "org/name@v1", "out"),
    )


# ------------------------------------------------------------------------------------- downloads


def test_a_conversion_downloads_only_the_files_that_it_reads(hub, cli, sharded, tmp_path):
    folder = tmp_path / "repository"
    shutil.copytree(sharded, folder)
    for name in ("consolidated.safetensors", "pytorch_model.bin", "picture.tif", "original/a.json"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(b"not read")
    (folder / "modeling_own.py").write_text("# code\n")
    hub.add(MODEL, folder)
    cli("hf-to-megatron", MODEL, "out", "--tp", "2")
    here = {p.name for p in sharded.iterdir()}
    assert sorted(reads(hub)) == sorted({*here, "modeling_own.py"})
    good("diff", sharded, tmp_path / "out")
    assert (tmp_path / "out" / "hf" / "modeling_own.py").exists()
    hub.asked.clear()
    assert "is done already" in cli("hf-to-megatron", MODEL, "out", "--tp", "2").out
    assert not any("/cdn/" in request for request in hub.asked)
    cli("diff", MODEL, "out", HF_HUB_OFFLINE=True)


def test_every_command_takes_a_name(hub, cli, tmp_path):
    hub.add(MODEL, SRC)
    other = tmp_path / "other"
    shutil.copytree(SRC, other)
    (other / "generation_config.json").write_text('{"top_k": 7}')
    hub.add(MODEL, other, branch="iter_5")
    good("hf-to-megatron", SRC, tmp_path / "m")
    (tmp_path / "m" / "hf").rename(tmp_path / "elsewhere")
    assert "qwen3" in cli("inspect", MODEL).out.lower()
    assert "sound" in cli("check", f"hf://{MODEL}").out
    cli("plan", MODEL, "p")
    cli("verify", MODEL, "m", "--level", "bytes")
    named = f"{MODEL}@iter_5"
    cli("megatron-to-hf", "m", "h", "--like", MODEL, "--tokenizer", named)
    assert (tmp_path / "h" / "generation_config.json").read_text() == '{"top_k": 7}'
    assert "extends: qwen3" in cli("mappings", "new", MODEL).out


def test_a_description_downloads_no_weights(hub, cli, tmp_path):
    hub.add(MODEL, SRC)
    good("hf-to-megatron", SRC, tmp_path / "m")
    cli("megatron-to-hf", "m", "h", "--like", MODEL, "--tokenizer", MODEL)
    assert "config.json" in reads(hub) and "model.safetensors" not in reads(hub)


def test_inspect_and_plan_read_only_headers(hub, cli, sharded, tmp_path, monkeypatch):
    hub.add(MODEL, sharded)
    hub.commit("org/single", {p.name: p.read_bytes() for p in SRC.iterdir() if p.is_file()})
    monkeypatch.setattr(sparse_copy, "BLOCK", 1000)  # less than the headers have
    monkeypatch.setattr(sparse_copy, "SMALL", 0)
    for name, folder in ((MODEL, sharded), ("org/single", SRC)):
        there, here = (cli("inspect", p, "--json").out for p in (name, folder))
        at = next(p for p in json.loads(here) if json.loads(here)[p] == str(folder))
        assert {**json.loads(there), at: 0} == {**json.loads(here), at: 0}
        there, here = (json.loads(cli("plan", p, "p", "--json").out) for p in (name, folder))
        assert {**there, "source": 0} == {**here, "source": 0} and there["copies"] > 40
    cli("hf-to-megatron", MODEL, "p", "--dry-run")
    read = sum(nbytes for path, nbytes in hub.sent.items() if "/cdn/" in path)
    assert read < 60_000, "more than the headers were read"
    assert not list((tmp_path / "hf-home").rglob("*.safetensors"))
    cli("hf-to-megatron", MODEL, "out")
    hub.asked.clear()
    assert str(tmp_path / "hf-home") in cli("inspect", MODEL).out
    assert not any("/cdn/" in request for request in hub.asked)


@pytest.mark.parametrize("without", ["", "obstore.store"])
def test_a_streamed_model_is_not_stored_here(hub, cli, sharded, tmp_path, monkeypatch, without):
    if without:
        monkeypatch.setitem(sys.modules, without, None)
    oid = hub.add(MODEL, sharded)
    files = [path.name for path in sharded.glob("*.safetensors")]
    monkeypatch.setattr(descriptors, "LONG", 1)  # as if the tensors were large
    hub.faults += [Fault("GET /cdn"), Fault("GET /cdn", 503, 1, {"Retry-After": "0"})]
    # the address to which the Hub redirects is no longer valid
    gone = {f"{hub.url}/{MODEL}/resolve/{oid}/{file}": f"{hub.cdn}/cdn/{oid}" for file in files}
    monkeypatch.setattr(storage_hub, "_redirected", gone)
    options = ("--tp", "2", "--format", "torch")
    cli("hf-to-megatron", MODEL, "out", "--stream", *options)
    assert not any(fault.times for fault in hub.faults) and not hub.leaks
    # once for each file, and twice more for the faults
    assert sum("-of-" in request for request in hub.asked) <= len(files) + 2
    assert not list((tmp_path / "hf-home").rglob("*.safetensors"))
    good("hf-to-megatron", sharded, "here", *options)
    streamed, here = tree(tmp_path / "out"), tree(tmp_path / "here")
    manifest = "release/mckpt.json"
    assert streamed.pop(manifest) and here.pop(manifest) and streamed == here
    size = sum(p.stat().st_size for p in sharded.glob("*.safetensors"))
    read = sum(nbytes for path, nbytes in hub.sent.items() if "/cdn/" in path)
    assert read < 2.5 * size, "the weights were read more than once"
    assert "is done already" in cli("hf-to-megatron", MODEL, "out", "--stream", *options).out


@pytest.mark.parametrize("how", [(), ("--stream",)], ids=["local", "streamed"])
def test_files_in_directories_of_a_repository_are_copied(hub, cli, how):
    """The images of its card, and chat templates. No weights from there."""
    beside = {
        "README.md": b"![](figures/a.png)",
        "figures/a.png": b"image",
        "figures/b.png": b"no image of the card",
        "additional_chat_templates/tool.jinja": b"{{ messages }}",
        "original/tokenizer.model": b"of another form",
        "original/model.safetensors": b"weights",
    }
    files = {p.name: p.read_bytes() for p in SRC.iterdir() if p.is_file()}
    hub.commit(MODEL, files | beside)
    cli("hf-to-megatron", MODEL, "out", *how)
    there = tree(Path("out/hf"))
    copied = ("README.md", "figures/a.png", "additional_chat_templates/tool.jinja")
    assert {name for name in there if name in beside} == set(copied)
    assert all((Path("out/hf") / name).read_bytes() == beside[name] for name in copied)
    assert not [request for request in hub.asked if "original/" in request]


def test_an_archive_of_nemo_is_read_from_the_hub(hub, cli, tmp_path):
    folder, config = nemo_archive.zarr(tmp_path, "model.", "model_weights")
    (tmp_path / "repo").mkdir()
    archive = tmp_path / "repo" / "a.nemo"
    nemo_archive.pack(folder, nemo_archive.described(config), archive)
    hub.add(MODEL, archive.parent)
    cli("megatron-to-hf", MODEL, "out", "--vocab-size", 14)
    good("megatron-to-hf", archive, tmp_path / "here", "--vocab-size", 14)
    here = tree(tmp_path / "here")
    assert tree(tmp_path / "out").keys() == here.keys()
    weights = "model.safetensors"
    assert tree(tmp_path / "out")[weights] == here[weights]
    shutil.copyfile(archive, archive.with_name("b.nemo"))
    hub.add("org/two", archive.parent)
    said = cli("inspect", "org/two", code=3).err
    assert "org/two: has 2 archives of NeMo 1: a.nemo, b.nemo" in said and "hf download" in said
    cli("inspect", MODEL, HF_HUB_OFFLINE=True)


def test_offline_the_error_names_the_cache_and_the_variable(hub, cli):
    hub.add(MODEL, SRC)
    said = cli("inspect", MODEL, code=3, HF_HUB_OFFLINE=True).err
    assert "HF_HUB_OFFLINE" in said and "hf-home" in said and "hf download org/tiny" in said
    assert not hub.asked


# ---------------------------------------------------------------------------------------- faults


def test_a_name_that_is_nowhere_is_neither_here_nor_there(hub, cli):
    said = cli("inspect", "org/nothing", code=3).err
    assert "neither as a directory here nor as a model" in said and hub.url in said
    assert "HF_TOKEN" in said


def test_an_unknown_revision_is_named(hub, cli):
    hub.add(MODEL, SRC)
    assert f"{MODEL}: has no revision v9" in cli("inspect", f"{MODEL}@v9", code=3).err


def test_a_gated_model_says_how_to_log_in_and_a_token_opens_it(hub, cli):
    hub.add(MODEL, SRC)
    hub.gated.add(MODEL)
    said = cli("inspect", MODEL, code=7).err
    assert "is gated" in said and f"{hub.url}/{MODEL}" in said and "hf auth login" in said
    cli("inspect", MODEL, token=TOKEN)


def test_a_wrong_token_is_refused_and_not_printed(hub, cli):
    hub.add(MODEL, SRC)
    said = cli("inspect", MODEL, code=7, token="hf_another").err
    assert "refused access (HTTP 401)" in said and "hf_another" not in said


def test_a_busy_server_is_asked_again_when_it_says(hub, cli):
    hub.add(MODEL, SRC)
    again = {"Retry-After": "0"}
    hub.faults += [
        Fault("GET /api/models/org/tiny/revision", 429, 2, again),
        Fault("GET /cdn", 429, 1, again),
        Fault("GET /api/models/org/tiny/tree", 503, 1, again),
    ]
    cli("inspect", MODEL)
    assert not any(fault.times for fault in hub.faults)


def test_a_server_that_stays_busy_is_given_up(hub, cli):
    hub.add(MODEL, SRC)
    hub.faults.append(Fault("GET /api", 429, 99, {"Retry-After": "0"}))
    said = cli("inspect", MODEL, code=7).err
    assert "HTTP 429, 4 tries" in said and "give the same command" in said


def test_a_conversion_survives_a_lost_connection(hub, process, tmp_path):
    hub.add(MODEL, SRC)
    hub.faults.append(Fault("GET /cdn"))
    process("-m", "mckpt", "hf-to-megatron", MODEL, "out")
    good("diff", SRC, tmp_path / "out")


def test_an_unreachable_server_is_named(cli):
    said = cli("inspect", MODEL, code=7, ENDPOINT="http://127.0.0.1:9").err
    assert "no answer from http://127.0.0.1:9 after 4 tries" in said


def test_a_signature_is_cut_out_of_every_text():
    text = "Error: https://cdn/x?X-Amz-Signature=abc&b=1 (lost)"
    assert addresses.without_queries(text) == "Error: https://cdn/x?... (lost)"


# --------------------------------------------------------------------------------------- uploads


def test_an_export_is_pushed_read_back_and_pushed_again_for_nothing(hub, cli, sharded):
    said = cli("push", sharded, MODEL, "--private", token=TOKEN).out
    files = {p.name: p.read_bytes() for p in sharded.iterdir()}
    assert {**hub.tree(MODEL), ".gitattributes": b""} == {**files, ".gitattributes": b""}
    assert MODEL in hub.private
    assert f"{len(files)} files, {sum(map(len, files.values())):,} bytes" in said
    assert f"{hub.url}/{MODEL}/tree/main (commit {hub.branches[MODEL]['main']})" in said
    cli("diff", MODEL, sharded, token=TOKEN)
    hub.asked.clear()
    said = cli("push", sharded, MODEL, token=TOKEN).out
    assert "is already, unchanged" in said
    assert not any(r.startswith("PUT") or "/commit/" in r for r in hub.asked)


def test_files_of_the_same_size_with_another_content_are_pushed_again(hub, cli, sharded):
    weights = next(sharded.glob("*.safetensors")).name
    files = {p.name: p.read_bytes() for p in sharded.iterdir()}
    older = {name: bytes(len(files[name])) for name in ("config.json", weights)}
    hub.commit(MODEL, files | older)
    cli("push", sharded, MODEL, token=TOKEN)
    assert hub.tree(MODEL) == files
    commit = hub.commit
    for name in older:  # a server that does not take what it is sent
        hub.commit = lambda repo, tree, branch, name=name: commit(
            repo, {**tree, name: older[name]}, branch
        )
        commit(MODEL, files | older)
        said = cli("push", sharded, MODEL, token=TOKEN, code=7).err
        assert f"lacks {name}, or has another content" in said


def test_only_files_of_the_model_are_pushed(hub, cli, sharded, tmp_path):
    export = tmp_path / "export"
    shutil.copytree(sharded, export)
    names = {p.name for p in export.iterdir()} | {"README.md", "figures/a.png"}
    (tmp_path / "secret").write_text("secret")
    for name in ("README.md", "id_rsa", "train.log", ".env"):
        (export / name).write_text("text")
    (export / "figures").mkdir()
    (export / "figures/a.png").write_text("image")
    (export / "README.md").write_text("![](figures/a.png)")
    (export / "tokenizer.model").symlink_to(tmp_path / "secret")
    (export / "runs").mkdir()
    (export / "runs/model.pt").write_text("")
    said = cli("push", export, MODEL, "--dry-run")
    assert not hub.asked and f"{len(names)} files" in said.out
    assert f"would be uploaded to {MODEL}" in said.out
    assert all(f" bytes  {name}\n" in said.err for name in names)
    left = [line for line in said.err.splitlines() if "left out" in line]
    assert left == [
        f"left out: {name}" for name in ("id_rsa", "runs/model.pt", "tokenizer.model", "train.log")
    ]
    found = cli("push", export, MODEL, "--json", token=TOKEN)
    assert hub.tree(MODEL).keys() - {".gitattributes"} == names
    assert json.loads(found.out)["files"].keys() == names and not found.err
    (export / "tokenizer.json").write_bytes(b"version https://git-lfs.github.com/spec/v1")
    (export / "mckpt.json").unlink()
    refused(3, "tokenizer.json: is a pointer of git-lfs", args=("push", export, MODEL))
    (export / "tokenizer.json").unlink()
    (export / "config.json").rename(tmp_path / "config.json")
    (export / "config.json").symlink_to(tmp_path / "config.json")
    refused(3, "config.json: is a link that leaves", args=("push", export, MODEL))


def test_each_iteration_has_a_branch_and_stale_weights_are_removed(hub, cli, sharded):
    hub.commit(MODEL, {"model.safetensors": b"old", "README.md": b"card", "a/b.bin": b"kept"})
    branch = "iter_{iteration}"
    done = cli("push", sharded, MODEL, "--revision", branch, "--json", token=TOKEN)
    found = json.loads(done.out)
    assert found["revision"] == "iter_7" and found["removed"] == ["model.safetensors"]
    assert {"README.md", "a/b.bin", "config.json"} <= hub.tree(MODEL, "iter_7").keys()
    assert "model.safetensors" not in hub.tree(MODEL, "iter_7")
    assert hub.tree(MODEL)["model.safetensors"] == b"old"
    cli("diff", f"{MODEL}@iter_7", sharded)
    cli("push", sharded, MODEL, "--revision", "iter_{iteration:07d}", token=TOKEN)
    assert "iter_0000007" in hub.branches[MODEL]


def test_an_upload_in_parts_goes_on_after_an_interruption(hub, cli, tmp_path):
    hub.multipart = True
    export = tmp_path / "export"
    shutil.copytree(SRC, export)
    hub.commit(MODEL, {"README.md": b"card"})
    before = dict(hub.branches[MODEL])
    hub.faults.append(Fault("POST /api/models/org/tiny/commit", 400))
    cli("push", export, MODEL, code=7, token=TOKEN)
    assert hub.branches[MODEL] == before
    assert any(re.match(r"PUT /lfs/\w+/2", r) for r in hub.asked)
    hub.asked.clear()
    cli("push", export, MODEL, token=TOKEN)
    assert not any(r.startswith("PUT") for r in hub.asked)
    assert hub.tree(MODEL)["model.safetensors"] == (SRC / "model.safetensors").read_bytes()


def test_an_upload_survives_busy_servers_and_lost_connections(hub, process):
    again = {"Retry-After": "0"}
    hub.faults += [
        Fault("PUT /lfs", 500, 1, again),
        Fault("POST /api/repos/create", 429, 1, again),
        Fault("POST .*/commit", 503, 1, again),
        Fault("POST .*/preupload", 429, 1, again),
    ]
    process("-m", "mckpt", "push", SRC, MODEL, HF_TOKEN=TOKEN)
    assert hub.tree(MODEL)["config.json"] == (SRC / "config.json").read_bytes()
    assert not any(fault.times for fault in hub.faults)


def test_an_incomplete_export_is_not_pushed(hub, cli, sharded, tmp_path):
    export = tmp_path / "export"
    shutil.copytree(sharded, export)
    shard = next(export.glob("*-00002-of-*.safetensors"))
    os.truncate(shard, shard.stat().st_size - 1)
    refused(3, shard.name, args=("push", export, MODEL))
    shard.unlink()
    refused(3, shard.name, args=("push", export, MODEL))
    (export / "mckpt.json").unlink()
    refused(3, shard.name, args=("push", export, MODEL))
    assert not hub.asked


def test_what_cannot_be_pushed_is_refused(sharded, tmp_path):
    good("hf-to-megatron", SRC, tmp_path / "m")
    refused(2, "megatron-to-hf", args=("push", tmp_path / "m", MODEL))
    refused(2, "org/name", args=("push", SRC, "justaname"))
    refused(2, "--revision a", args=("push", SRC, f"{MODEL}@b", "--revision", "a"))
    refused(2, "iteration", args=("push", SRC, MODEL, "--revision", "iter_{iteration}"))
    refused(2, "{step}", args=("push", sharded, MODEL, "--revision", "{step}"))
    refused(3, "does not exist", args=("push", tmp_path / "gone", MODEL))


def test_a_push_without_a_token_says_how_to_log_in(cli):
    assert "HF_TOKEN" in cli("push", SRC, MODEL, code=7).err
    assert mckpt("push", "--help").code == 0
