"""Damaged, hostile and mistaken Megatron checkpoints: `torch` and `torch_dist`.

Each gives one error that names the place, a stable exit code, and writes nothing.
"""

from __future__ import annotations

import os
import resource
import shutil
from pathlib import Path
from typing import Any

import pytest

import mckpt as package
from mckpt.containers import safe_pickle
from mckpt.containers.dcp_metadata import read_metadata
from mckpt.formats.megatron import chunked, torch_dist_writing
from mckpt.formats.megatron.interface import has_tensors
from tests.helpers.commands import (
    PT,
    TRACKER,
    Pt,
    edit_json,
    emit,
    good,
    hostile_pickle,
    mckpt,
    refuse_copy,
    refused,
    restate,
    save_hostile,
    save_pt,
)

FC2 = "decoder.layers.0.mlp.linear_fc2.weight"
DIST_FC2 = "decoder.layers.mlp.linear_fc2.weight"


# ---- torch


def ranks(change: Any, only: str = "*") -> Any:
    def damage(src: Path) -> None:
        for path in sorted((src / "release").glob(f"mp_rank_{only}/{PT}")):
            pt = Pt(path)
            change(pt)
            pt.save()

    return damage


def args_of(**fields: Any) -> Any:
    return ranks(lambda pt: pt.value["args"].state.update(fields))


def alone(damage: Any) -> Any:
    """Applies the damage, and removes the files that repeat the content of the args."""
    return lambda src: (
        damage(src),
        shutil.rmtree(src / "hf"),
        (src / "release" / "mckpt.json").unlink(),
    )


def file_of(rank: str, change: Any) -> Any:
    def damage(src: Path) -> None:
        path = src / "release" / f"mp_rank_{rank}" / PT
        path.write_bytes(change(path.read_bytes()))

    return damage


