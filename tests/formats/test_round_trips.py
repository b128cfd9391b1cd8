"""Every kind of checkpoint becomes others, one after the other, and comes back bit for bit.

A row of TRIPS is a line of text:

    SOURCE > CHECKPOINT > CHECKPOINT ... [== ENDS] [| WORDS]

SOURCE is the name of a function of SOURCES and its arguments. A CHECKPOINT is a format and keywords
of `mckpt.plan`, or `repair`; it is made of the one before it. Three words change how it is made or
what is left of it:

    no_mtp    the checkpoint before is opened without its layers of multi-token prediction
    like      the checkpoint before is opened with the config.json of SOURCE
    bare      it loses hf/ and mckpt.json, as a checkpoint that a trainer saved has neither
    unlisted  it loses mckpt.json only

ENDS is the source whose files the last directory of Hugging Face has; it is SOURCE unless the row
names another one. WORDS are in the notes of the first plan. `test_a_checkpoint_comes_back` lists
what is asserted of each row. A test in another file is for one thing that no row can express, or
for a value that another program or numpy computed.
"""

from __future__ import annotations

import ast
import itertools
import json
import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest

import mckpt
from mckpt.checkpoint.comparison import diff
from tests.formats import (
    test_foreign,
    test_heads,
    test_quantised_checkpoints,
    test_quantised_forms,
    test_towers,
)
from tests.helpers import lora, tiny
from tests.helpers.commands import tree
from tests.unit import test_bad_input

BARE = ("bare", "unlisted")
FLAGS = ("no_mtp", "like", *BARE)
INEXACT = ["rope_factor", "activation"]  # of llama-rope-scaled, and of Gemma 1
SMALL: dict[str, Any] = {"max_memory": 60_000, "threads": 2}
DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
SIZES = {field.name for field in fields(mckpt.Parallel)}
OPTIMIZER = {
    "torch_dist": "fully_reshardable",
    "repair": "fully_reshardable",
    "torch": "distrib_optim.pt",
}


class Leg(NamedTuple):
    """One checkpoint of a row."""

    format: str
    options: dict[str, Any]
    flags: set[str]


def words(text: str) -> tuple[list[str], dict[str, Any]]:
    """Returns the words of a text, and its keywords. A value that Python cannot read is text."""
    plain, given = [], {}
    for word in text.split():
        name, equals, value = word.partition("=")
        if not equals:
            plain.append(word)
            continue
        try:
            given[name] = ast.literal_eval(value)
        except (SyntaxError, ValueError):
            given[name] = value
    return plain, given


def leg_of(text: str) -> Leg:
    (format, *flags), options = words(text)
    assert {*flags} <= {*FLAGS}, text
    return Leg(format, options, {*flags})


# ------------------------------------------------------------------------------------------ sources


def tiny_model(out: Path, case: str, dtype: str = "bfloat16", **changed: Any) -> Path:
    """A tiny model, every other one in several files."""
    shards = 100_000 if tiny.CASES.index(case) % 2 else None
    return tiny.tiny_random(case, out, dtype, max_shard_size=shards, **changed)


def value_head(out: Path) -> Path:
    head = {"weight": np.ones((1, 5), np.float32), "bias": np.zeros(1, ml_dtypes.bfloat16)}
    arrays = tiny.tensors(tiny.config("qwen3"))
    arrays |= {f"v_head.summary.{name}": array for name, array in head.items()}
    tiny.write_weights(tiny.tiny_random("qwen3", out), arrays)
    return out


def without_mtp(out: Path, **changed: Any) -> Path:
    """A DeepSeek-V3 without layers of multi-token prediction."""
    config = {**tiny.config("deepseek-v3"), "num_nextn_predict_layers": 0, **changed}
    arrays = tiny.tensors(tiny.config("deepseek-v3"))
    out.mkdir()
    tiny.write_weights(out, {name: arrays[name] for name in tiny.decoder_only(config, arrays)})
    tiny.write_json(out / "config.json", {**config, "torch_dtype": "bfloat16"})
    return out


def blocks(out: Path, case: str, **how: Any) -> Path:
    """A model with fp8 weights, whose files separate some weights from their scales."""
    how = {"block": (16, 32), "max_shard_size": 50_000, **how}
    arrays = test_quantised_checkpoints.tiny_quantised(case, out / "quantised", **how)
    tiny.write_weights(tiny.tiny_random(case, out / "plain"), arrays)
    return out / "quantised"


