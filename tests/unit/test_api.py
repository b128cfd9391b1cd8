"""The Python API: open, plan, convert and diff."""

from __future__ import annotations

import ast
import builtins
import collections.abc
import inspect
import pathlib
import pickle
import re
import sys
import threading
import typing
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import ml_dtypes
import numpy as np
import pytest

import mckpt as package
from mckpt import live
from mckpt.checkpoint.comparison import Changed
from mckpt.conversion.moving import RunSettings
from mckpt.errors import UsageError
from mckpt.keywords import Options, RunKeywords, VerifyKeywords
from mckpt.options import (
    AdapterOptions,
    CompareOptions,
    LoadOptions,
    PlaceOptions,
    PushOptions,
    RunOptions,
    SaveOptions,
    SizeOptions,
    SourceOptions,
    SyncOptions,
    TargetOptions,
    VerifyOptions,
    in_keywords,
    options_of,
)
from tests.helpers import tiny
from tests.helpers.commands import good, hf, tree
from tests.helpers.tiny import unpack


def test_open_reads_tensors_and_slices_of_every_format(src, torch_dir, dist_dir):
    arrays = tiny.tensors(tiny.config("qwen3"))
    q = arrays["model.layers.3.self_attn.q_proj.weight"]
    for path in (src, torch_dir, dist_dir):
        ckpt = package.open(path)
        tensor = ckpt["layers.3.attn.q.weight"]
        assert (tensor.shape, tensor.dtype, tensor.nbytes, len(tensor)) == (
            (384, 48),
            "bfloat16",
            384 * 48 * 2,
            384,
        )
        assert tensor.numpy().dtype == ml_dtypes.bfloat16 and np.array_equal(
            tensor.numpy().view("u2"), q.view("u2")
        )
        for index in (
            np.s_[:8],
            np.s_[-3:],
            np.s_[5],
            np.s_[-1],
            np.s_[7:7],
            np.s_[3:9, 40:],
            np.s_[2, 3],
            np.s_[..., :4],
            np.s_[..., 3],
            np.s_[2, ...],
            np.s_[...],
            np.s_[np.int64(4)],
            np.s_[100:1000],
        ):
            assert tensor[index].shape == q[index].shape, index
            assert np.array_equal(tensor[index].numpy().astype("f4"), q[index].astype("f4")), index
        assert np.array_equal(tensor[4:8][1:3].numpy().astype("f4"), q[5:7].astype("f4"))
        for index in (384, -385, np.s_[::2], np.s_[0, 0, 0]):
            with pytest.raises(IndexError, match=r"layers\.3\.attn\.q\.weight"):
                tensor[index]
        assert len(ckpt) == 47 and "nope" not in ckpt and "layers.3.attn.q.weight" in ckpt
        for name in (
            "nope",
            "layers.4.attn.q.weight",
            "layers.{layer}.attn.q.weight",
            "model.norm.weight",
        ):
            with pytest.raises(KeyError, match=re.escape(name)):
                ckpt[name]
        assert (ckpt.format, ckpt.dims["num_layers"]) == (ckpt.opened.format.name, 4)


def test_an_opened_checkpoint_can_be_pickled_and_read_by_threads(torch_dir):
    ckpt = package.open(torch_dir)
    again = pickle.loads(pickle.dumps(ckpt))
    piece = pickle.loads(pickle.dumps(ckpt["embed.weight"][3:5]))
    assert np.array_equal(piece.numpy().view("u2"), again["embed.weight"][3:5].numpy().view("u2"))
    fresh = package.open(torch_dir)
    with ThreadPoolExecutor(8) as pool:
        read = dict(
            zip(ckpt, pool.map(lambda name: fresh[name].numpy().tobytes(), ckpt), strict=True)
        )
    assert read == {name: tensor.numpy().tobytes() for name, tensor in again.items()}


def test_open_reads_no_tensor_until_it_is_used(tmp_path):
    src = hf(tmp_path / "src")
    ckpt = package.open(src)
    tensor = ckpt["embed.weight"][:2]
    (src / "model.safetensors").unlink()
    with pytest.raises(package.errors.StorageError, match=r"model\.safetensors"):
        tensor.numpy()


