"""What mckpt refuses: damaged sources, impossible requests and wrong options, one row each.

A row has a source, the damage that is done to a copy of it, a command, its exit code, and the words
of its one error. In a command and in words, SRC is the source, DST a place for the output, TMP the
directory of both, and @NAME another source, which stays as it is. A word after `!` is not in the
error. tests/unit/test_refusals.py runs the rows, and tests/record.py records their texts.
"""

from __future__ import annotations

import os
import shlex
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tests.helpers import lora, tiny
from tests.helpers.commands import PT, TRACKER, as_trained, edit_json, good, save_hostile, save_pt

from tests.helpers.damages import (  # isort: skip
    ALONE, CONFIG, DIST_FC2, DOWN, FC2, INDEX, LFS, NORM, ONE, Damage, adapter, all_of,
    args_of, arrays, config, copied, elsewhere, entry, exchanged, file_of, folder, gone,
    header, holds, hole, hostile, index, integers, item, key_extra, link, metadata, moved,
    ranks, raw, shard_name, tensor, whole, without, write_bin,
)  # fmt: skip


class Row(NamedTuple):
    """One refusal."""

    source: str
    damage: Damage | None
    line: str
    code: int
    words: tuple[str, ...]


class Sources:
    """The sources of rows, each made when a row first needs it."""

    def __init__(self, root: Path) -> None:
        self.root, self.made = root, dict[str, Path]()

    def __getitem__(self, name: str) -> Path:
        if name not in self.made:
            out = self.root / name.replace("/", "-")
            self.made[name] = MAKERS.get(name, _stored(name))(self, out)
        return self.made[name]

    def prepare(self, row: Row, tmp: Path) -> tuple[list[str], tuple[str, ...]]:
        """Makes what a row needs in an empty directory; returns its command line and its words."""
        src = tmp / "src"
        if row.source and row.damage is None:
            src = self[row.source]
        elif row.damage is not None:
            shutil.copytree(self[row.source], src) if row.source else src.mkdir()
            row.damage(src)

        def told(text: str) -> str:
            text = text.replace("SRC", str(src)).replace("DST", str(tmp / "dst"))
            text = text.replace("TMP", str(tmp))
            if text.startswith("@"):
                name, _, below = text[1:].partition("//")
                return os.path.join(self[name], below)
            return text

        return [told(word) for word in shlex.split(row.line)], tuple(map(told, row.words))


def _stored(name: str) -> Callable[[Sources, Path], Path]:
    """Returns what makes a source of a name of fixtures/."""
    if (tiny.FIXTURES / name).is_dir():
        return lambda sources, out: tiny.FIXTURES / name
    if (tiny.FIXTURES / f"{name}.tar.xz").exists():
        return lambda sources, out: tiny.unpack(name, out)
    return lambda sources, out: tiny.tiny_random(name, out)


def converted(source: str, *options: Any, then: Damage | None = None) -> Any:
    def make(sources: Sources, out: Path) -> Path:
        good("hf-to-megatron", sources[source], out, *options)
        if then:
            then(out)
        return out

    return make


TP2_PP2 = ("--format", "torch", "--tp", 2, "--pp", 2)
MAKERS: dict[str, Callable[[Sources, Path], Path]] = {
    "many": lambda sources, out: tiny.tiny_random("qwen3", out, max_shard_size=120_000),
    "torch": converted("qwen3", *TP2_PP2),
    "lone": converted("qwen3", *TP2_PP2, then=ALONE),
    "dist": converted("qwen3"),
    "gpt": converted("llama-rope-scaled", "--allow-inexact", "rope_factor"),
    "iteration 7": converted("qwen3", "--iteration", 7, "--format", "torch"),
    "run": lambda sources, out: as_trained(sources["qwen3"], out),
    "run of experts": lambda sources, out: as_trained(sources["qwen3-moe"], out),
    "other": lambda sources, out: tiny.tiny_random("qwen3", out, intermediate_size=80),
    "bin": lambda sources, out: write_bin(out, tiny.tensors(tiny.config("qwen3"))),
    "factors": lambda sources, out: _factors(out),
    "headless": lambda sources, out: _headless(out),
}


def _factors(out: Path) -> Path:
    """Adapters of Megatron that do not state their alpha."""
    at = [tiny.FIXTURES / name for name in ("tiny-qwen3-lora", "tiny-qwen3")]
    good("adapter", "to-megatron", *at, out, "--layout", "block", "--format", "torch")
    edit_json(out / "release/mckpt.json", lambda manifest: manifest.pop("adapter"))
    return out


def _headless(out: Path) -> Path:
    """A DeepSeek-V3 as transformers saves it: without its layers of multi-token prediction."""
    tiny.tiny_random("deepseek-v3", out)
    c = tiny.config("deepseek-v3")
    found = tiny.tensors(c)
    tiny.write_weights(out, {name: found[name] for name in tiny.decoder_only(c, found)})
    return out


ROWS: dict[str, Row] = {}


def rows(
    name: str,
    source: str,
    line: str,
    table: dict[str, Any],
    code: int = 0,
    damage: Callable[[str], Damage] | Damage | None = None,
) -> None:
    """Adds rows to ROWS. A value of the table has the damage, the exit code, and the words; what is
    the same for all may be given once. {} in the line stands for the key. A `damage` of a line
    without {} gets the key.
    """
    for key, value in table.items():
        said = (value,) if isinstance(value, str) else value
        change = damage
        if callable(said[0]):
            change, *said = said
        elif damage and "{}" not in line:
            change = damage(key)
        status, *words = said if isinstance(said[0], int) else (code, *said)
        ident = f"{name}: {key[:50]}"
        while ident in ROWS:
            ident += " again"
        assert status, ident
        ROWS[ident] = Row(source, change, line.replace("{}", key), status, tuple(words))


# fmt: off
TO_MEGATRON, TO_HF, PLAN = "hf-to-megatron SRC DST", "megatron-to-hf SRC DST", "plan SRC DST"

# ---- options

