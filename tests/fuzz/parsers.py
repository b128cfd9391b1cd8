"""The parsers of mckpt, the small checkpoints that are damaged for each, and the code that reads
them.
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import os
import shutil
import string
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

import mckpt
from mckpt import cli, mapping
from mckpt.checkpoint.checkpoint import Checkpoint
from mckpt.cli import job
from mckpt.containers import safetensors, torch_file
from mckpt.containers.dcp_metadata import read_metadata
from mckpt.formats.megatron import run_config, zarr_directory
from mckpt.geometry.parallel import Parallel
from mckpt.mapping import reading
from mckpt.storage import sparse_copy
from tests.fuzz import damage
from tests.helpers import nemo_archive, tiny

FIXTURES = tiny.FIXTURES
Read = Callable[[Path, Random], Any]


class Parser(NamedTuple):
    """One parser: what is damaged for it, and what reads it."""

    name: str
    share: int  # of all inputs, in thousandths: the more an input costs, the fewer
    samples: tuple[str, ...]  # folders of the corpus; none if the input is no file
    files: tuple[str, ...]  # patterns of the files that are damaged
    # (how often, the code that reads)
    reads: tuple[tuple[int, Read], ...]


# ------------------------------------------------------------------------------------- the corpus


def make_corpus(root: Path) -> None:
    """Writes the checkpoints that are damaged, each in a folder of its own."""
    small = {"num_hidden_layers": 1, "vocab_size": 40}
    tiny.tiny_random("qwen3", root / "hf", **small)
    tiny.tiny_random("qwen3-moe", root / "hf-files", max_shard_size=200_000, **small)
    source = root / "hf"
    for name, wanted in {
        "torch_dist": {"parallel": Parallel(tp=2)},
        "torch": {"format": "torch", "parallel": Parallel(tp=2)},
        "bridge": {"run_config": True},
        "orbax": {"format": "orbax"},
    }.items():
        mckpt.plan(source, root / name, **wanted).run()
    shutil.rmtree(root / "bridge" / "hf")
    (root / "bridge" / "release" / "mckpt.json").unlink()
    kept = root / "kept"  # whose family file lies beside the weights
    shutil.copytree(root / "hf", kept)
    (kept / "mckpt-mapping.yaml").write_text(mapping.merged("hf", "qwen3"))
    mckpt.plan(root / "torch_dist", root / "fp8", format="hf", quantize="fp8").run()
    _packed(root / "packed")
    folder, config = nemo_archive.zarr(root / "archive", "model.", "model_weights")
    for name, mode in {"nemo": "w:", "nemo-gz": "w:gz"}.items():
        (root / name).mkdir()
        described = {**nemo_archive.described(config), "override_vocab_size": 14}
        nemo_archive.pack(folder, described, root / name / "a.nemo", mode)
    shutil.rmtree(root / "archive")
    for name, (archive, folder) in ARCHIVES.items():
        shutil.move(tiny.unpack(archive, root / "archive") / folder, root / name)
        shutil.rmtree(root / "archive", ignore_errors=True)
    shutil.copytree(FIXTURES / "old" / "reshaped", root / "old")
    for folder in ("families", "jobs", "configs"):
        (root / folder).mkdir()
    for name in ("qwen3", "deepseek_v3", "gpt_oss", "llama"):
        shutil.copy(mapping.folder("hf") / f"{name}.yaml", root / "families")
    for path in (FIXTURES / "run_config").glob("*.yaml"):
        shutil.copy(path, root / "configs")
    (root / "jobs" / "job.yaml").write_text(JOB)


# sample -> the archive and the folder in it; "" is all of it
ARCHIVES = {
    "zarr": ("zarr/0.6-llama-weights", "zarr"),
    "zarr-flat": ("zarr/0.12-trained-dp_zero_gather_scatter", "zarr"),
    "layer_wise": ("muon/moe-tp2-ep2-by-layers", "torch"),
    "fsdp": ("fsdp/qwen3-moe-ep2-fsdp_dtensor", ""),
    "torch_dcp": ("fsdp/qwen3-torch_dcp", ""),
    "dist-flat": ("optimizer/dp_zero_gather_scatter", ""),
    "optimizer": ("optimizer/fully_sharded_model_space", ""),
}
JOB = """\
steps:
  - command: reshard
    src: ${HOME}/checkpoints
    dst: ckpt-tp8
    target-tp: 8
    iteration: 12
  - command: hf-to-megatron
    src: model
    dst: out
    tp: 2
    set: {num_layers: 4}
    overwrite: true
    max-memory: 1GiB
  - command: verify
    hf: model
    megatron: ckpt-tp8
    level: bytes