def test_numpy_dtypes_need_no_torch_for_dlpack(tmp_path, monkeypatch):
    tensor = package.open(hf(tmp_path / "src", dtype="float32"))["embed.weight"]
    monkeypatch.setitem(sys.modules, "torch", None)
    assert np.array_equal(np.from_dlpack(tensor), tensor.numpy())


def test_the_copies_of_a_plan_are_data(src, tmp_path):
    plan = package.plan(src, tmp_path / "d", format="torch", tp=2, dtype="fp32")
    out = {file.path: np.zeros(file.size, "u1") for file in plan.outputs}
    for copy in plan.copies():
        assert (copy.source_dtype, copy.target_dtype) == ("bfloat16", "float32")
        assert not copy.added and not copy.scaled

        def view(data, at, strides, dtype, shape=copy.shape):
            strides = [n * np.dtype(dtype).itemsize for n in strides]
            return np.ndarray(shape, dtype, data, at, strides)

        data = np.fromfile(copy.source, "u1")
        values = view(data, copy.source_offset, copy.source_strides, ml_dtypes.bfloat16)
        view(out[copy.target], copy.target_offset, copy.target_strides, "f4")[...] = values
    plan.run()
    made = tree(plan.destination.path)
    for path, data in out.items():
        found = np.frombuffer(made[path], "u1")
        assert np.array_equal(data[data != 0], found[data != 0])
    assert sum(data.any() for data in out.values()) == 2  # the files of the ranks


def test_python_plans_and_converts(src, torch_dir, tmp_path):
    plan = package.plan(src, tmp_path / "d", format="torch", parallel=package.Parallel(tp=2, pp=2))
    assert "47 logical tensors" in plan.summary() and not (tmp_path / "d").exists()
    assert plan.run(max_memory="1MiB", threads=2)["plan"] == plan.digest
    assert tree(tmp_path / "d") == tree(torch_dir)
    package.convert(tmp_path / "d", tmp_path / "hf", format="hf")
    assert not package.diff(src, tmp_path / "hf")
    with pytest.raises(package.errors.UsageError, match="no format 'gguf'"):
        package.plan(src, tmp_path / "e", format="gguf")
    with pytest.raises(package.errors.UsageError, match="unknown dtype 'int4'"):
        package.plan(src, tmp_path / "e", dtype="int4")
    with pytest.raises(package.errors.DestinationError, match="--overwrite"):
        package.plan(torch_dir, tmp_path / "hf", format="hf")


@pytest.mark.parametrize(
    ("options", "stored"),
    [({}, 11), ({"layer_keys": "per_layer"}, 35), ({"dtype": "fp32", "tp": 2, "pp": 2}, 11)],
)
def test_a_plan_counts_the_tensors_that_inspect_shows(src, tmp_path, options, stored):
    plan = package.plan(src, tmp_path / "out", **options)
    assert f": {stored} stored tensors, 6 files" in plan.summary()
    plan.run()
    said = good("inspect", tmp_path / "out").out
    assert f"\nlogical tensors: 47\nstored tensors: {stored}\n" in said


def test_all_commands_count_the_same_logical_tensors(tmp_path):
    saved, out = unpack("fsdp/qwen3-plain", tmp_path / "saved"), tmp_path / "out"
    count = "100 logical tensors"  # 25 weights, and 3 states of each
    assert f": {count} in " in good("reshard", saved, out, "--target-tp", 1).err
    assert f": {count} equal," in good("diff", saved, out).out
    words = "\nlogical tensors: 100\nlogical tensors that are states of the optimizer: 75\n"
    assert all(words in good("inspect", path).out for path in (saved, out))


@pytest.fixture
def keywords() -> Iterator[None]:
    """Lets errors name keywords, as they do for a program that imports mckpt."""
    before = package.errors.show_options(False)
    yield
    package.errors.show_options(before)