rows("usage", "qwen3", "{}", {
    "frobnicate": "'frobnicate'",
    "diff": "Missing argument",
    "diff SRC": "Missing argument",
    "hf-to-megatron SRC DST --format x": "'x'",
    "convert a b": "'convert': hf-to-megatron, megatron-to-hf and reshard convert",
    "hf2mcore a b": "the commands are hf-to-megatron, megatron-to-hf",
    "reshrad a b": "did you mean reshard?",
    "hf-to-megatron a b --target-tp 2": "'--target-tp': mckpt hf-to-megatron calls it --tp",
    "reshard a b --format torch": "mckpt reshard calls it --target-format",
    "megatron-to-hf a b --tp 2": "reads a checkpoint at the sizes that it has",
    "diff a b --tensor-model-parallel-size=2":
        "'--tensor-model-parallel-size': mckpt diff reads a checkpoint at the sizes",
    "reshard a b --source-tp 2": "reads a checkpoint at the sizes that it has",
    "plan a b --num-layers-per-virtual-pipeline-stage 2": "--vpp N is the number of virtual",
    "hf-to-megatron --load a --save b": "are arguments without a name",
    "hf-to-megatron a b --like c": "these commands have it: megatron-to-hf, reshard,",
    "inspect a --frobnicate": "mckpt inspect --help lists all",
    "adapter to-hf a b --frobnicate": "mckpt adapter to-hf --help lists all",
    "inspect a --jsn": "did you mean --json?",
    "mappings shwo a": "did you mean show?",
    "hf-to-megatron SRC DST --set layers=1": "the nearest names are num_layers",
    "hf-to-megatron a b --tp two": "'two' is not a whole number of at least 1",
    "verify a b --length 1": "'1' is not a whole number of at least 2",
    "inspect SRC --iteration 3": "--iteration",
    "diff SRC SRC --atol nan": "atol",
    "diff SRC SRC --atol inf": "atol",
    "diff SRC SRC --atol -1": "atol",
    "reshard SRC DST": "mckpt hf-to-megatron",
    "megatron-to-hf SRC DST": "is a Hugging Face directory already",
    "hf-to-megatron @torch DST": "mckpt reshard",
    "diff SRC TMP/nope": (3, "does not exist"),
    "mappings show nope": (4, "'nope'", "qwen3"),
    "mappings check TMP/gone.yaml": (4, "gone.yaml"),
    "megatron-to-hf @torch DST --max-shard-size huge": "'huge'",
    "megatron-to-hf @torch DST --max-shard-size 0": "'0'",
    "megatron-to-hf @torch DST --tokenizer TMP/gone": "gone",
    "inspect SRC --megatron-args --html TMP/a.html": "--megatron-args and --html",
    "inspect SRC --html TMP": "TMP",
    "inspect SRC --html TMP/no/a.html": "cannot be written",
    "plan SRC DST --html TMP": "TMP",
    "plan SRC DST --html TMP/no/a.html": "cannot be written",
}, 2)
rows("sizes", "qwen3", TO_MEGATRON + " {}", {
    "--tp 3": "tp 3",
    "--tp 32": ("16 attention heads", "tp 32", "choose a tp of 1, 2, 4, 8, 16"),
    "--pp 3": ("4 layers", "pp 3"),
    "--pp 8": ("4 layers", "pp 8"),
    "--pp 2 --vpp 3": "vpp 3",
    "--vpp 2": "pp > 1",
    "--ep 2": ("ep 2", "this model has no experts"),
    "--pp 2 --pipeline-model-parallel-layout Ett|ttt|L": "Ett|ttt|L",
    "--tp 0": "--tp",
    "--tp two": "--tp",
    "--max-memory lots": "'lots'",
    "--max-memory 5": ("--max-memory '5'", "5 bytes", "5MiB"),
    "--max-memory 64k": "64,000 bytes is too little: each thread needs 512KiB; give 512KiB or more",
    "--max-memory 1MiB --threads 4": "give 2048KiB or more, or lower --threads 4",
    "--set foo=1": ("foo=1", "mckpt mappings show logical"),
    "--set num_layers=7": (4, "num_layers", "4", "7"),
    "--family nope": (4, "'nope'", "qwen3"),
    "--family llama":
        (5, "--family llama was given", "which is family qwen3: leave out --family llama."),
    "--mapping /nope.yaml": (4, "/nope.yaml"),
    f"--make-vocab-size-divisible-by {10**26}": "more than 2,147,483,648 rows",
    "--layout block": "--layout block: no adapter is written",
    "--adapter @tiny-qwen3-lora --merge --layout block": "no adapter is written",
    "--merge": "give --adapter DIR as well",
}, 2)
rows("sizes of experts", "qwen3-moe", TO_MEGATRON + " {}", {
    "--ep 5": ("24 experts", "ep 5"),
    "--tp 4 --etp 8 --format torch": ("etp 8", "tp 4", "torch_dist"),
}, 2)
rows("sizes of mistral", "mistral", TO_MEGATRON + " {}", {"--tp 7 --format torch": "tp 7"}, 2)
rows("sizes of a plan", "llama", PLAN + " --to torch {}", {
    "--pp 2 --decoder-first-pipeline-num-layers 4": "first",
    "--pp 2 --pipeline-model-parallel-layout Ett|tttL": "tttL",
}, 2)
rows("an option without effect", "qwen3", PLAN + " {}", {
    "--tokenizer SRC": ("--tokenizer SRC", "it is for a Hugging Face target"),
    "--max-shard-size 1GB": "--max-shard-size: it is for a Hugging Face target",
    "--quantize fp8": "--quantize fp8: it is for a Hugging Face target",
    "--grouped-experts": ("--grouped-experts", "is a dense model, which has no experts"),
    "--sequential-experts": ("--sequential-experts", "is a dense model, which has no experts"),
    "--no-optimizer": ("--no-optimizer", "Hugging Face directory, which has no optimizer state"),
}, 2)
rows("an option without effect", "torch", PLAN + " --to hf {}", {
    "--no-optimizer": "--no-optimizer: it is for a Megatron target",
    "--grouped-experts": "--grouped-experts: it is for a Megatron target",
    "--transformer-impl local": "--transformer-impl local: it is for a Megatron target",
    "--megatron-version 0.16": "--megatron-version 0.16: it is for a Megatron target",
    "--tp 4 --pipeline-model-parallel-layout Et|tttL":
        ("--tp, --pipeline-model-parallel-layout", "--to torch_dist"),
}, 2)
rows("an unknown name", "qwen3", "plan {} --allow-inexact rope_facto", {
    "SRC DST --to torch": ("--allow-inexact rope_facto:", "rope_factor", "config"),
    "@torch DST --to torch": ("--allow-inexact rope_facto:", "rope_factor", "config"),
    "@torch DST --to hf": ("--allow-inexact rope_facto:", "rope_factor", "config"),
}, 2)
rows("options of the target", "qwen3", PLAN + " {}", {
    "--to zip": "'zip'",
    "--to torch --layer-keys stacked": "the format torch has no choice",
    "--to torch --common-state object": "the format torch cannot keep the common",
    "--common-state object --megatron-version 0.18":
        "megatron-core reads it from 0.19 on, and --megatron-version is 0.18",
    "--dialect nope": "no dialect 'nope'; known: bert, bridge, bridge_gemma4, gpt",
    "--dialect TMP/own.yaml": "no dialect 'TMP/own.yaml'; known: bert, bridge, bridge_gemma4, gpt",
    "--dialect hybird": "no dialect 'hybird'; known: bert, bridge, bridge_gemma4, gpt, hybrid",
    "--dialect legacy --to torch": (4, "legacy would compute with"),
    **{f"--megatron-version {v or repr('')}": ("--megatron-version", "0.19")
       for v in ("0.11", "0.20", "1.0", "core_v0.16", "16", "")},
    "--run-config --to torch": "does not read the format torch; give --format torch_dist",
    "--run-config --transformer-impl local": "the target is local; give --transformer-impl",
    "--run-config --dialect hybrid --pp 2 --vpp 2": "refuses virtual pipeline stages",
    "--dialect bridge": (4, "Give --dialect gpt --run-config"),
    "--dialect bridge --to torch": "give --format torch_dist",
    "--dialect bridge --transformer-impl local": "transformer_engine only",
}, 2)
rows("the dialect hybrid", "qwen3-moe", PLAN + " --dialect hybrid {}", {
    "--transformer-impl local": ("local: ", "hybrid has transformer"),
    "--sequential-experts": ("sequential-experts: ", "grouped only"),
    "--layer-keys stacked": ("stacked: ", "has per_layer only"),
    "--megatron-version 0.17": ("hybrid.yaml ", "0.18 to 0.19"),
}, 2)
rows("the dialect hybrid", "deepseek-v3", PLAN + " --dialect hybrid {}", {
    "--megatron-version 0.18": (4, "latent ", "0.19 on"),
    "--pp 2 --pipeline-model-parallel-layout Etttttttm|tL":
        (2, "prediction (m) in the last stage only"),
})
rows("the dialect hybrid", "llama-rope-scaled", PLAN + " {}", {
    "--dialect hybrid": (4, "rope_type is 'llama3', and hybrid", "--allow-inexact rope_type"),
})
rows("the dialect hybrid", "gpt", PLAN + " {}", {
    "--dialect hybrid": (4, "the dialect hybrid would not compute", "rope_type"),
})
rows("corrections", "deepseek-v3", TO_MEGATRON + " {}", {
    "--set mtp_layers=0":
        ("--set mtp_layers=0", "num_nextn_predict_layers is 1", "the tensors agree with it"),
    "--set num_layers=3":
        ("--set num_layers=3", "num_hidden_layers is 4", "Leave out --set num_layers=3"),
}, 4)
rows("corrections", "headless", TO_MEGATRON + " {}", {
    "--set rope_theta=5.0":
        ("--set rope_theta=5.0", "rope_theta is", "no shape of a tensor depends on it"),
    "--set mtp_layers=0 --set rope_theta=5.0": "rope_theta",
    "": (3, "All 66 missing tensors are of layers of multi-token prediction",
         "num_nextn_predict_layers 1", "--no-mtp"),
}, 4)
rows("vocabulary and iteration", "torch", TO_HF + " {}", {
    "--vocab-size 1500": (3, "256", "1500"),
    "--vocab-size 0": (2, "--vocab-size"),
    "--iteration 7": (3, "iter_0000007", "release"),
})
rows("an iteration of a rank", "torch", "megatron-to-hf SRC/release/mp_rank_00_000 DST {}", {
    "--iteration 7": (2, "--iteration 7"),
})
# the option is wrong and not the checkpoint, so the error names the option
rows("corrections", "lone", "{}", {
    "plan SRC DST --set num_layers=5": ("--set", "num_layers 5", "correct or leave out"),
    "plan SRC DST --vocab-size 5000": ("--vocab-size", "5000", "correct or leave out"),
    "megatron-to-hf SRC DST --like @other": (4, "ffn_size", "64", "80"),
    "megatron-to-hf SRC DST --like TMP/gone": "gone: no such directory",
    "megatron-to-hf SRC DST --set ffn_size=80": ("[64, 48]", "[80, 48]"),
    "megatron-to-hf SRC DST --set ffn_size=x": (2, "ffn_size", "'x'"),
}, 3)