RANK = "mp_rank_01_000"
TORCH = {
    "rank missing": (
        lambda src: shutil.rmtree(src / "release/mp_rank_01_001"),
        3,
        ("mp_rank_01_001 is missing",),
    ),
    "first rank missing": (
        lambda src: shutil.rmtree(src / "release/mp_rank_00_000"),
        3,
        ("mp_rank_00_000 is missing",),
    ),
    "rank extra": (
        lambda src: shutil.copytree(src / "release" / RANK, src / "release/mp_rank_02_000"),
        3,
        ("mp_rank_02_000",),
    ),
    "file missing": (lambda src: (src / "release" / RANK / PT).unlink(), 3, (RANK, PT)),
    "file truncated": (file_of("01_000", lambda b: b[:5000]), 3, (RANK, PT, "cut short")),
    "file empty": (file_of("01_000", lambda b: b""), 3, (RANK, PT)),
    "key missing": (
        ranks(lambda pt: pt.value["model"].pop(FC2), "01_000"),
        3,
        (RANK, FC2, "missing", "[48, 32]"),
    ),
    "key extra": (
        ranks(lambda pt: pt.value["model"].update(foo=pt.value["model"][FC2]), "01_000"),
        5,
        (RANK, "foo", "gpt.yaml"),
    ),
    "wrong shape": (
        ranks(
            lambda pt: pt.value["model"].update({FC2: pt.put("bfloat16", (48, 31), bytes(2976))}),
            "01_000",
        ),
        3,
        (RANK, FC2, "[48, 31]", "[48, 32]"),
    ),
    "wrong dtype": (
        ranks(
            lambda pt: pt.value["model"].update({FC2: pt.put("float32", (48, 32), bytes(6144))}),
            "01_000",
        ),
        2,
        (RANK, "float32", "bfloat16", "--dtype"),
    ),
    "no tensor": (
        ranks(lambda pt: pt.value["model"].update({FC2: "weights"}), "01_000"),
        3,
        (RANK, FC2, "not a tensor"),
    ),
    "no model": (ranks(lambda pt: pt.value.pop("model"), "01_000"), 3, (RANK, "no `model`")),
    "no dict": (ranks(lambda pt: setattr(pt, "value", [1]), "01_000"), 3, (RANK, "a list")),
    "no args": (alone(ranks(lambda pt: pt.value.pop("args"))), 2, ("no args", "--like")),
    "args of a dict": (ranks(lambda pt: pt.value.update(args={"a": 1})), 3, (PT, "args", "dict")),
    "args with another tp": (
        args_of(tensor_model_parallel_size=4),
        3,
        ("tp 4", "mp_rank_02_000 is missing"),
    ),
    "args with tp of a word": (args_of(tensor_model_parallel_size="two"), 3, (PT, "'two'")),
    "args with pp that does not divide": (
        args_of(pipeline_model_parallel_size=3),
        3,
        ("pp 3", "4 layers"),
    ),
    "args with another ffn size": (
        alone(args_of(ffn_hidden_size=80)),
        3,
        ("linear_fc1", "[64, 48]", "[80, 48]"),
    ),
    "args with layers that do not divide": (alone(args_of(num_layers=5)), 3, ("5 layers", "pp 2")),
    "args with a million layers": (alone(args_of(num_layers=10**6)), 4, ("num_layers is 1000000",)),
    "args with layers of a word": (alone(args_of(num_layers="four")), 4, ("'four'",)),
    "args against DST/hf": (args_of(ffn_hidden_size=80), 4, ("ffn_size", "80", "64")),
    "args without vocab_size": (alone(args_of(vocab_size=None)), 2, ("256", "--vocab-size")),
    "tracker garbage": (lambda src: (src / TRACKER).write_text("latest"), 3, (TRACKER, "'latest'")),
    "tracker empty": (lambda src: (src / TRACKER).write_text(""), 3, (TRACKER, "''")),
    "tracker names nothing": (
        lambda src: (src / TRACKER).write_text("77"),
        3,
        ("iter_0000077", TRACKER, "it has release"),
    ),
    "tracker unreadable": (
        lambda src: ((src / TRACKER).unlink(), (src / TRACKER).mkdir()),
        7,
        (TRACKER, "cannot be read"),
    ),
}


def test_like_replaces_args_that_are_missing(made, tmp_path):
    shutil.copytree(made["torch"], tmp_path / "src")
    alone(ranks(lambda pt: pt.value.pop("args")))(tmp_path / "src")
    good("megatron-to-hf", tmp_path / "src", tmp_path / "dst", "--like", made["one"])
    assert mckpt("diff", made["one"], tmp_path / "dst").code == 0


def test_an_impossible_vocab_size_or_iteration_is_refused(made, tmp_path):
    src, dst = made["torch"], tmp_path / "d"
    refused(
        3,
        "256",
        "1500",
        args=("megatron-to-hf", src, dst, "--vocab-size", 1500),
        untouched=tmp_path,
    )
    refused(
        2, "--vocab-size", args=("megatron-to-hf", src, dst, "--vocab-size", 0), untouched=tmp_path
    )
    refused(
        3,
        "iter_0000007",
        "release",
        args=("megatron-to-hf", src, dst, "--iteration", 7),
        untouched=tmp_path,
    )
    refused(
        2,
        "--iteration 7",
        args=("megatron-to-hf", src / "release" / "mp_rank_00_000", dst, "--iteration", 7),
        untouched=tmp_path,
    )


def test_check_replicas_finds_a_replica_that_differs(made, tmp_path):
    src = tmp_path / "src"
    shutil.copytree(made["torch"], src)
    key = "decoder.layers.0.self_attention.q_layernorm.weight"
    ranks(
        lambda pt: pt.value["model"].update({key: pt.put("bfloat16", (24,), bytes(48))}), "01_000"
    )(src)
    args = ("megatron-to-hf", src, tmp_path / "dst")
    refused_words = ("layers.0.attn.q_norm.weight", "mp_rank_01_000", "differ")
    said = mckpt(*args, "--check-replicas")
    assert said.code == 3 and all(w in said.err for w in refused_words), said.err
    assert not (tmp_path / "dst").exists()
    good(*args)  # without --check-replicas, the copy of the first rank is read
    assert mckpt("diff", made["one"], tmp_path / "dst").code == 0