def test_all_functions_list_their_keywords():
    assert {"open", "plan", "convert", "reshard", "repair", "diff", "check", "verify", "push"} <= {
        *dir(package)
    }
    for name, some in (
        ("open", {"iteration", "like", "family", "mapping", "vocab_size", "settings"}),
        ("plan", {"format", "tp", "pp", "vpp", "ep", "etp", "dtype", "overwrite", "quantize"}),
        ("convert", {"format", "tp", "max_memory", "threads", "progress", "cancel"}),
        ("reshard", {"format", "tp", "no_optimizer", "max_memory"}),
        ("repair", {"max_memory", "threads"}),
        ("write", {"format", "tp", "dtypes", "settings", "max_memory", "progress", "cancel"}),
        ("verify", {"level", "tp", "device", "tokens"}),
    ):
        found = inspect.signature(getattr(package, name)).parameters
        assert some <= found.keys(), name
        assert not [p for p in found.values() if p.kind is p.VAR_KEYWORD], name


def test_all_types_that_help_names_are_public():
    known = {*package.__all__, *typing.__all__, *dir(builtins)}
    known |= {*dir(collections.abc), *dir(pathlib), *dir(threading)}
    for name in package.__all__:
        if not inspect.isfunction(found := getattr(package, name)):
            continue
        signature = inspect.signature(found)
        parameters = signature.parameters.values()
        for text in (signature.return_annotation, *(p.annotation for p in parameters)):
            tree = ast.walk(ast.parse(text, mode="eval"))
            named = {node.id for node in tree if isinstance(node, ast.Name)}
            assert named <= known, (name, named - known)
    assert not [
        key for key in package.Options.__annotations__ if key not in package.Options.__doc__
    ]
    assert "help(mckpt.Options)" in package.plan.__doc__


def test_each_object_is_one_line_and_shows_its_public_names_only(src, torch_dir, tmp_path):
    ckpt, plan = package.open(torch_dir), package.plan(src, tmp_path / "out", tp=2)
    same, found = package.diff(src, torch_dir), package.check(torch_dir)
    broken = package.Difference(changed=[Changed("w", "dtype", "float32", "bfloat16")], same=46)
    bytes_read = f"{found.nbytes:,} bytes"
    for one, text in (
        (ckpt, f"Checkpoint(torch {torch_dir}, tp 2, pp 2)"),
        (package.open(src), f"Checkpoint(hf {src})"),
        (ckpt.hf_tensors(), f"HfTensors(47 tensors of torch {torch_dir})"),
        (ckpt["layers.3.attn.q.weight"], "(layers.3.attn.q.weight, [384, 48], bfloat16)"),
        (same, "Difference(47 logical tensors equal, 0 differ, 0 missing, 0 extra)"),
        (
            broken,
            "(46 logical tensors equal, 1 differ, 0 missing, 0 extra; first: w: dtype float32",
        ),
        (found, f"Checked(sound: {found.files} files, {bytes_read})"),
        (package.Verdict("fail", ["a", "b"], {"scatter": [0] * 99}), "Verdict(fail: a and 1 more)"),
        (plan, f"Plan(hf {src} -> torch_dist {tmp_path}/out/release: 47 copies, 6 files, "),
    ):
        assert text in repr(one) and len(repr(one)) < 200 + len(text), repr(one)
    page = (pathlib.Path(package.__file__).parent.parent / "docs/python-api.md").read_text()
    public = {name for name in dir(ckpt) if not name.startswith("_")}
    assert public >= {"dims", "format", "hf_tensors", "items", "parallel"}
    assert all(hasattr(ckpt, name) and f"`{name}" in page for name in public), public


def test_a_name_of_the_other_kind_is_an_error_that_points_there(torch_dir):
    ckpt = package.open(torch_dir)
    with pytest.raises(KeyError, match=r"such as embed.weight.*hf_tensors\(\) has them by their H"):
        ckpt["model.embed_tokens.weight"]
    assert ckpt.get("model.embed_tokens.weight") is None
    with pytest.raises(KeyError, match=r"such as model.embed_tokens.weight.*logical"):
        ckpt.hf_tensors()["embed.weight"]