# ---- places

rows("no checkpoint", "", "{}", {
    f"{command} {where}": word
    for where, word in (("SRC", "no checkpoint"), ("SRC/file", "is a file"),
                        ("TMP/nope", "does not exist"))
    for command, where in (("inspect", where), ("hf-to-megatron", f"{where} DST"))
}, 3, holds("file"))
rows("no checkpoint", "", "{}", {"check SRC": "SRC"}, 3, holds("file"))
rows("checkpoints below", "", "megatron-to-hf SRC DST {}", {
    "": "SRC: is not a checkpoint, but has 1 checkpoint below it; give SRC/hf",
}, 3, all_of(holds("logs/x"), lambda src: tiny.tiny_random("qwen3", src / "hf")))
rows("checkpoints below", "many", "megatron-to-hf TMP DST {}", {
    "": "2 checkpoints below it; give TMP/other or TMP/src",
}, 3, lambda src: tiny.tiny_random("qwen3", src.with_name("other")))
rows("a destination", "", "{}", {
    f"{command} @qwen3 SRC/{where}": why
    for command in ("hf-to-megatron", "plan")
    for where, why in (
        ("loop", "is a link that leads nowhere"),
        ("loop/out", "loop is a link that leads nowhere"),
        ("gone/out", "gone is a link that leads nowhere"),
        ("gone", "is a link that leads nowhere"),
        ("file", "is a file"),
        ("file/out", "file is a file"),
    )
} | {f"inspect SRC/{where}": (3, where) for where in ("loop", "loop/out", "gone", "file/out")},
    6, all_of(holds("file"), link("loop", "loop"), link("gone", "nowhere/at/all")))
rows("a destination", "qwen3", "hf-to-megatron {}", {
    "SRC SRC": "is the source itself",
    "SRC SRC/x": "inside the source",
    "SRC TMP": "above the source",
    "SRC TMP/link": "is the source itself",
    "SRC TMP/link/x": "inside the source",
    "SRC TMP/above": "above the source",
    "SRC SRC/../src": "is the source itself",
    "TMP/link SRC": "is the source itself",
}, 6, all_of(link("../link", "src"), link("../above", ".")))
rows("a destination", "iteration 7", "reshard SRC/iter_0000007 SRC {}", {
    "--overwrite": "source",
}, 6, holds("x"))

rows("iterations", "iteration 7", "megatron-to-hf SRC TMP/out_{iteration} {}", {
    "--iterations 5,7:8": (3, "has no iteration 5, 8; it has 7"),
    "--iterations 5:": "'5:' is neither latest nor all",
    "--iterations 9:5": "names no iteration",
    "--iterations all --iteration 7": "give one of them",
    "--keep 2": "--keep needs --iterations or --watch",
    "--until 2": "--until ends --watch",
    "--watch --interval soon": "--interval 'soon' is not a time",
    "--watch --iterations some": "neither latest nor all",
}, 2)
rows("places of iterations", "iteration 7", "megatron-to-hf SRC TMP/{} --iterations all", {
    "out": "out/iter_{iteration}",
    "{step}": "in braces",
}, 2)

# ---- damaged files of Hugging Face

