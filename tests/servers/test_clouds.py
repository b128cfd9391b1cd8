"""`gs://` and `az://`: the protocols of Google's and Azure's stores, on servers on loopback.
tests/servers/test_stores.py has all the rest.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest

from mckpt.storage import addresses, sparse_copy, stores
from tests.helpers.commands import good, refused
from tests.helpers.s3_server import Fault, Server
from tests.servers.test_stores import SIZES, SRC, files, small_groups

SECRET = "bm90LXRvLWJlLXByaW50ZWQ="


@pytest.fixture(params=["gs", "az"])
def cloud(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Server, str]]:
    """A server, and the URL of a bucket that has the model of SRC as hf/."""
    module = {"gs": "s3_server", "az": "azure_server"}[request.param]
    server = Server(tmp_path / "objects", f"tests.helpers.{module}")
    key = {"client_email": "", "private_key": "", "private_key_id": "", "disable_oauth": True}
    variables = {
        # the XML interface of Google's store, which obstore uses, has the requests of S3
        "gs": {"GOOGLE_SERVICE_ACCOUNT_KEY": json.dumps({**key, "gcs_base_url": server.url})},
        "az": {
            "AZURE_STORAGE_ENDPOINT": server.url,
            "AZURE_STORAGE_ACCOUNT_NAME": "account",
            "AZURE_STORAGE_ACCOUNT_KEY": SECRET,
        },
    }
    for name, value in variables[request.param].items():
        monkeypatch.setenv(name, value)
    small_groups(monkeypatch)
    soon = {"init_backoff": timedelta(milliseconds=1), "max_backoff": timedelta(milliseconds=2)}
    monkeypatch.setitem(stores.RETRIES, "backoff", {**soon, "base": 2})
    server.put("bucket", SRC, "hf/")
    yield server, f"{request.param}://bucket"
    server.stop()


def test_a_conversion_writes_the_same_bytes(cloud: tuple[Server, str], tmp_path: Path) -> None:
    server, url = cloud
    good("hf-to-megatron", SRC, tmp_path / "here", *SIZES)
    said = good("hf-to-megatron", f"{url}/hf", f"{url}/both", *SIZES)
    assert SECRET not in said.out + said.err
    assert "is done already" in good("hf-to-megatron", f"{url}/hf", f"{url}/both", *SIZES).out
    here = files(tmp_path / "here")
    assert files(server.fetch("bucket", "both/", tmp_path / "both")) == here
    assert any("partNumber" in one or "comp=block" in one for one in server.control()["log"])
    good("reshard", f"{url}/both", tmp_path / "down", "--target-tp", 1)
    good("diff", SRC, tmp_path / "down")
    good("check", f"{url}/both")
    assert not any("/.mckpt-" in key for key in server.keys("bucket")), "the journal is removed"


def test_an_old_checkpoint_is_replaced(cloud: tuple[Server, str], tmp_path: Path) -> None:
    server, url = cloud
    good("hf-to-megatron", SRC, f"{url}/out", *SIZES)
    other = ("hf-to-megatron", SRC, f"{url}/out", "--format", "torch", "--iteration", 7)
    refused(6, "already contains", args=other)
    good(*other, "--overwrite")
    ranks = {key.split("/")[2] for key in server.keys("bucket") if "mp_rank" in key}
    assert ranks == {"mp_rank_00"}


def test_faults_are_survived_or_end_the_run(cloud: tuple[Server, str], tmp_path: Path) -> None:
    server, url = cloud
    server.set(Fault("GET", "safetensors", "503", 2), Fault("PUT", "mp_rank", "500", 2))
    good("hf-to-megatron", f"{url}/hf", f"{url}/out", *SIZES)
    server.set(Fault("GET", "safetensors", "403", 99))
    args = ("hf-to-megatron", f"{url}/hf", tmp_path / "none")
    error = refused(7, "refused access", args=args)
    assert SECRET not in error and sparse_copy.TEMPORARY not in error
    assert not (tmp_path / "none" / "release").exists()
    server.set()
    weights = server.keys("bucket")["hf/model.safetensors"]
    begun = stores.open_store(addresses.Url(url[:2], "bucket/hf"))
    version = begun.list()["model.safetensors"].version
    weights.write_bytes(weights.read_bytes() + b" ")
    with pytest.raises(stores.SourceError, match="was changed while it was read"):
        begun.read("model.safetensors", 0, 8, version)