@pytest.mark.parametrize(
    ("typed", "tables", "more"),
    [
        (Options, (SizeOptions, TargetOptions, PlaceOptions), set()),
        (RunKeywords, (RunOptions,), {"progress", "cancel"}),
        (VerifyKeywords, (VerifyOptions,), set()),
    ],
)
def test_the_keywords_are_the_options_of_the_tables(typed, tables, more):
    hints = typing.get_type_hints(typed, localns={"OnProgress": object, "Event": object})
    assert hints.keys() == more | {name for table in tables for name in table.__struct_fields__}
    for name, option in (item for table in tables for item in options_of(table).items()):
        values = {*typing.get_args(hints[name])}
        if option.choices and option.kinds != (bool,):
            assert values == {*option.choices}, name
        elif name != "format":  # which `formats` lists
            assert {*option.kinds} <= {hints[name], *values}, name


@pytest.mark.parametrize(
    "table",
    [
        *(SourceOptions, TargetOptions, PlaceOptions, RunOptions, AdapterOptions, VerifyOptions),
        *(CompareOptions, PushOptions, LoadOptions, SaveOptions, SyncOptions),
    ],
)
def test_every_option_has_a_keyword_and_refuses_other_values(table, keywords):
    for name, option in options_of(table).items():
        for flag in option.flags:
            assert re.fullmatch(rf"give {name}(=True|=False)?", in_keywords(f"give {flag}"))
        with pytest.raises(UsageError) as caught:
            table(**{name: object()})
        assert name in str(caught.value)


@pytest.mark.parametrize(
    ("function", "table"),
    [
        (package.diff, CompareOptions),
        (package.push, PushOptions),
        (live.load, LoadOptions),
        (live.save, SaveOptions),
        (live.Sync, SyncOptions),
    ],
)
def test_a_signature_has_the_options_and_the_defaults_of_its_table(function, table):
    found = inspect.signature(function).parameters
    for name, option in options_of(table).items():
        assert found[name].default == option.default, name


@pytest.mark.parametrize("name", ["convert", "write", "reshard", "repair"])
def test_signatures_show_the_true_defaults(name):
    found = inspect.signature(getattr(package, name)).parameters
    own = inspect.signature(package.Plan.run).parameters
    run = ("max_memory", "threads", "checksum", "allow_overflow", "resume", "engine")
    for option in (option for option in run if option in found):
        assert found[option].default == own[option].default is not None, option
    settings = RunSettings.of({})
    assert settings == RunSettings.of({n: own[n].default for n in run if n in own})
    if "overwrite" in found:
        assert found["overwrite"].default is False and found["allow_inexact"].default == ()
        assert found["tp"].default is None and found["tp"].annotation == "int | None"


@pytest.mark.parametrize(
    ("function", "wrong", "kind", "text"),
    [
        ("plan", {"nonsense": 1}, TypeError, "unexpected keyword argument 'nonsense'"),
        ("plan", {"format": "hf", "tp": 2}, UsageError, "tp: a Hugging Face directory has no"),
        ("plan", {"format": "gguf"}, UsageError, "no format 'gguf'"),
        ("plan", {"format": "zarr"}, UsageError, "the format zarr is read only"),
        (
            "plan",
            {"allow_inexact": "rope"},
            UsageError,
            "allow_inexact is 'rope', and must be a list of names",
        ),
        ("plan", {"max_shard_size": "2 lots"}, UsageError, "max_shard_size='2 lots' is not a size"),
        ("plan", {"max_shard_size": -1}, UsageError, "max_shard_size -1 is not a size"),
        ("plan", {"tp": 0}, UsageError, "tp is 0"),
        ("plan", {"max_shard_size": "1GB"}, UsageError, "max_shard_size: it is for a Hugging Face"),
        ("convert", {"checksum": "md5"}, UsageError, "checksum is 'md5'"),
        ("convert", {"threads": -1}, UsageError, "threads is -1"),
        ("convert", {"max_memory": "64"}, UsageError, "max_memory='64' without a unit"),
        ("convert", {"resume": 1}, UsageError, "resume is 1, and must be True or False"),
        ("plan", {"parallel": 3}, UsageError, "parallel is 3, and must be a mckpt.Parallel"),
        ("convert", {"progress": 1}, UsageError, "progress is 1, and must be a function"),
        ("convert", {"cancel": 1}, UsageError, "cancel is 1, and must be a threading.Event"),
        ("push", {"revision": 3}, UsageError, "revision is 3, and must be a text"),
        ("diff", {"atol": "a"}, UsageError, "atol='a' must be a finite number"),
        ("plan", {"dtype": "int8"}, UsageError, "dtype is 'int8', and must be bf16, fp16 or fp32"),
        ("reshard", {}, UsageError, "is a Hugging Face directory; `convert` converts it"),
        ("repair", {}, UsageError, "has no optimizer state to repair"),
        ("verify", {"nonsense": 1}, TypeError, "unexpected keyword argument 'nonsense'"),
    ],
)
def test_wrong_keywords_are_refused(function, wrong, kind, text, src, tmp_path, keywords):
    with pytest.raises(kind, match=re.escape(text)) as caught:
        getattr(package, function)(src, tmp_path / "out", **wrong)
    assert "--" not in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_errors_name_the_place_the_cure_and_the_keyword(src, torch_dir, tmp_path, keywords):
    with pytest.raises(package.errors.SourceError, match="has no iter_0000007"):
        package.open(torch_dir, iteration=7)
    with pytest.raises(UsageError, match="vocab_size is 0"):
        package.open(src, vocab_size=0)
    with pytest.raises(UsageError, match="'tid' is not the name of a dim"):
        package.open(src, settings={"tid": False})
    with pytest.raises(UsageError, match="is not one of Megatron"):
        package.reshard(torch_dir, tmp_path / "no", format="hf")
    package.convert(src, tmp_path / "out", format="torch", tp=2)
    with pytest.raises(package.errors.DestinationError) as caught:
        package.convert(src, tmp_path / "out", format="torch", tp=4)
    assert caught.value.exit_code == 6
    assert caught.value.where == str(tmp_path / "out" / "release")
    assert caught.value.cure == "give overwrite=True to replace the checkpoint in it"