A = b'"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}'
rows("safetensors", "qwen3", TO_MEGATRON, {
    "truncated": (raw(lambda b: b[:-100]), ONE, "559,148", "559,248", "truncated"),
    "truncated in the header": (raw(lambda b: b[:100]), ONE, "header", "truncated"),
    "padded": (raw(lambda b: b + b"xx"), ONE, "559,250", "559,248", "has bytes behind its tensors"),
    "zero bytes": (holds(ONE, ""), ONE, "0 bytes"),
    "git-lfs pointer": (holds(ONE, LFS), ONE, "git lfs pull"),
    "header length lies": (raw(lambda b: b"\xff" * 8 + b[8:]), ONE, "18,446,744,073,709,551,615"),
    "header too short": (raw(lambda b: bytes(8) + b[8:]), ONE, "0 bytes"),
    "no JSON": (whole(b"{nope"), ONE, "JSON"),
    "deep JSON": (whole(b"[" * 100_000), ONE, "JSON"),
    "no object": (whole([1]), ONE, "object"),
    "key twice": (whole(b"{" + A + b"," + A + b"}", b"1234"), ONE, "'a' twice"),
    "unknown dtype": (entry(dtype="Q4"), ONE, NORM, "'Q4'", "BF16"),
    "dtype of no string": (entry(dtype=["BF16"]), ONE, NORM),
    "entry of no object": (header(lambda h: h.update({NORM: None})), ONE, NORM),
    "negative size": (entry(shape=[-48]), ONE, NORM, "-48"),
    "boolean size": (entry(shape=[True]), ONE, NORM),
    "huge size": (entry(shape=[1 << 70]), ONE, NORM, "96"),
    "wrong byte count": (entry(shape=[47]), ONE, NORM, "94", "96"),
    "overlap": (moved(-2), ONE, NORM, "overlap"),
    "hole": (header(lambda h: {k: h[k] for k in h if k != "lm_head.weight"}), ONE, "hole"),
    "out of range": (moved(10**9), ONE, NORM, "1,000,554,304"),
    "a directory": (folder(ONE), ONE, "not a file"),
    "integers": (header(integers), "down_proj", "int16"),
}, 3)
BIN = "pytorch_model.bin"
rows(BIN, "bin", TO_MEGATRON, {
    "cut": (raw(lambda b: b[:-50_000], BIN), "SRC/" + BIN, "cut short"),
    "git-lfs pointer": (holds(BIN, LFS), "SRC/" + BIN, "git lfs pull"),
    "hostile": (lambda src: save_hostile(src / BIN, src.parent / "mark"), 8, BIN, "refused"),
    "strides of 0":
        (lambda src: write_bin(src, tiny.tensors(tiny.config("qwen3")),
                               lambda k, a: (a[:1], 0, (0,)) if k == NORM else None),
         NORM, "dense"),
    "a list": (lambda src: save_pt(src / BIN, [1], {}), "state dict"),
    "no tensor": (lambda src: save_pt(src / BIN, {"a": 1}, {}), "'a' is not a tensor"),
}, 3)
rows("shards", "many", TO_MEGATRON, {
    # one problem, not one for each tensor
    "missing shard": (gone(shard_name(2)), "model-00002", "not there", "!is missing; it should be"),
    "extra shard": (copied(shard_name(1), "model-00009-of-00009.safetensors"),
                    "model-00009", "does not name"),
    "truncated shard": (raw(lambda b: b[:-5], shard_name(2)), "model-00002", "truncated"),
    "../x": (index(lambda m: m.update({NORM: "../x.safetensors"})), "'../x.safetensors'"),
    "an absolute path": (index(lambda m: m.update({NORM: "/etc/passwd"})), "'/etc/passwd'"),
    "a file without a name": (index(lambda m: m.update({NORM: ""})), "''"),
    "a number": (index(lambda m: m.update({NORM: 3})), "weight_map"),
    "an absent file":
        (index(lambda m: m.update({NORM: "gone.safetensors"})), "gone.safetensors", "not there"),
    "another shard": (index(lambda m: m.update({NORM: m["model.embed_tokens.weight"]})),
                      NORM, "places it in model-00001"),
    "a forgotten tensor": (index(lambda m: m.pop(NORM)), NORM, "does not name it"),
    "an absent tensor": (index(lambda m: m.update(foo=m[NORM])), "foo", "does not contain it"),
    "no object": (holds(INDEX, "[]"), INDEX, "weight_map"),
    "tensor in two shards":
        (copied(shard_name(1), shard_name(2)), "is in model-00001", "model-00002"),
    "index and single file": (copied(shard_name(1), ONE), ONE, INDEX, "move one of them away"),
}, 3)
rows("tensors", "qwen3", TO_MEGATRON, {
    "wrong shape": (arrays(lambda a: a.update({NORM: a[NORM][:40]})), 3, NORM, "[40]", "[48]"),
    "transposed":
        (arrays(lambda a: a.update({DOWN: a[DOWN].T.copy()})), 3, DOWN, "[64, 48]", "[48, 64]"),
    "missing": (arrays(lambda a: a.pop(NORM)), 3, NORM, "missing", "[48]"),
    "no output layer": (arrays(lambda a: a.pop("lm_head.weight")), 3, "lm_head.weight is missing"),
    "extra": (arrays(lambda a: a.update(foo=a[NORM])), 5, "foo [48]", "qwen3.yaml"),
    "mixed dtypes": (arrays(lambda a: a.update({DOWN: a[DOWN].astype("f4")})), 2,
                     "bfloat16", "float32", "layers.1.mlp.down", "--dtype"),
})
rows("layers of multi-token prediction", "deepseek-v3", TO_MEGATRON, {
    # the checkpoint is damaged, so a hint to --no-mtp would be wrong
    name: (arrays(lambda a, name=name: a.pop(name), "deepseek-v3"), name, "!--no-mtp")
    for name in ("model.layers.4.enorm.weight", NORM)
}, 3)
rows("config.json", "qwen3", TO_MEGATRON, {
    "none": (gone(CONFIG), 3, "config.json"),
    "a list": (holds(CONFIG, "[1]"), 3, CONFIG, "list"),
    "no JSON": (holds(CONFIG, "{"), 3, CONFIG, "JSON"),
    "no UTF-8": (holds(CONFIG, b'{"a":"\xff"}'), 3, CONFIG, "JSON"),
    "half of a surrogate pair": (config(model_type="\ud800"), 3, CONFIG, "JSON"),
    "unknown architecture":
        (config(architectures=["FooForCausalLM"]), "FooForCausalLM", "--mapping"),
    "a head without a family":
        (config(architectures=["MegatronBertForSequenceClassification"]), "Save the whole",
         "has the decoder of family megatron_bert", "has further tensors (cls.predictions"),
    "another head without a family":
        (config(architectures=["CohereForSequenceClassification"]),
         "can hold CohereForSequenceClassification: "),
    "an encoder": (config(architectures=["BertModel"]), "can hold BertModel: Megatron-Core has"),
    "a model without layers in Megatron":
        (config(architectures=["RwkvForCausalLM"]),
         "can hold RwkvForCausalLM: Megatron-Core has no RWKV"),
    "how to write a file":
        (config(architectures=["NoSuchForCausalLM"]), "no family has", "mappings list",
         "mappings new HF_DIR > my.yaml", "check my.yaml HF_DIR", "--mapping my.yaml", " verify"),
    "no architecture": (config("architectures"), "--family"),
    "architecture of no list": (config(architectures="Qwen3ForCausalLM"), "--family"),
    "size of a string": (config(num_hidden_layers="four"), CONFIG, "'four'", "int"),
    "size of a list": (config(hidden_size=[48]), CONFIG, "[48]"),
    "half a size": (config(hidden_size=48.5), "48.5"),
    "negative layers": (config(num_hidden_layers=-4), "-4"),
    "no layers": (config(num_hidden_layers=0), "num_layers is 0"),
    "a million layers": (config(num_hidden_layers=10**6), "num_layers is 1000000", "10000"),
    "a layer more": (config(num_hidden_layers=5), 3, "model.layers.4", "missing"),
    "a layer less": (config(num_hidden_layers=3), 5, "model.layers.3", "in no rule"),
    "no size": (config("hidden_size"), "hidden_size"),
    "no heads": (config(num_attention_heads=0), "num_heads is 0"),
    "no groups": (config(num_key_value_heads=0), "num_query_groups is 0"),
    "another head count": (config(num_key_value_heads=7), 3, "k_proj", "[192, 48]", "[168, 48]"),
    "hidden size of 10**30": (config(hidden_size=10**30), "hidden_size is 1000"),
    "epsilon of a string": (config(rms_norm_eps="1e-6"), "'1e-6'"),
    "unknown activation": (config(hidden_act="relu"), "'relu'", "silu"),
    "rope_scaling of a string": (config(rope_scaling="linear"), "rope_scaling", "'linear'"),
    "rope_scaling of a number": (config(rope_scaling=0), "rope_scaling is 0", "an object"),
    "rope_scaling unknown":
        (config(rope_scaling={"rope_type": "longrope", "factor": 4}), "'longrope'"),
    "rope_scaling half":
        (config(rope_scaling={"rope_type": "llama3", "factor": 8.0}), "low_freq_factor"),
    "tied of a string": (config(tie_word_embeddings="yes"), "'yes'", "bool"),
    "quantised": (config(quantization_config={"quant_method": "gptq"}), "quantization_", "gptq"),
    "unknown key": (config(num_experts=3), "num_experts", "--allow-inexact num_experts"),
}, 4)
rows("config.json of llama", "llama", PLAN, {
    "missing":
        (config("hidden_size", "num_hidden_layers"), "num_hidden_layers is missing (decoder",
         "hidden_size is missing (width of the residual stream)", "!could not be read"),
    "types":
        (config(hidden_size="64", rms_norm_eps="1e-5x", tie_word_embeddings=1, vocab_size=True,
                intermediate_size=2.5),
         "SRC/config.json: the mapping llama.yaml cannot read this model:",
         "hidden_size is '64', and must be of type int", "vocab_size is True", "ffn_size is 2.5",
         "norm_eps is '1e-5x', and must be of type float", "tied is 1, and must be of type bool"),
    "values": (config(hidden_act="gelu"), "hidden_act is 'gelu'; llama.yaml supports 'silu'"),
    "rope type":
        (config(rope_scaling={"rope_type": "dynamic", "factor": 2.0}),
         "rope_scaling.rope_type is 'dynamic'; llama.yaml supports 'default', 'llama3', 'yarn'"),
    "disagree":
        (config(rope_parameters={"rope_theta": 5.0}),
         "rope_theta has several values: rope_theta", "rope_parameters.rope_theta 5.0"),
    "rope incomplete":
        (config(rope_scaling={"rope_type": "llama3", "factor": 8.0}),
         "rope_scaling.low_freq_factor", "is missing"),
}, 4)
rows("config.json of mixtral", "mixtral", PLAN, {
    # mixtral.yaml makes a list of as many entries as there are layers
    "a billion layers": (config(num_hidden_layers=10**9), 4, "must be from 1 to 10000"),
})
rows("files of the model", "qwen3", TO_MEGATRON, {
    name: (holds(name, LFS), f"{name}: is a pointer of git-lfs", "git lfs pull")
    for name in ("config.json", "tokenizer.json", "README.md")
}, 3)
rows("an adapter beside weights", "qwen3", "{} SRC DST", {
    "hf-to-megatron": ("adapter_config.json", "transformers applies", "--no-adapter"),
    "plan": ("adapter_config.json", "transformers applies", "--no-adapter"),
}, 2, copied(CONFIG, "adapter_config.json"))
rows("factors beside weights", "qwen3", "{} SRC DST", {
    "hf-to-megatron": ("adapter_model.safetensors", "--no-adapter"),
    "plan": ("adapter_model.safetensors", "--no-adapter"),
}, 2, copied(ONE, "adapter_model.safetensors"))