SOURCES: dict[str, Callable[..., Path]] = {
    "tiny": tiny_model,
    "value_head": value_head,
    "without_mtp": without_mtp,
    "blocks": blocks,
    # a model of transformers, whose class may have no output layer, or another one
    "saved": test_heads.saved,
    "flat": test_heads.flat,
    "wrapped": lambda out, name: test_foreign.renamed(out, test_foreign.WRAPPERS[name]),
    # a model in a .bin file, whose tensors are views of their storages
    "pickled": lambda out, view: test_bad_input.write_qwen3(out, view),
    "quantised": test_quantised_forms.published,
    "tower": test_towers.write,
    # a checkpoint that Megatron saved, with the state of its optimizer
    "sample": lambda out, name, inside=".": tiny.unpack(name, out) / inside,
}


@pytest.fixture(scope="module")
def make(work: Path) -> Callable[[str], Path]:
    """A function that makes a source, once. `plain SOURCE` is the directory with the dequantised
    values of a quantised one.
    """
    found: dict[str, Path] = {}

    def made(text: str) -> Path:
        if text.startswith("plain "):
            return made(text.removeprefix("plain ")).with_name("plain")
        if text not in found:
            (kind, *given), named = words(text)
            found[text] = SOURCES[kind](work / f"source{len(found)}", *given, **named)
        return found[text]

    return made


# ------------------------------------------------------------------- forms that cover every option

AXES: dict[str, tuple[Any, ...]] = {
    "format": ("torch", "torch_dist"),
    "tp": (1, 2, 4),
    "pp": (1, 2, 3, 4),
    "vpp": (1, 2),
    "ep": (1, 2, 4),
    "etp": (None, 1, 2, 4),
    "transformer_impl": ("transformer_engine", "local"),
    "grouped_experts": (None, True, False),
    "common_as_object": (False, True),
    "divisible_by": (1, 128),
    "megatron_version": (None, "0.16.1"),
}
LEAST = 5  # forms of each case


def fits(case: str, layers: int, experts: int, f: dict[str, Any]) -> bool:
    """Returns whether Megatron could build the case in this form; other tests see that mckpt
    refuses.
    """
    newest, engine = f["megatron_version"] is None, f["transformer_impl"] == "transformer_engine"
    return (
        layers % (f["pp"] * f["vpp"]) == 0
        and (f["vpp"] == 1 or f["pp"] > 1)
        and experts % f["ep"] == 0
        and (f["format"] == "torch_dist" or f["tp"] % (f["etp"] or f["tp"]) == 0)
        and (engine or not f["grouped_experts"])
        and not (f["common_as_object"] and (f["format"] == "torch" or not newest))
        and not (case == "deepseek-v3-plain" and engine and newest)
    )


def forms(case: str) -> Iterator[str]:
    """Yields forms that together have every value of every axis that fits the case."""
    c = tiny.config(case.split()[0])
    keys = ("num_experts", "num_local_experts", "n_routed_experts")
    experts = next((c[k] for k in keys if k in c), 0)
    dense = {} if experts else {"ep": (1,), "etp": (None,), "grouped_experts": (None,)}
    every = (
        dict(zip(AXES, one, strict=True)) for one in itertools.product(*(AXES | dense).values())
    )
    possible = [f for f in every if fits(case, c["num_hidden_layers"], experts or 1, f)]
    todo, rng = {item for f in possible for item in f.items()}, random.Random(case)
    for number in itertools.count():
        if not todo and number >= LEAST:
            return
        few = rng.sample(possible, min(150, len(possible)))
        best = max(few, key=lambda f: len(todo & f.items()))
        todo -= best.items()
        said = (f"{k}={v}" for k, v in best.items() if k != "format" and v not in (None, False))
        yield " ".join([best["format"], *said])


# --------------------------------------------------------------------------------------------- rows