@pytest.mark.parametrize(
    ("option", "keyword"),
    [
        ("give --etp 1", "give etp=1"),
        ("--set mtp_layers=0 leaves", "settings={'mtp_layers': 0} leaves"),
        ("--allow-inexact a --allow-inexact args.b", "allow_inexact=['a', 'args.b']"),
        ("Megatron's --use-checkpoint-args", "Megatron's --use-checkpoint-args"),
        ("--tokenizer DIR", "tokenizer=DIR"),
        ("--level bytes compares", "level='bytes' compares"),
        ("--revision {step}: the", "revision {step}: the"),
    ],
)
def test_options_become_keywords(option, keyword):
    assert in_keywords(option) == keyword


def test_a_conversion_that_is_done_returns_its_manifest(src, tmp_path):
    first = package.convert(src, tmp_path / "out", tp=2)
    assert package.convert(src, tmp_path / "out", tp=2) == first
    with pytest.raises(UsageError, match="threads is -1"):
        package.convert(src, tmp_path / "out", tp=2, threads=-1)


@pytest.mark.parametrize(
    ("keyword", "value"), [("target_iteration", 3), ("divisible_by", 8), ("update_tracker", True)]
)
def test_keywords_without_effect_on_a_hugging_face_directory_are_refused(
    keyword, value, torch_dir, tmp_path, keywords
):
    with pytest.raises(UsageError, match=f"^{keyword}.*: .*leave it out"):
        package.plan(torch_dir, tmp_path / "out", format="hf", **{keyword: value})


def test_reshard_keeps_what_is_not_given(torch_dir, tmp_path):
    package.reshard(torch_dir, tmp_path / "out", tp=4)
    made = package.open(tmp_path / "out")
    assert (made.format, made.parallel) == ("torch", package.Parallel(tp=4, pp=2))


def test_progress_gets_events_and_cancel_ends_a_run(src, tmp_path):
    seen, cancel = [], threading.Event()
    package.convert(src, tmp_path / "a", progress=seen.append, cancel=cancel)
    assert seen[-1].complete and seen[-1].total_bytes > 0 and seen[-1].files > 0
    cancel.set()
    with pytest.raises(package.errors.Cancelled):
        package.convert(src, tmp_path / "b", cancel=cancel)
    assert not (tmp_path / "b" / "release").exists()
    with pytest.raises(package.errors.Cancelled):
        package.diff(src, tmp_path / "a", cancel=cancel)
    assert package.convert(src, tmp_path / "b")["files"]