# ---- damaged checkpoints of Megatron

RANK = "mp_rank_01_000"
rows("torch", "torch", TO_HF, {
    "rank missing": (gone("release/mp_rank_01_001"), "mp_rank_01_001 is missing"),
    "first rank missing": (gone("release/mp_rank_00_000"), "mp_rank_00_000 is missing"),
    "rank extra": (copied(f"release/{RANK}", "release/mp_rank_02_000"), "mp_rank_02_000"),
    "file missing": (gone(f"release/{RANK}/{PT}"), RANK, PT),
    "file truncated": (file_of("01_000", lambda b: b[:5000]), RANK, PT, "cut short"),
    "file empty": (file_of("01_000", lambda b: b""), RANK, PT),
    "key missing": (ranks(lambda pt: pt.value["model"].pop(FC2), "01_000"),
                    RANK, FC2, "missing", "[48, 32]"),
    "key extra": (ranks(lambda pt: pt.value["model"].update(foo=pt.value["model"][FC2]), "01_000"),
                  5, RANK, "foo", "gpt.yaml"),
    "wrong shape":
        (tensor(FC2, "bfloat16", (48, 31), 2976), RANK, FC2, "[48, 31]", "[48, 32]"),
    "wrong dtype":
        (tensor(FC2, "float32", (48, 32), 6144), 2, RANK, "float32", "bfloat16", "--dtype"),
    "no tensor": (ranks(lambda pt: pt.value["model"].update({FC2: "weights"}), "01_000"),
                  RANK, FC2, "not a tensor"),
    "no model": (ranks(lambda pt: pt.value.pop("model"), "01_000"), RANK, "no `model`"),
    "no dict": (ranks(lambda pt: setattr(pt, "value", [1]), "01_000"), RANK, "a list"),
    "no args": (all_of(ranks(lambda pt: pt.value.pop("args")), ALONE), 2, "no args", "--like"),
    "args of a dict": (ranks(lambda pt: pt.value.update(args={"a": 1})), PT, "args", "dict"),
    "another tp":
        (args_of(tensor_model_parallel_size=4), "tp 4", "mp_rank_02_000 is missing"),
    "tp of a word": (args_of(tensor_model_parallel_size="two"), PT, "'two'"),
    "pp that does not divide": (args_of(pipeline_model_parallel_size=3), "pp 3", "4 layers"),
    "args against DST/hf": (args_of(ffn_hidden_size=80), 4, "ffn_size", "80", "64"),
    "tracker garbage": (holds(TRACKER, "latest"), TRACKER, "'latest'"),
    "tracker empty": (holds(TRACKER, ""), TRACKER, "''"),
    "tracker names nothing":
        (holds(TRACKER, "77"), "iter_0000077", TRACKER, "it has release"),
    "tracker unreadable": (folder(TRACKER), 7, TRACKER, "cannot be read"),
    "hostile": (hostile(f"mp_rank_00_000/{PT}"), 8, f"mp_rank_00_000/{PT}", "refused"),
    "hostile rank": (hostile(f"mp_rank_01_001/{PT}"), 8, f"mp_rank_01_001/{PT}", "refused"),
}, 3)
rows("args", "lone", TO_HF, {
    "another ffn size": (args_of(ffn_hidden_size=80), "linear_fc1", "[64, 48]", "[80, 48]"),
    "layers that do not divide": (args_of(num_layers=5), "5 layers", "pp 2"),
    "a million layers": (args_of(num_layers=10**6), 4, "num_layers is 1000000"),
    "layers of a word": (args_of(num_layers="four"), 4, "'four'"),
    "no vocab_size": (args_of(vocab_size=None), 2, "256", "--vocab-size"),
}, 3)
rows("a wrong vocabulary", "lone", TO_HF + " {}", {
    "--vocab-size 300": (3, "256", "300"),
}, damage=args_of(vocab_size=None))
WORDS, DISTCP = "embedding.word_embeddings.weight", "release/__0_0.distcp"
rows("torch_dist", "dist", TO_HF, {
    "no metadata.json": (gone("release/metadata.json"), "metadata.json"),
    "metadata.json garbage": (holds("release/metadata.json", "{"), "metadata.json"),
    "another backend":
        (holds("release/metadata.json", '{"sharded_backend": "x"}'), "'x'", "torch_dist"),
    "no .metadata": (gone("release/.metadata"), ".metadata"),
    ".metadata cut": (raw(lambda b: b[:500], "release/.metadata"), 8, ".metadata"),
    "no .distcp": (gone(DISTCP), "__0_0.distcp", "not there"),
    ".distcp without its last byte":
        (raw(lambda b: b[:-1], DISTCP), "__0_0.distcp", "truncated", "its last item ("),
    ".distcp cut": (raw(lambda b: b[:-60_000], DISTCP), "__0_0.distcp", "truncated"),
    "chunk grid with a hole": (metadata(hole), DIST_FC2, "9216", "12288"),
    "chunk without an item":
        (metadata(lambda t, i: i.pop((DIST_FC2, (0, 0, 0)))), DIST_FC2, "[0, 0, 0]"),
    "path ../x": (elsewhere("../x.distcp"), "'../x.distcp'"),
    "absolute path": (elsewhere("/etc/passwd"), "'/etc/passwd'"),
    "key missing": (metadata(without(DIST_FC2)), DIST_FC2, "missing"),
    "key extra": (metadata(key_extra), 5, "foo.weight", "[4, 48, 64]", "gpt.yaml"),
    "item past the end":
        (item(lambda i: ("__0_0.distcp", 10**9, 100)), DIST_FC2, "1,000,000,100"),
    "item of another tensor": (item(lambda i: i[WORDS, (0, 0)]), DIST_FC2, "[256, 48]"),
    "common.pt cut": (holds("release/common.pt", b"PK\3\4"), "common.pt"),
    "a word as content_metadata":
        (lambda src: save_pt(src / "release/common.pt", {"content_metadata": "word"}, {}),
         "common.pt", "content_metadata is a str"),
    "common.pt of a list":
        (lambda src: save_pt(src / "release/common.pt", [1], {}), "common.pt", "a list"),
    "hostile index": (hostile(".metadata"), 8, ".metadata", "refused"),
    "hostile common state": (hostile("common.pt"), 8, "common.pt", "refused"),
    # the reader records the call without making it, and the record has no fields
    "an index that only calls a function":
        (holds("release/.metadata", b"\x80\x02cposix\nsystem\nX\x04\0\0\0true\x85R."), 8,
         "release/.metadata: contains", "Nothing in the file was run", "get the file again"),
}, 3)
rows("args that change the model", "run", PLAN + " --to hf", {
    name: (args_of(**{name: value}), f"{name} is {value!r}")
    for name, value in (
        ("apply_residual_connection_post_layernorm", True),
        ("softmax_scale", 0.5),
        ("spec", ["a", "b"]),
        ("moe_router_load_balancing_type", "quantile_balancing"),
        ("moe_mlp_glu_interleave_size", 32),
        ("mla_down_proj_fusion", True),
        ("mtp_use_repeated_layer", True),
        ("gtp_weight_remat_size", 2),
        ("moe_single_grouped_weight", True),
        ("attn_logit_softcapping", 30.0),
        ("final_logit_softcapping", 1.0),
        ("moe_router_force_load_balancing", True),
        ("enable_hyper_connections", True),
    )
}, 4)
rows("args that change the model", "run", PLAN + " --to hf", {
    "a list of balancing types":
        (args_of(moe_router_load_balancing_type=["aux_loss", "quantile_balancing"]),
         "moe_router_load_balancing_type is ['aux_loss', 'quantile_balancing']"),
    "another balancing type":
        (args_of(moe_router_load_balancing_type="sinkhorn"),
         "moe_router_load_balancing_type is 'sinkhorn'"),
    "a frequency without a value": (args_of(moe_layer_freq="x"), "moe_layer_freq", "has no value"),
    # no family with these tensors has them
    **{name: (args_of(**{name: value}, **more), "no family computes", f"qwen3: {dim}")
       for name, value, dim, more in (
           ("no_rope_freq", 4, "rope_layers", {}),
           ("rotary_interleaved", True, "rope_interleaved", {}),
           ("layernorm_zero_centered_gamma", True, "norm_offset", {"apply_layernorm_1p": None}),
           ("apply_layernorm_1p", True, "norm_offset", {"layernorm_zero_centered_gamma": None}))},
}, 4)
rows("args that change the model", "run of experts", PLAN + " --to hf", {
    name: (args_of(**{name: value}), "no family computes", "qwen3_moe: ", dim)
    for name, value, dim in (
        ("moe_router_score_function", "sigmoid", "router_score is 'sigmoid'"),
        ("moe_router_num_groups", 4, "router_groups is 4"),
        ("moe_router_topk_scaling_factor", 2.5, "router_scale is 2.5"),
    )
}, 4)
rows("args", "run", PLAN + " --to hf {}", {
    "--allow-inexact args.foo": (2, "--allow-inexact args.foo: no feature has this name"),
})