def test_unknown_tensors_are_left_behind_only_with_no_optimizer(made, tmp_path):
    src = tmp_path / "src"
    shutil.copytree(made["torch"], src)

    def more(pt: Pt) -> None:
        pt.value["rng_state"] = [{"random": 1}]
        # a key with tensors that mckpt does not know
        pt.value["ema"] = {"weight": pt.put("float32", (2,), bytes(8))}
        pt.value["note"] = "kept"

    ranks(more)(src)
    refused(
        2,
        "ema",
        "--no-optimizer",
        args=("reshard", src, tmp_path / "d"),
        untouched=tmp_path,
    )
    plan = good("plan", src, tmp_path / "d", "--to", "hf", "--json").json
    assert {"rng_state", "ema"} <= set(plan["left_behind"])
    good("reshard", src, tmp_path / "d", "--no-optimizer", "--target-tp", 1)
    value = Pt(tmp_path / "d/release/mp_rank_00_000" / PT).value
    assert value["note"] == "kept" and not {"rng_state", "ema"} & set(value)
    assert value["args"].state["no_save_optim"] is True


def test_random_states_alone_do_not_ask_for_no_optimizer(made, tmp_path):
    src = tmp_path / "src"
    shutil.copytree(made["torch"], src)
    ranks(lambda pt: pt.value.update(rng_state=[{"random": 1}]))(src)
    good("reshard", src, tmp_path / "d", "--target-tp", 1)


def test_an_incomplete_optimizer_is_an_error_that_names_the_file(made, tmp_path):
    src = tmp_path / "src"
    shutil.copytree(made["torch"], src)

    def more(pt: Pt) -> None:
        states = {0: {"exp_avg": pt.put("float32", (2,), bytes(8))}}
        pt.value["optimizer"] = {"state": states}

    ranks(more)(src)
    args = ("reshard", src, tmp_path / "d", "--target-format", "torch_dist")
    refused(3, "model_optim_rng.pt", "optimizer", "--no-optimizer", args=args, untouched=tmp_path)
    good(*args, "--no-optimizer")


def test_an_optimizer_without_its_groups_is_left_behind_only_with_no_optimizer(made, tmp_path):
    src = tmp_path / "src"
    shutil.copytree(made["dist"], src)

    def more(tensors: dict[str, Any], items: dict[Any, Any]) -> None:
        tensors[f"optimizer.state.exp_avg.{DIST_FC2}"] = tensors[DIST_FC2]
        for offsets, _ in tensors[DIST_FC2][2]:
            items[f"optimizer.state.exp_avg.{DIST_FC2}", offsets] = items[DIST_FC2, offsets]

    metadata(more)(src)
    refused(
        3, "optimizer", "--no-optimizer", args=("reshard", src, tmp_path / "d"), untouched=tmp_path
    )
    good("reshard", src, tmp_path / "d", "--no-optimizer")
    assert not any(
        "optimizer" in k for k in read_metadata(tmp_path / "d/release/.metadata").tensors
    )


# ---- torch_dist


def metadata(change: Any) -> Any:
    """Returns a function that damages a checkpoint: it calls change(tensors, items) on the content
    of .metadata.
    """

    def damage(src: Path) -> None:
        path = src / "release" / ".metadata"
        found = read_metadata(path)
        tensors = {
            k: (dtype, size, list(chunks)) for k, (dtype, size, chunks) in found.tensors.items()
        }
        items = dict(found.items)
        change(tensors, items)
        path.write_bytes(
            emit(
                {**tensors, **dict.fromkeys(found.objects)},
                [(k, o, *item) for (k, o), item in items.items()],
            )
        )
        restate(path)

    return damage