"""


def _packed(root: Path) -> None:
    """Writes a model whose linears have 4 bits, in the form compressed-tensors."""
    tiny.tiny_random("qwen3", root, num_hidden_layers=1, vocab_size=40)
    config = json.loads((root / "config.json").read_text())
    arrays: dict[str, np.ndarray] = {}
    for key, array in tiny.tensors(config).items():
        if array.ndim != 2 or "layers" not in key:
            arrays[key] = array
            continue
        rows, columns = array.shape
        arrays[f"{key}_packed"] = np.full((rows, columns // 8), 0x12345678, "i4")
        arrays[f"{key}_scale"] = np.full((rows, columns // 8), 0.01, ml_dtypes.bfloat16)
        arrays[f"{key}_shape"] = np.array(array.shape, "i8")
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group"}
    group = {"targets": ["Linear"], "weights": {**weights, "group_size": 8}}
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }
    tiny.write_json(root / "config.json", config)
    tiny.write_weights(root, arrays)


# -------------------------------------------------------------------------------------- the readers


def command(*args: Any) -> None:
    """Runs `mckpt` in this process; its exceptions are those of the program."""
    # as a terminal's, which has no byte for a half of a surrogate pair
    out = io.TextIOWrapper(io.BytesIO(), "utf-8")
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        cli.cli([str(one) for one in args], prog_name="mckpt", standalone_mode=False)


def understood(path: Path, random: Random) -> None:
    """Reads the headers, names, dims and states of a checkpoint."""
    source = Checkpoint.open(path)
    _ = source.dims, source.layout, source.optimizer, source.model.notes
    source.reader.check_replicas()


def inspected(path: Path, random: Random) -> None:
    command("inspect", path, *random.choice(((), ("--json",), ("--tensors",))))


def checked(path: Path, random: Random) -> None:
    command("check", path, "--threads", 1)


def planned(path: Path, random: Random) -> None:
    command("plan", path, path.parent / "nowhere", *random.choice(((), ("--json",))))


def converted(path: Path, random: Random) -> None:
    """Converts a checkpoint into the other direction."""
    out = path.parent / "out"
    shutil.rmtree(out, ignore_errors=True)
    hf = (path / "config.json").exists()
    how = random.choice(((), ("--dtype", "fp16"), ("--dtype", "fp32")))
    name = "hf-to-megatron" if hf else "megatron-to-hf"
    try:
        command(name, path, out, "--threads", 1, *how)
    finally:
        shutil.rmtree(out, ignore_errors=True)


def resharded(path: Path, random: Random) -> None:
    out = path.parent / "out"
    try:
        command("reshard", path, out, "--target-tp", 2, "--threads", 1)
    finally:
        shutil.rmtree(out, ignore_errors=True)


def _each(path: Path, pattern: str, read: Callable[[Path], Any]) -> None:
    for found in sorted(path.rglob(pattern)):
        if found.is_file():
            read(found)


def headers(path: Path, random: Random) -> None:
    _each(path, "*.safetensors", lambda file: safetensors.read([str(file)]))


def pickles(path: Path, random: Random) -> None:
    def read(file: Path) -> None:
        fd = os.open(file, os.O_RDONLY)
        try:
            torch_file.read(fd, str(file))
        finally:
            os.close(fd)

    _each(path, "*.pt", read)


def indexes(path: Path, random: Random) -> None:
    _each(path, ".metadata", read_metadata)


def archived(path: Path, random: Random) -> None:
    """Reads an archive of NeMo as a checkpoint."""
    read = random.choice((understood, inspected, checked, planned, converted))
    try:
        for found in path.glob("*.nemo"):
            read(found, random)
    finally:
        sparse_copy.clean()


def arrays(path: Path, random: Random) -> None:
    _each(path, zarr_directory.ARRAY, zarr_directory.read_array)


def run_configs(path: Path, random: Random) -> None:
    def read(file: Path) -> None:
        dialect = mapping.load("megatron", "hybrid" if "nemotron" in file.name else "gpt")
        found = run_config.mapping_file(dialect)
        assert found is not None
        states = {"save_optim": False, "save_rng": False}
        if random.random() < 0.2:
            run_config.restated(file, {"num_layers": 3}, states)
        run_config.run_config_dims(file, found, {}, {})

    _each(path, "*.yaml", read)


def families(path: Path, random: Random) -> None:
    def read(file: Path) -> None:
        config = json.loads((FIXTURES / "tiny" / "qwen3.json").read_text())
        family = reading.load.__wrapped__("hf", str(file))  # another file with the same name
        scope = family.scope(family.read(config, {}, "config.json"))
        for bound in family.bind(scope):
            bound.keys()

    _each(path, "*.yaml", read)


def jobs(path: Path, random: Random) -> None:
    _each(path, "*.yaml", lambda file: job.read(file, cli.cli))


# ----------------------------------------------------------------------- inputs that are no files


def _words(random: Random, pieces: tuple[str, ...], most: int) -> str:
    return "".join(random.choice(pieces) for _ in range(random.randrange(most)))


LAYOUT = (
    *"EtmL|*()0123456789,",
    "(t|)*",
    "t*",
    "Et*3|",
    "(tt|)*2",
    "|L",
    "t|tL",
    "*99999",
    "Et|tL",
)
LAYOUTS = (  # with their stages, layers and layers of multi-token prediction
    *(("Et*3|(tt|)*2L", 4, 7, 0), ("Ett|ttL", 2, 4, 0), ("E|(t|)*4L", 6, 4, 0)),
    *(("Et|t|tt|mL", 4, 4, 1), ("E(t|t)*2L", 3, 4, 0), ("Et|t|t|t|t|tL", 3, 6, 0)),
)


def layouts(path: Path, random: Random) -> None:
    """Reads the layout of a pipeline."""
    text: Any
    text, pp, layers, mtp = random.choice(LAYOUTS)
    chance = random.random()
    if chance < 0.4:
        text = damage.raw(random, text.encode()).decode("utf-8", "replace")
    elif chance < 0.7:
        text = _words(random, LAYOUT, 12)
    elif chance < 0.8:
        sizes = {name: damage.strange(random) for name in random.sample(ARGS, 3)}
        Parallel.of_args({**sizes, "pipeline_model_parallel_layout": text})
        return
    if random.random() < 0.3:
        pp = random.choice(damage.NUMBERS)
    if random.random() < 0.2:
        layers, mtp = random.choice((1, 12, 97, 10**6)), random.choice((0, 1, 3))
    Parallel(pp=pp, layout=text, vpp=random.choice((1, 1, 1, 2))).stages(layers, mtp)


ARGS = tuple(Parallel().args())
VALUES = (
    *("0", "1", "2", "-1", "4", "7", "1000000000000", "99999999999999999999999999", "x", "1e9", ""),
    *("E(t|)*2L", "1GiB", "64MiB", "0B", "1e400", "nan", "inf", "num_layers=2", "tied=false", "="),
    *("num_layers=99999999999999999999", "hidden_size=.nan", "rope_theta=1e999", "vocab_size=[]"),
    *("a", "..", "/dev/null", "auto", "torch", "zarr", "torch_dist", "fp16", "fp8", "0.19", "1..3"),
    *("x" * 5000, "\x1b[31m", "\u202e", "٣", "num_layers=2001-01-01", "num_layers=!!float x", "hf"),
)


def options(path: Path, random: Random) -> None:
    """Runs a command that writes nothing with options of strange values."""
    name = random.choice(("plan", "inspect", "hf-to-megatron", "reshard", "check", "mappings"))
    known = cli.cli.commands[name]
    words: list[Any] = [name, path / "hf", path / "nowhere"][: 3 if name != "inspect" else 2]
    flags = [flag for p in known.params for flag in p.opts if flag.startswith("--")]
    unwanted = (
        "--html",
        "--watch",
        "--workers",
        "--ray",
        "--follow",
        "--wait-for",
        "--threads",
        "--verify",
    )
    known_flags = [flag for flag in flags if flag not in unwanted]
    for flag in random.choices(known_flags or ["--json"], k=random.choice((1, 1, 2, 3))):
        words.append(flag)
        if flag in flags and not next(p for p in known.params if flag in p.opts).is_flag:
            words.append(random.choice(VALUES))
    if name in ("hf-to-megatron", "reshard"):
        words.append("--dry-run")
    command(*words)


def texts(path: Path, random: Random) -> None:
    """Reads the values of options that have a syntax of their own."""
    text = _words(random, (*string.printable, *VALUES), 8)
    if random.random() < 0.5:
        mapping.parse_setting(f"{random.choice(tuple(mapping.schema().dims))}={text}")
    else:
        with contextlib.suppress(ValueError):  # which it documents
            mapping.major_minor(random.choice((text, "0.19", "core_r0.12.0")))


# ------------------------------------------------------------------------------------ the table

HF = ((70, understood), (8, inspected), (6, checked), (8, planned), (2, converted))
MEGATRON = ((60, understood), (10, inspected), (6, checked), (6, planned), (2, converted))
TRAINED = (*MEGATRON, (2, resharded))

PARSERS = {
    parser.name: parser
    for parser in (
        Parser("safetensors", 250, ("hf",), ("*.safetensors",), ((300, headers), *HF)),
        Parser("index", 90, ("hf-files",), ("*.index.json",), HF),
        Parser("config", 80, ("hf", "hf-files"), ("config.json",), HF),
        Parser("pt", 80, ("torch", "old"), ("*.pt",), ((300, pickles), *TRAINED)),
        Parser("metadata", 60, ("torch_dist", "torch_dcp", "dist-flat"), (".metadata",),
               ((300, indexes), *TRAINED)),
        Parser("torch_dist", 10, ("torch_dist", "dist-flat", "optimizer"),
               ("common.pt", "metadata.json", "*.distcp"), TRAINED),
        Parser("zarr", 18, ("zarr", "zarr-flat"),
               (".zarray", "[0-9]*", "*.pt", "metadata.json"), ((60, arrays), *TRAINED)),
        Parser("nemo", 10, ("nemo", "nemo", "nemo-gz"), ("*.nemo",), ((1, archived),)),
        Parser("layer_wise", 7, ("layer_wise",), ("layer_wise_optimizer_*.pt",), TRAINED),
        Parser("fsdp_dtensor", 7, ("fsdp",), (".metadata", "*.distcp", "common.pt"), TRAINED),
        Parser("orbax", 7, ("orbax",), ("_METADATA", "zarr.json", "[0-9]*"), TRAINED),
        Parser("run_config", 7, ("configs", "bridge"), ("*.yaml",), ((1, run_configs),)),
        Parser("bridge", 8, ("bridge",), ("run_config.yaml",), MEGATRON),
        Parser("quantised", 100, ("fp8", "packed"), ("config.json", "*.safetensors"), HF),
        Parser("mapping", 10, ("families",), ("*.yaml",), ((1, families),)),
        Parser("kept", 12, ("kept",), ("mckpt-mapping.yaml",), HF),
        Parser("job", 30, ("jobs",), ("job.yaml",), ((1, jobs),)),
        Parser("manifest", 12, ("torch_dist", "torch", "fp8"), ("mckpt.json",), TRAINED),
        Parser("args", 25, ("torch", "torch_dist", "old"), ("*_rng.pt", "common.pt"), MEGATRON),
        Parser("layout", 120, (), (), ((1, layouts),)),
        Parser("options", 20, ("hf",), (), ((1, options),)),
        Parser("settings", 46, (), (), ((1, texts),)),
    )
}  # fmt: skip


@functools.cache
def listed(root: Path, patterns: tuple[str, ...]) -> list[Path]:
    """Returns the files of a sample that are damaged, relative to it."""
    found = {path for pattern in patterns for path in root.rglob(pattern) if path.is_file()}
    return sorted(path.relative_to(root) for path in found)