FIRST = "decoder.layers.0.self_attention.linear_proj.weight"
SECOND = "decoder.layers.0.self_attention.linear_qkv.weight"
for name, start in (("qwen3-torch_dcp", "model."), ("qwen3-moe-ep2-fsdp_dtensor", "model.module.")):
    rows(name, f"fsdp/{name}", "reshard SRC DST", {
        "no file": (gone("iter_0000001/__1_0.distcp"), "__1_0.distcp"),
        "no weight": (metadata(without(start + FIRST)), f"{start}{FIRST} is missing"),
        "weights exchanged": (metadata(exchanged(start + FIRST, start + SECOND)),
                              f"{start}{FIRST} is [20, 8], and should be [8, 12]"),
        "a weight more": (metadata(partial(key_extra, old=start + FIRST, new="model.lora")),
                          5, "model.lora is in no rule"),
        "no args": (metadata(without("args")), 2, "give --like HF_DIR"),
    }, 3)
rows("read only", "fsdp/qwen3-torch_dcp", "reshard SRC DST --target-format {}", {
    "zarr": ("zarr", "'torch_dist'"),
}, 2)
FP32 = {"--no-optimizer --dtype fp32": ("a run in fp32", "give --dtype bf16")}
rows("into torch_dcp", "fsdp/qwen3-plain", "reshard SRC DST --target-format torch_dcp {}", {
    "--target-tp 2": ("--use-torch-fsdp2 takes no tp 2",),
    "--no-optimizer": ("loads it only with an optimizer", "fsdp_dtensor may"),
} | FP32, 2)
rows("into fsdp_dtensor", "fsdp/qwen3-plain", "reshard SRC DST --target-format fsdp_dtensor {}", {
    "--target-pp 2": ("--use-megatron-fsdp takes no pp 2; give 1",),
} | FP32, 2)
rows("into mfsdp_v2", "fsdp/qwen3-plain", "reshard SRC DST --target-format mfsdp_v2 {}", {
    "--target-tp 2": ("--megatron-fsdp-version 2 takes no tp 2; give 1",),
} | FP32, 2)
rows("a save that never finished", "fsdp/qwen3-plain", "reshard SRC DST {}", {
    "": (3, "has no metadata.json: its save never finished"),
}, damage=gone("iter_0000001/metadata.json"))

# ---- checkpoints of other programs

for command in ("megatron-to-hf SRC DST", "hf-to-megatron SRC DST"):
    rows(f"another program, {command.split()[0]}", "", command, {
        "NeMo 1": (holds("model.nemo"), "archives of NeMo 1", "a *.nemo file"),
        "PEFT": (all_of(*map(holds, ("adapter_config.json", "adapter_model.safetensors", CONFIG))),
                 "PEFT adapter", "mckpt adapter merge"),
        "DeepSpeed": (all_of(holds("global_step40/x.pt"), holds("latest")),
                      "DeepSpeed", "DIR/global_stepN", "--like"),
        "verl": (all_of(holds("global_step_3/actor/x.pt"), holds(TRACKER, "5")),
                 "verl", "DIR/global_step_N/actor"),
        "torchtitan": (holds("step-10/.metadata"), "torchtitan", "step-N", "--like"),
    }, 3)

# ---- adapters

UP, GATE, MERGE = "0.mlp.up_proj", "0.mlp.gate_proj", "adapter merge @tiny-qwen3 SRC DST"
B = "base_model.model.model.layers.{}.lora_{}.weight".format
OTHER = "model.layers.9.mlp.up_proj.lora_{}.weight".format


def unfit(stored: Any, weights: Any) -> None:
    stored |= {OTHER("A"): np.zeros((4, 32), "f4"), OTHER("B"): np.zeros((72, 4), "f4")}
    stored |= {B(UP, "B"): np.zeros((70, 4), "f4"), "lm_head.weight": np.zeros((300, 32), "f4")}
    del stored[B("0.self_attn.q_proj", "B")]


rows("an adapter that is not computed", "", MERGE, {
    name: (adapter(**config), said) for name, config, said in (
        ("type", {"peft_type": "IA3"}, "peft_type is 'IA3'"),
        ("qalora", {"use_qalora": True}, "use_qalora"),
        ("a new key", {"use_new": [1]}, "use_new is [1]: mckpt does not know this key"),
        ("pissa", {"init_lora_weights": "pissa_niter_4"}, "changes the weights of the base too"),
        ("OLoRA", {"init_lora_weights": "OLoRA"}, "changes the weights of the base too"),
        ("parameters", {"target_parameters": True}, "must be a list of names"),
        ("bias", {"bias": {"all": 1}}, "bias is {'all': 1}, and must be none, all or lora_only"),
        ("rank", {"r": 5}, "another rank than adapter_config.json gives them"),
        ("DoRA", {"use_dora": True}, "the adapter has no lora_magnitude_vector"),
        ("rank 0", {"r": 0}, "r is 0, and must be a whole number from 1 to 2147483648"),
        ("a large rank", {"r": 10**400}, "r is 1000"),
        ("flag", {"rank_pattern": {"(?i)Q": 4}},
         "rank_pattern['(?i)Q']: is not a regular expression"),
        ("deep", {"rank_pattern": {"(" * 500 + "a" + ")" * 500: 4}}, "brackets inside each other"),
        ("repeats", {"rank_pattern": {"a{99999999999}": 4}}, "repetition number is too large"),
        ("a group", {"alpha_pattern": {r"(q)\1": 4}}, "alpha_pattern['(q)"),
        ("slow", {"rank_pattern": {"(.*)*x": 4, "((.*.)*.)*_proj": 5}}, "rank 4, stated 5"),
        ("alpha 0", {"lora_alpha": 0}, "lora_alpha is 0, and must be a finite number"),
        ("alpha nan", {"lora_alpha": float("nan")}, "lora_alpha is nan"),
        ("a large alpha", {"lora_alpha": 10**400}, "lora_alpha is 1000"),
        ("no alpha", {"lora_alpha": None}, "lora_alpha is None"),
        ("alpha of text", {"alpha_pattern": {"q_proj": "8"}}, "alpha_pattern['q_proj'] is '8'"),
        ("bracket", {"rank_pattern": {"(": 4}}, "rank_pattern['(']: is not a regular expression"),
        ("a list", {"rank_pattern": [4]}, "rank_pattern is [4], and must be an object"),
        ("yes", {"use_rslora": "yes"}, "use_rslora is 'yes', and must be true or false"),
    )
}, 3)
rows("an adapter that does not fit", "", MERGE, {
    "every tensor is named":
        (adapter("0.self_attn.q_proj", UP, change=unfit),
         "one of the two factors A and B is missing", "they must be [r, 32] and [72, r]",
         "the base has no weight model.layers.9.mlp.up_proj.weight",
         "replaces lm_head.weight, which is [271, 32] in the base"),
    "a norm that is not finite":
        (adapter(change=lambda s, _: s.update(
            {"base_model.model.model.norm.weight": np.full(32, np.nan, "f4")}),
            modules_to_save=["norm"]), "is nan"),
    "one place twice":
        (adapter(change=lambda s, _: s.update({k.removeprefix(lora.PREFIX): s[k] for k in [*s]})),
         "two tensors for one place", lora.PREFIX),
    "two adapters":
        (adapter(UP, "1.mlp.up_proj", change=lambda s, _: {
            k.replace(".weight", f"{'.b' if 'layers.1.' in k else '.a'}.weight"): s[k] for k in s}),
         "has the tensors of 2 adapters", "a directory of its own"),
    "one with a name and one without":
        (adapter(UP, "1.mlp.up_proj", change=lambda s, _: {
            k.replace(".weight", f"{'.b' if 'layers.1.' in k else ''}.weight"): s[k] for k in s}),
         "has the tensors of 2 adapters", "a directory of its own"),
    "magnitudes without DoRA": (adapter(UP, dora=True, use_dora=False),
                                "use_dora is false in adapter_config.json, and the module has a"),
    "magnitudes of another size":
        (adapter(UP, dora=True, change=lambda s, _: s.update(
            {k: s[k][:-1] for k in s if "magnitude" in k})), "[71]: holds", "must be [72] of"),
    "no magnitudes":
        (adapter(UP, "0.mlp.down_proj", dora=True, change=lambda s, _: s.pop(
            f"{lora.PREFIX}model.layers.{UP}.lora_magnitude_vector") is None),
         f"{UP}.lora_A", "and the module has no lora_magnitude_vector"),
}, 3)
rows("an adapter without its configuration", "", "{}", dict.fromkeys((
    MERGE, "adapter to-megatron SRC @tiny-qwen3 DST", "adapter inspect SRC",
    "hf-to-megatron @tiny-qwen3 DST --adapter SRC",
), "has adapter_model.safetensors and no adapter_config.json"), 3,
     all_of(adapter(UP), gone("adapter_config.json")))