WALKED = (*tiny.CASES, "qwen3-moe mlp_only_layers=[0,2]")  # of which some layers are dense
UNEVEN = (
    *("pp=2 first_stage_layers=1", "pp=3 last_stage_layers=2"),
    *("pp=3 first_stage_layers=1 last_stage_layers=1", "pp=2 layout=Ettt|tL"),
    "pp=2 account_for_embedding=True account_for_loss=True",
    "pp=2 vpp=3 account_for_embedding=True account_for_loss=True",
    *(
        "pp=2 layout=E|t*2|t,t|L",
        "pp=3 layout=E|tt|ttL transformer_impl=local",
        "pp=4 layout=E|tt|tt|L",
        "pp=4 layout=Et|t|t|t|(|)*3L",
    ),
)
CAST = ("llama", "mixtral")
HEADS = ("SequenceClassification", "TokenClassification")
NO_LAYER, CARRIED = "the model has no output layer", "are carried in hf/carried"
LEFT_OUT = "mtp_layers changed to 0 (--no-mtp)"
SAMPLES = (
    *("fsdp/qwen3-torch_dcp", "fsdp/qwen3-moe-ep2-fsdp_dtensor", "fsdp/qwen3-plain"),
    *("optimizer/fully_sharded_model_space", "optimizer/dp_zero_gather_scatter"),
    "zarr/0.8-llama-fully_sharded_model_space zarr",
)


def hybrid(case: str) -> dict[str, tuple[str, str]]:
    """Returns sizes of a hybrid model, and the formats of the dialect gpt and of hybrid."""
    layout = "Ettt|tttttmL" if tiny.config(case).get("num_nextn_predict_layers") else "Ettt|tttttL"
    return {
        "tp=1": ("torch_dist", "torch"),
        "tp=2 pp=2": ("torch", "torch_dist"),
        "tp=1 pp=2 vpp=2": ("torch_dist", "torch"),
        f"tp=1 pp=2 layout={layout}": ("torch_dist", "torch"),
    }


MTP = ("torch pp=2 layout=Ett|ttmL", "torch_dist pp=2 layout=Ett|ttmL", "torch dialect=hybrid")
BLOCKS = [f"blocks qwen3 scale_dtype={dtype}" for dtype in ("float16", "bfloat16")]
FORMS = ["GPT-OSS", *(form.replace(" ", "_") for form in test_quantised_forms.FORMS)]
DEQUANTISED = "with a scale for each 16 x 32, and are dequantised"

TRIPS = [
    # every option of a form, for every tiny model; after the first one, only args describe it
    *(
        f"tiny {case} > {' bare > '.join(forms(case))} bare > hf max_shard_size=150_000"
        for case in WALKED
    ),
    *(
        f"tiny {('llama-tied', 'qwen3-moe')[n % 2]} > torch tp=2 {uneven} > torch tp=4 pp=4 > hf"
        for n, uneven in enumerate(UNEVEN)
    ),
    # casts
    *(f"tiny {case} dtype=float32 > torch tp=2 > hf" for case in CAST),
    *(f"tiny {case} dtype=float32 > torch tp=2 dtype=bf16 > hf == tiny {case}" for case in CAST),
    "tiny qwen3 > torch_dist dtype=fp32 > hf dtype=bf16",
    # dialects
    *(
        f"tiny {case} > {gpt} dialect=gpt tp=2 pp=1 > {other} dialect=hybrid {sizes}"
        f" > {gpt} dialect=gpt tp=2 pp=1 > hf"
        for case in ("qwen3", "qwen2", "llama-tied", "qwen3-moe", "deepseek-v3")
        for sizes, (gpt, other) in hybrid(case).items()
    ),
    *(
        f"tiny {case} rope_theta=10000.0 rope_scaling=None"
        " > torch dialect=legacy tp=2 pp=2 > torch_dist dialect=gpt > hf"
        for case in ("llama", "qwen2")
    ),
    # without an output layer, with another one, and with other names
    *(
        f"saved {case} AutoModel > torch_dist tp=2 > torch tp=1 pp=2 > hf | {NO_LAYER}"
        for case in ("llama", "mistral", "qwen2", "qwen3", "qwen3-moe", "gemma")
    ),
    *(
        f"saved {case} AutoModelFor{head} > torch_dist tp=2 > torch tp=1 pp=2 > hf | {CARRIED}"
        for case in ("llama", "qwen3-moe")
        for head in HEADS
    ),
    *(
        f"{source} > torch_dist tp=2 unlisted > torch tp=1 pp=2 unlisted > hf"
        for source in ("saved qwen3 AutoModel", f"saved qwen3 AutoModelFor{HEADS[0]}", "value_head")
    ),
    "flat tie_word_embeddings=True > torch_dist tp=2 > torch tp=1 pp=2 > hf",
    f"value_head > torch_dist tp=2 > torch tp=1 pp=2 > hf | {CARRIED}",
    "wrapped pretrained_model. > torch_dist > hf == tiny qwen3 | read without pretrained_model.",
    *(
        f"pickled {view} > torch tp=2 > hf == tiny qwen3"
        for view in ("dense", "transposed", "inside")
    ),
    # towers of images, whose tensors are carried
    *(
        f"tower {name} {form} > torch_dist tp=2{test_towers.layers(name)}"
        f" > {test_towers.another(name)} > hf"
        for name, form in test_towers.FORMS
    ),
    "tower qwen2_vl nested > torch_dist tp=2 bare > hf like",
    "tower qwen2_vl nested > torch_dist tp=2 bare > torch like > hf",
    # layers of multi-token prediction that are left out
    *(
        f"tiny deepseek-v3 > {format} no_mtp pp=2 dialect={dialect} > hf == without_mtp"
        for format in ("torch", "torch_dist")
        for dialect in ("gpt", "hybrid")
    ),
    "without_mtp num_nextn_predict_layers=1 > torch_dist no_mtp > hf == without_mtp",
    *(f"tiny deepseek-v3 > {mtp} > hf no_mtp == without_mtp | {LEFT_OUT}" for mtp in MTP),
    *(f"tiny deepseek-v3 > {mtp} > torch_dist no_mtp tp=2 bare > hf == without_mtp" for mtp in MTP),
    # quantised weights, which are dequantised
    *(
        f"blocks {case} > {target} == plain blocks {case} | {DEQUANTISED}"
        for case in ("qwen3", "qwen3-moe", "deepseek-v3")
        for target in (
            "torch transformer_impl=local tp=2 > hf",
            "torch_dist pp=2 > hf",
            "torch_dist dtype=fp32 > hf dtype=bf16",
            "torch_dist dtype=fp16",
            "torch bare > hf like",
        )
    ),
    *(
        f"{source} > {target} == plain {source}"
        for n, source in enumerate((*BLOCKS, *(f"quantised {form}" for form in FORMS)))
        for target in ("hf", f"{('torch_dist', 'torch')[n % 2]} tp=2 pp=2 etp=1 > hf")
    ),
    # the state of an optimizer becomes portable, and keeps its values
    *(
        f"sample {name} > {target} tp=2 pp=1 etp=1 > torch_dist tp=1 pp=2"
        f" > {target} tp=2 pp=1 etp=1"
        for name in SAMPLES
        for target in ("torch_dist", "torch")
    ),
    *(f"sample {name} > hf" for name in SAMPLES),
    *(
        f"sample {name} > repair > torch_dist tp=1 | the master copy"
        for name in SAMPLES
        if name != "fsdp/qwen3-plain"  # which is portable
    ),
    *(f"sample {name} > torch_dist no_optimizer=True > torch tp=1" for name in SAMPLES),
]