def hole(tensors: dict[str, Any], items: dict[Any, Any]) -> None:
    offsets, _ = tensors[DIST_FC2][2].pop()
    items.pop((DIST_FC2, offsets))


def key_gone(tensors: dict[str, Any], items: dict[Any, Any]) -> None:
    for offsets, _ in tensors.pop(DIST_FC2)[2]:
        items.pop((DIST_FC2, offsets))


def key_extra(tensors: dict[str, Any], items: dict[Any, Any]) -> None:
    tensors["foo.weight"] = tensors[DIST_FC2]
    for offsets, _ in tensors[DIST_FC2][2]:
        items["foo.weight", offsets] = items[DIST_FC2, offsets]


def elsewhere(name: str) -> Any:
    return lambda tensors, items: items.update({k: (name, *item[1:]) for k, item in items.items()})


def item(change: Any) -> Any:
    def edit(tensors: dict[str, Any], items: dict[Any, Any]) -> None:
        items[DIST_FC2, (0, 0, 0)] = change(items)

    return edit


WORDS = "embedding.word_embeddings.weight"


def test_a_checkpoint_with_more_files_than_may_be_open_is_read(made, tmp_path, monkeypatch):
    monkeypatch.setattr(torch_dist_writing, "FILE_BYTES", 1000)
    good("hf-to-megatron", made["one"], tmp_path / "dst")
    assert len(list(tmp_path.glob("dst/release/*.distcp"))) > 35
    checkpoint = package.open(tmp_path / "dst")
    assert checkpoint.names.choices
    was, before = resource.getrlimit(resource.RLIMIT_NOFILE), len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(chunked, "MAX_OPEN", 8)
    resource.setrlimit(resource.RLIMIT_NOFILE, (before + 15, was[1]))
    try:
        assert checkpoint.layout.files
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, was)
    assert len(os.listdir("/proc/self/fd")) == before
    assert mckpt("diff", made["one"], tmp_path / "dst").code == 0


DIST = {
    "no metadata.json": (
        lambda src: (src / "release/metadata.json").unlink(),
        3,
        ("metadata.json",),
    ),
    "metadata.json garbage": (
        lambda src: (src / "release/metadata.json").write_text("{"),
        3,
        ("metadata.json",),
    ),
    "another backend": (
        lambda src: (src / "release/metadata.json").write_text('{"sharded_backend": "x"}'),
        3,
        ("'x'", "torch_dist"),
    ),
    "no .metadata": (lambda src: (src / "release/.metadata").unlink(), 3, (".metadata",)),
    ".metadata cut": (
        lambda src: (src / "release/.metadata").write_bytes(
            (src / "release/.metadata").read_bytes()[:500]
        ),
        8,
        (".metadata",),
    ),
    "no .distcp": (
        lambda src: (src / "release/__0_0.distcp").unlink(),
        3,
        ("__0_0.distcp", "not there"),
    ),
    ".distcp without its last bytes": (
        lambda src: os.truncate(
            src / "release/__0_0.distcp", os.path.getsize(src / "release/__0_0.distcp") - 1
        ),
        3,
        ("__0_0.distcp", "truncated", "its last item ("),
    ),
    ".distcp cut": (
        lambda src: (src / "release/__0_0.distcp").write_bytes(
            (src / "release/__0_0.distcp").read_bytes()[:-60_000]
        ),
        3,
        ("__0_0.distcp", "truncated"),
    ),
    "chunk grid with a hole": (metadata(hole), 3, (DIST_FC2, "9216", "12288")),
    "chunk without an item": (
        metadata(lambda t, i: i.pop((DIST_FC2, (0, 0, 0)))),
        3,
        (DIST_FC2, "[0, 0, 0]"),
    ),
    "path ../x": (metadata(elsewhere("../x.distcp")), 3, ("'../x.distcp'",)),
    "absolute path": (metadata(elsewhere("/etc/passwd")), 3, ("'/etc/passwd'",)),
    "key missing": (metadata(key_gone), 3, (DIST_FC2, "missing")),
    "key extra": (metadata(key_extra), 5, ("foo.weight", "[4, 48, 64]", "gpt.yaml")),
    "item past the end": (
        metadata(item(lambda i: ("__0_0.distcp", 10**9, 100))),
        3,
        (DIST_FC2, "1,000,000,100"),
    ),
    "item of another tensor": (
        metadata(item(lambda i: i[WORDS, (0, 0)])),
        3,
        (DIST_FC2, "[256, 48]"),
    ),
    "common.pt cut": (
        lambda src: (src / "release/common.pt").write_bytes(b"PK\3\4"),
        3,
        ("common.pt",),
    ),
    "common.pt with a word as content_metadata": (
        lambda src: save_pt(src / "release/common.pt", {"content_metadata": "word"}, {}),
        3,
        ("common.pt", "content_metadata is a str"),
    ),
    "common.pt of a list": (
        lambda src: save_pt(src / "release/common.pt", [1], {}),
        3,
        ("common.pt", "a list"),
    ),
}