rows("an adapter's options", "tiny-qwen3-lora", "{}", {
    f"{MERGE} --alpha 3": "states its alpha in adapter_config.json",
    "adapter merge @tiny-qwen3 TMP/x DST": (3, "does not exist"),
    **{f"adapter to-hf @factors DST --alpha {a}": "must be a finite number, not 0"
       for a in ("nan", "inf", "0")},
    "adapter to-hf @factors DST": "give --alpha",
    "adapter to-megatron SRC @tiny-qwen3 DST --layout fused": "Give --layout block",
    "adapter to-megatron SRC @tiny-qwen3 DST --layout canonical --tp 4": "is not divisible by tp 4",
}, 2)
rows("an adapter onto itself", "tiny-qwen3-lora", "adapter merge @tiny-qwen3 SRC SRC {}", {
    "--overwrite": "is the adapter itself, SRC",
}, 2, holds("x"))
rows("an adapter that Megatron cannot hold", "", "adapter to-megatron SRC @tiny-qwen3 DST", {
    "two scales": (adapter(UP, "0.mlp.down_proj", alpha_pattern={"up_proj": 3}), "scales"),
    "a whole tensor":
        (adapter(UP, change=lambda s, w: s.update({"lm_head.weight": w["lm_head.weight"]})),
         "whole tensors"),
    "DoRA of up alone": (adapter("mlp.up_proj", dora=True),
                         "all or none", "layers.0.mlp.gate.weight"),
    "DoRA of up and gate": (adapter("up_proj", "gate_proj", dora=True),
                            "Give --layout block", "!canonical"),
    "DoRA of the vocabulary": (adapter("lm_head", dora=True),
                               "vocabulary of 271 to 384 rows"),
}, 2)
THREE = [f"{layer}.mlp.{name}_proj" for name in ("up", "gate") for layer in (1, 2, 3)]
TO = "adapter to-megatron SRC {} DST".format
for line, damage, *words in (
    (TO("@tiny-qwen3") + " --layout block", adapter(*THREE, dora=True),
     "all or none", "layers.0.mlp.gate.weight"),
    (TO("@tiny-qwen3") + " --layout canonical", adapter("up_proj", "gate_proj", dora=True),
     "has no magnitudes"),
    (TO("@tiny-qwen3") + " --tp 2", adapter("down_proj", dora=True),
     "DoRA at tp 2", "layers.*.mlp.down.weight", "--tp 1"),
    (TO("@tiny-qwen3-moe") + " --layout block", adapter(
        *(f"{n}.{m}_proj" for n in range(8) for m in ("up", "gate", "down")), dora=True,
        base="tiny-qwen3-moe"), "no DoRA for the experts"),
):
    rows("DoRA", "", "{}", {line: words}, 2, damage)
rows("ms-swift", "adapters/swift", "adapter inspect SRC/swift {}", {
    "--like @tiny-qwen3": (2, "modules_to_save", "--mcore_adapter"),
}, damage=raw(lambda b: b.replace(b"self_attention.linear_proj.lora_B.default",
                                  b"self_attention.l.modules_to_save.default."),
              "swift/iter_0000001/.metadata"))

# ---- mapping files


def mine(text: str) -> Damage:
    return holds("my.yaml", text.encode("utf-8", "surrogateescape"))


