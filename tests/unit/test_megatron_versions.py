"""`--megatron-version` decides which keys are written and which models are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import mckpt
from mckpt.errors import MappingError
from mckpt.geometry.parallel import Parallel
from tests.helpers.commands import PT, Pt, as_trained
from tests.helpers.tiny import TinyModel

# the prefix up to megatron-core 0.16, and the one from 0.17 on
OLD, NEW = "mtp.layers.0.transformer_layer.", "mtp.layers.0.mtp_model_layer."


def mtp_prefixes(path: Path) -> set[str]:
    """Returns the prefixes OLD and NEW that occur in the keys of any rank of a `torch`
    checkpoint.
    """
    files = (path / "release").glob(f"mp_rank_*/{PT}")
    return {
        prefix
        for file in files
        for key in Pt(file).value["model"]
        for prefix in (OLD, NEW)
        if key.startswith(prefix)
    }


@pytest.mark.parametrize(
    ("version", "prefix", "recorded"),
    [
        (None, NEW, "0.19"),
        ("0.19.2", NEW, "0.19"),
        ("0.17", NEW, "0.17"),
        ("0.16.1", OLD, "0.16"),
        ("0.12", OLD, "0.12"),
    ],
)
def test_mtp_layers_are_named_for_the_megatron_version_that_will_load_them(
    tiny_model: TinyModel, version: str | None, prefix: str, recorded: str, tmp_path: Path
) -> None:
    source = tiny_model("deepseek-v3")
    wanted: dict[str, Any] = {
        "parallel": Parallel(tp=2, pp=2),
        "transformer_impl": "local",
        "megatron_version": version,
    }
    manifest = mckpt.plan(source, tmp_path / "torch", format="torch", **wanted).run()
    assert mtp_prefixes(tmp_path / "torch") == {prefix}
    assert manifest["megatron_version"] == recorded
    assert not mckpt.diff(source, tmp_path / "torch")  # the reader accepts either name
    mckpt.plan(source, tmp_path / "dist", format="torch_dist", **wanted).run()
    keys = mckpt.open(tmp_path / "dist").opened.metadata.tensors
    assert any(key.startswith(OLD) for key in keys)  # torch_dist has the old name in every version
    assert not any(key.startswith(NEW) for key in keys)


def test_reshard_names_mtp_layers_for_the_newest_megatron_version_unless_told(
    tiny_model: TinyModel,
    tmp_path: Path,
) -> None:
    source = tiny_model("deepseek-v3")
    mckpt.plan(
        source, tmp_path / "old", format="torch", transformer_impl="local", megatron_version="0.16"
    ).run()
    mckpt.plan(tmp_path / "old", tmp_path / "new", format="torch").run()
    mckpt.plan(tmp_path / "new", tmp_path / "back", format="torch", megatron_version="0.16").run()
    assert [mtp_prefixes(tmp_path / d) for d in ("old", "new", "back")] == [{OLD}, {NEW}, {OLD}]
    for a, b in (("old", "new"), ("new", "back")):
        assert not mckpt.diff(tmp_path / a, tmp_path / b)


def test_a_model_without_mtp_has_the_same_bytes_for_every_megatron_version(
    tiny_model: TinyModel, tmp_path: Path
) -> None:
    for form in ("torch", "torch_dist"):
        plans = [
            mckpt.plan(
                tiny_model("qwen3-moe"),
                tmp_path / f"{form}-{version}",
                format=form,
                megatron_version=version,
            )
            for version in ("0.16", "0.19")
        ]
        files = [planned.run()["files"] for planned in plans]
        assert files[0] == files[1]  # bytes and checksums
        assert plans[0].digest != plans[1].digest


def test_a_model_that_a_megatron_version_cannot_load_is_refused_for_that_version(
    tiny_model: TinyModel,
    tmp_path: Path,
) -> None:
    """Latent attention without a latent of the queries, with Transformer Engine, is exact up to
    megatron-core 0.18. From 0.19 on it cannot be loaded.
    """
    source = tiny_model("deepseek-v3-plain")
    said = r"q_lora_rank is None \(written for megatron-core 0\.19\): .*--megatron-version 0\.18"
    for wanted in ({}, {"megatron_version": "0.19.2"}, {"allow_inexact": ["q_lora_rank"]}):
        with pytest.raises(MappingError, match=said) as caught:
            mckpt.plan(source, tmp_path / "new", **wanted)
        assert "--allow-inexact" not in str(caught.value)
    mckpt.plan(source, tmp_path / "old", format="torch", megatron_version="0.18").run()
    # every version can build the local layers
    mckpt.plan(source, tmp_path / "local", transformer_impl="local")
    with pytest.raises(MappingError, match=said):
        mckpt.plan(tmp_path / "old", tmp_path / "resharded", format="torch_dist")
    mckpt.plan(
        tmp_path / "old", tmp_path / "resharded", format="torch_dist", megatron_version="0.18"
    ).run()
    assert not mckpt.diff(source, tmp_path / "resharded")


def test_a_trained_checkpoint_is_exact_for_any_megatron_version(
    tiny_model: TinyModel,
    tmp_path: Path,
) -> None:
    source = tiny_model("deepseek-v3-plain")
    run = as_trained(source, tmp_path / "run", megatron_version="0.18")
    manifest = mckpt.plan(run, tmp_path / "back", format="hf").run()
    assert manifest["inexact"] == {}