def bare(path: Path, flags: set[str]) -> None:
    """Removes what a checkpoint of mckpt has, and one of a trainer has not."""
    if flags & {*BARE}:
        for manifest in path.glob("*/mckpt.json"):
            manifest.unlink()
    if "bare" in flags:
        shutil.rmtree(path / "hf", ignore_errors=True)


def same_files(found: Path, wanted: Path, but: tuple[str, ...]) -> None:
    """Asserts that two checkpoints have the same files. Their manifests name other sources."""
    left, right = tree(found), tree(wanted)
    apart = {name for name in left if left[name] != right.get(name)}
    assert left.keys() == right.keys()
    assert {Path(name).name for name in apart} <= {"mckpt.json", *but}


def sized(sizes: mckpt.Parallel) -> mckpt.Parallel:
    return replace(sizes, etp=sizes.expert_tp)


def same_model(found: Path, wanted: Path, described: bool, equal: bool) -> None:
    """Asserts that two directories of Hugging Face have the same tensors, bit for bit.

    described: the config.json of the first one is made of that of the second; equal: unchanged.
    """
    left, right = lora.tensors(found), lora.tensors(wanted)
    assert left.keys() == right.keys()
    for name, array in right.items():
        assert (left[name].dtype, left[name].shape) == (array.dtype, array.shape), name
        assert left[name].tobytes() == array.tobytes(), name
    if not described:  # sizes that this model does not use may be other ones
        a, b = mckpt.open(found), mckpt.open(wanted)
        unused = set() if any(".mlp." in name for name in b) else {"ffn_size"}
        assert {k: v for k, v in a.dims.items() if k not in unused} == {
            k: v for k, v in b.dims.items() if k not in unused
        }
        return
    configs = [json.loads((path / "config.json").read_text()) for path in (found, wanted)]
    assert configs[0] == configs[1]
    for path in wanted.iterdir() if equal else ():
        if path.suffix == ".json" and not path.name.endswith("index.json"):
            assert (found / path.name).read_bytes() == path.read_bytes(), path.name