BLOCK = "extends: llama\nblocks:\n  foo.:\n    "
LAYERS = "blocks:\n  h.{layer}.:\n    is: layers.{layer}.\n    tensors:\n      "
rows("a mapping file", "", "mappings check SRC/my.yaml", {
    "extends: llama\ntensor: {}\n":
        "my.yaml:2: 'tensor' is not a key of a mapping file; the keys are models, special,",
    "extends: llama\ndims:\n  num_layer: n_layer\n":
        "my.yaml:3: logical.yaml has no dim 'num_layer'",
    'extends: llama\nrequires: "mla and ("\n': "my.yaml: 'mla and (' is not an expression",
    "extends: llama\nderive:\n  a: 1 +\n": "my.yaml:3: '1 +' is not an expression",
    "extends: llama\nalso:\n  b: c =\n": "my.yaml:3: 'c =' is not an expression",
    "extends: llama\ninexact:\n  x: {when: num_layers !=, why: w}\n":
        "my.yaml:3: 'num_layers !=' is not an expression",
    "extends: llama\ninexact:\n  x: {when: 'True'}\n": "my.yaml:3: x requires `when` and `why`",
    "extends: llama\nrefuse:\n  x: {when: 'True', why: w, loads: false}\n":
        "my.yaml:3: x requires `when` and `why`, not",
    BLOCK + "instead: {when: 1 +, key: bar.}\n    tensors: {a.weight: /embed.weight}\n":
        "my.yaml:3: '1 +' is not an expression",
    BLOCK + "instead: {key: bar.}\n    tensors: {a.weight: /embed.weight}\n":
        "my.yaml:3: `instead` of foo. wants `key` and `when`",
    BLOCK + "mtp: [b.]\n    tensors: {a.weight: /embed.weight}\n":
        "my.yaml:3: `mtp` of foo. needs a prefix",
    "extends: llama\ndims:\n  head_dim: {default: '128'}\n":
        "my.yaml:3: head_dim has no key, no const and no read",
    "dims:\n  head_dim: {keys: head_dim}\n":
        "my.yaml:2: head_dim may say key, default, values, const, read",
    "dims:\n  head_dim: [head_dim]\n": ("my.yaml:2: head_dim may say key,", "not ['head_dim']"),
    "dims:\n  head_dim: {key: 1.5}\n":
        "my.yaml:2: the key of head_dim is a text or a list of texts: 1.5",
    "extends: qwen3\nblocks:\n  model.layers.{layer}.:\n    tensors:\n"
        "      self_attn.q_prj.weight: null\n":
        ("my.yaml:5: self_attn.q_prj.weight: null removes nothing", "nearest", ".{q,k,v}_proj"),
    "extends: qwen3\nblocks:\n  foo.:\n    tensors: {a.weight: null}\n":
        "my.yaml:4: a.weight: null removes nothing",
    "extends: llama\ndims:\n  attn_gate: null\n":
        ("my.yaml:3: attn_gate: null removes nothing, because", "this key under dims"),
    "extends: qwen3\ndefaults: {foo: 1}\n": "my.yaml:2: defaults: no dim has the key 'foo'",
    "extends: qwen3\nkeys: {head_dim: a}\nconstants: {head_dim: 3}\n":
        "my.yaml:3: constants: 'head_dim' stands here twice (first in line 2)",
    "same_as: {rope_parameters: 1}\n": "my.yaml:1: rope_parameters holds text, not 1",
    "notes: [a, {b: c}]\n": "my.yaml:1: notes holds texts, not {'b': 'c'}",
    BLOCK + "tensors: 3\n": "the tensors of foo. are keys and values, not 3",
    "tensors:\n  a}: embed.weight\n": "my.yaml:2: a}: has a brace that belongs to no index",
    "tensors:\n\n  wte.weight: embeddings.weight\n":
        "my.yaml:3: wte.weight: logical.yaml has no tensor 'embeddings.weight'",
    LAYERS + "c_attn.weight: attn.qkv.weight\n":
        ("my.yaml:5: h.{layer}.c_attn.weight: ", "no tensor 'layers.{layer}.attn.qkv.weight'"),
    "tensors:\n  a: {pack: zip, of: [embed.weight, lm_head.weight]}\n":
        "my.yaml:2: a: no packing 'zip'; known: one, concat, gated, qkv",
    "tensors:\n  a: {of: embed.weight, absent: none}\n":
        "my.yaml:2: a: `absent` is a number, for one tensor, not 'none'",
    "tensors:\n  a: {of: [embed.weight, lm_head.weight]}\n":
        "my.yaml:2: a: several tensors need a `pack`",
    "tensors:\n  a: {of: embed.weight, tp: columns}\n":
        "my.yaml:2: a: no tp kind 'columns'; known: column, row, vocab, replicated",
    "tensors:\n  a: {of: embed.weight, stages: first}\n":
        ("my.yaml:2: a: a rule may say of, pack,", ", not stages"),
    "tensors:\n  a: {of: embed.weight, when: not tied and}\n":
        "my.yaml:2: 'not tied and' is not an expression",
    "dims:\n  head_dim: {key: d, default: hidden_size //}\n":
        "my.yaml:2: 'hidden_size //' is not an expression",
    "tensors:\n  a: {of: embed.weight, when: open('x')}\n":
        ("my.yaml:2:", "only all, any,", ", range can be called"),
    "tensors:\n  a: {of: embed.weight, when: config.pop('x')}\n": ("my.yaml:2:", "can be called"),
    "tensors:\n  a: embed.weight\n  a: lm_head.weight\n":
        "my.yaml:3: 'a' stands here twice (first in line 2)",
    "inert: []\ndims: {}\ninert: []\n": "my.yaml:3: 'inert' stands here twice (first in line 1)",
    "extends: lama\n": "my.yaml:1: there is no mapping 'lama' to extend",
    "extends: my\n": "my.yaml:1: there is no mapping 'my' to extend (it extends itself)",
    "tensors:\n  a.{layer}: embed.weight\n":
        "my.yaml:2: a.{layer}: {layer} is not an index of embed.weight",
    LAYERS + "e.{e}.weight: moe.experts.{expert}.up.weight\n":
        "my.yaml:5: h.{layer}.e.{e}.weight: {e} is not an index of",
    "tensors:\n  a: {pack: concat, of: [embed.weight, 'layers.{layer}.attn_norm.weight']}\n":
        "my.yaml:2: a: its tensors do not have the same indices",
    "tensors: {a: [}\n": ("my.yaml: not valid YAML:", "line 1"),
    "tensors: !!python/object/apply:os.system ['true']\n":
        ("my.yaml: not valid YAML:", "could not determine a constructor"),
    "notes: [!!float abc]\n": ("my.yaml: not valid YAML:", "abc"),
    f"notes: [{'9' * 6000}]\n": "my.yaml: not valid YAML: a number of 6,000 digits",
    "notes: &a0 [x, x]\n"
        "" + "".join(
        f"inert{i}: &a{i} [{'*a' + str(i - 1)}, *a{i - 1}]\n" for i in range(1, 40)):
        "my.yaml: not valid YAML: its aliases stand for more than 1,048,576 values",
    "notes: &a [*a]\n": "my.yaml: not valid YAML: its aliases",
    "notes: " + "[" * 9000: ("my.yaml: not valid YAML:", "nesting"),
    "# " + "x" * (1 << 20): "my.yaml: has 1,048,578 bytes",
    LAYERS + "'{q,k,v}.weight': 'attn.{q,k}.weight'\n":
        "my.yaml:5: h.{layer}.{q,k,v}.weight: {q,k} has 2 words, and the key has 3",
    "tensors:\n  a: '{embed,lm_head}.weight'\n":
        "my.yaml:2: a: {embed,lm_head} has 2 words, and the key has 0",
    "extends: llama\ntensors: embed.weight\n":
        "my.yaml:2: tensors holds keys and values, not 'embed.weight'",
    "architectures: LlamaForCausalLM\n":
        "my.yaml:1: architectures holds a list, not 'LlamaForCausalLM'",
    "blocks:\n  h.: layers.\n": "my.yaml:2: h. holds keys and values, not 'layers.'",
    "expect:\n  rope_type: rope\n": "my.yaml:2: rope_type holds a list, not 'rope'",
    "tensors:\n  a: 5\n": ("my.yaml:2: a: wants a tensor, or of, pack,", ", not 5"),
    "tensors:\n  a: {of: [1, 2], pack: concat}\n": "my.yaml:2: a: `of` names tensors, not [1, 2]",
    "tensors:\n  5: embed.weight\n": "my.yaml:2: 5 is not the name of a tensor",
    "- a\n- b\n": "my.yaml: a mapping file holds keys and values, not list",
    "": "my.yaml: a mapping file holds keys and values, not NoneType",
    "tensors:\n  1.5: embed.weight\n": "my.yaml:2: the key 1.5 must be a name",
    "\udcff": "my.yaml: cannot be read",
    "extends: llama\ncomputed:\n  a: b\n": ("my.yaml:2: ", "renamed 'computed' to 'ignore'"),
    "extends: llama\nsaid:\n  a: b\n": ("my.yaml:2: ", "renamed 'said' to 'by_args'"),
    "dims:\n  no_such: x\ntensors:\n  a: nothing\n  b: {of: embed.weight, tp: diagonal}\n":
        ("my.yaml:2:", "my.yaml:4:", "my.yaml:5:"),
    "extends: llama\ndims:\n  rope_thet: rope_theta\ntensors:\n  norm.w: final_norm.wieght\n":
        ("no dim 'rope_thet'; the nearest names are rope_theta",
         "no tensor 'final_norm.wieght'; the nearest names are final_norm.weight"),
    "\0": "YAML",
    # an error in a base file names the base file
    "extends: base\n":
        (all_of(holds("base.yaml", "tensors:\n  a: nothing\n"), holds("my.yaml", "extends: base")),
         "base.yaml:2: a: "),
    "extends: nope": "nope",
}, 4, mine)
rows("a mapping file and a config.json", "", "mappings check SRC/my.yaml --config {}", {
    "@qwen3//model.safetensors": (3, "JSON"),
    "@llama//config.json": (4, "final_norm.weight: in model.norm.weight and in model.other.weight"),
}, damage=mine("extends: llama\ntensors:\n  model.other.weight: final_norm.weight\n"))
FORM = "architectures: [Mine]\nextends: llama\nforms:\n  one: "
rows("a form", "", "mappings check SRC/my.yaml", {
    FORM + form: "my.yaml:4: forms: one needs `names`"
    for form in ("{}", '{"carried": ["a.*"], "extra": 1}', '{"carried": [1]}')
}, 4, mine)