# ---- both formats

DAMAGES = {"torch": TORCH, "dist": DIST}


@pytest.mark.parametrize(("kind", "case"), [(k, case) for k in DAMAGES for case in DAMAGES[k]])
def test_a_damaged_checkpoint_is_refused(made, tmp_path, kind, case):
    damage, code, words = DAMAGES[kind][case]
    refuse_copy(made, tmp_path, kind, damage, code, words)


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("torch", f"mp_rank_00_000/{PT}"),
        ("torch", f"mp_rank_01_001/{PT}"),
        ("dist", ".metadata"),
        ("dist", "common.pt"),
    ],
)
def test_a_hostile_pickle_is_refused_and_not_run(made, tmp_path, kind, name):
    mark = tmp_path / "mark"

    def damage(src: Path) -> None:
        path = src / "release" / name
        if name == ".metadata":
            path.write_bytes(hostile_pickle(mark))
        else:
            save_hostile(path, mark)

    refuse_copy(made, tmp_path, kind, damage, 8, (name, "refused"))
    assert not mark.exists()


def test_metadata_that_only_calls_a_function_names_its_file(made, tmp_path):
    """The reader records the call without making it, and the record has no fields."""

    def damage(src: Path) -> None:
        (src / "release/.metadata").write_bytes(b"\x80\x02cposix\nsystem\nX\x04\0\0\0true\x85R.")

    words = ("release/.metadata: contains", "Nothing in the file was run", "get the file again")
    refuse_copy(made, tmp_path, "dist", damage, 8, words)


@pytest.mark.parametrize("inner", [None, safe_pickle.tensor("float32", (2,), "0")])
def test_a_value_that_is_nested_too_deeply_to_be_written_can_be_left_out(inner):
    """An export to Hugging Face needs no value of the common state but the args."""
    value = inner
    for _ in range(3000):
        value = [value]
    assert has_tensors(value) == (inner is not None)


def test_the_plan_reports_a_lost_common_state(made, tmp_path):
    lone = tmp_path / "lone"
    shutil.copytree(made["dist"], lone)
    shutil.rmtree(lone / "hf")
    (lone / "release/common.pt").unlink()
    refused(3, "common.pt: is missing; mckpt.json names it", args=("plan", lone, tmp_path / "out"))
    edit_json(lone / "release/mckpt.json", lambda m: m["files"].pop("common.pt"))
    said = good("plan", lone, tmp_path / "out").out
    assert "the checkpoint has no args: the dims are taken from mckpt.json" in said
    assert "the only one that fits the dims" in said
    assert "torch_dist" in said and "(gpt, tp 1, pp 1)" in said and "(qwen3)" in said