def write(leg: Leg, source: mckpt.Checkpoint, out: Path, **run: Any) -> str:
    """Writes a checkpoint of a row, and returns what the plan says of it."""
    if leg.format == "repair":
        manifest = mckpt.repair(source, out, **run)
        return "" if manifest is None else " ".join(manifest["notes"])
    options = {"format": leg.format, "allow_inexact": INEXACT, **leg.options}
    plan = mckpt.plan(source, out, **options)
    plan.run(**run)
    return " ".join([plan.summary(), *plan.facts["notes"]])


@pytest.mark.parametrize("row", TRIPS, ids=str)
@pytest.mark.usefixtures("small_buffers")
def test_a_checkpoint_comes_back(row: str, make: Callable[[str], Path], tmp_path: Path) -> None:
    """Of each checkpoint of a row, all logical tensors and states of the optimizer equal those of
    the source, `check` finds nothing, and the sizes are those asked for. The last directory has the
    files of ENDS. The first checkpoint, written again with other buffers from what came of it, has
    the same bytes.
    """
    trip, _, note = row.partition(" | ")
    trip, _, ends = trip.partition(" == ")
    start, *texts = trip.split(" > ")
    legs, source, end = [leg_of(text) for text in texts], make(start), make(ends or start)
    at, told, without, cast = source, "", False, list[str]()
    # the ranks of these trained with other gradients, so their copies of norms differ
    apart = start.startswith("sample optimizer")
    for number, leg in enumerate(legs):
        without |= "no_mtp" in leg.flags
        like, out = source if "like" in leg.flags else None, tmp_path / str(number)
        opened = mckpt.open(at, no_mtp="no_mtp" in leg.flags, like=like)
        told += write(leg, opened, out, check_replicas=not apart, **SMALL)
        first, written = mckpt.open(source, no_mtp=without), mckpt.open(out)
        cast += [DTYPES[leg.options["dtype"]]] if "dtype" in leg.options else []
        casts = lambda name, to=tuple(cast): () if "score_correction" in name else to  # noqa: E731
        found = diff(first, written, casts=casts) if cast else mckpt.diff(first, written)
        found.replicas = [] if apart else found.replicas
        kept = None if leg.options.get("no_optimizer") else opened.optimizer
        states = 1 + len(kept.states) if kept and written.is_megatron else 1
        assert not found and found.same == states * len(first), (leg, found.json())
        assert mckpt.check(out).verdict == "sound"
        bare(out, leg.flags)
        at = out
        if not written.is_megatron:
            continue
        assert leg.format in (written.format, "repair")
        assert leg.options.get("dialect") in (written.mapping.name, None)
        if written.mapping.name != "hybrid":  # whose stages may cut a layer in two
            sizes = {name: leg.options[name] for name in SIZES & leg.options.keys()}
            assert sized(written.parallel) == sized(opened.parallel.with_(**sizes)), leg
        now = written.optimizer
        assert bool(now) == bool(kept)
        if kept and now:
            assert now.groups == kept.groups and now.form in (kept.form, OPTIMIZER[leg.format])
    assert note in told
    described = "like" in legs[-1].flags or not any(leg.flags & {*BARE} for leg in legs)
    from_hf = not mckpt.open(end).is_megatron
    if from_hf and legs[-1].format == "hf":
        same_model(at, end, described, not ends)
    if from_hf and legs[0].format != "hf" and without == ("no_mtp" in legs[0].flags):
        origin = at if legs[-1].format == "hf" else end
        write(legs[0], mckpt.open(origin), tmp_path / "again", threads=1)
        bare(tmp_path / "again", legs[0].flags)
        # a config.json that is made of args may lack keys of the launch line
        of_args = () if described else ("megatron_args.sh", "megatron_args.json", "config.json")
        same_files(tmp_path / "again", tmp_path / "0", of_args or ("config.json",) * bool(ends))
    back = next((n for n, leg in enumerate(legs) if n and leg[:2] == legs[0][:2]), None)
    if back is not None:
        before, after = (mckpt.open(tmp_path / str(number)) for number in (0, back))
        assert before.dims == after.dims and before.names.choices == after.names.choices
        assert before.args and after.args
        assert not {k: v for k, v in before.args.items() if after.args.get(k) != v}
