"""The stock trainer of the megatron-core wheel reads what mckpt writes, with the launch line that
mckpt writes, and saves what mckpt reads.

Each checkpoint of tests/helpers/tiny.py goes from Hugging Face to Megatron by mckpt, through
megatron.training (tests/helpers/stock.py: its argument parser, model builder, loader, forward pass
and saver), and back to Hugging Face by mckpt. The logits are those of transformers, and the tensors
that come back are those of the source, bit for bit.

    layer spec            sizes                    families    load, save, back    logits
    local                 tp2, pp2 vpp2 / ep2, pp2   all but MLA    yes               yes
    Transformer Engine    tp2 pp2 (ep2 etp1)         all but one    yes               yes

Transformer Engine is the stand-in of tests/helpers/fake_te, which has its names and a forward pass
of its own: the logits say that the flags, the sharding and the model are right, and nothing of the
real kernels. What cannot be judged on CPU:

- The local spec with experts at tp > 1: megatron.training demands sequence parallelism for it,
  which the local norms refuse.
- The local spec with MLA: its attention takes no head widths (`k_channels`), as
  test_the_local_spec_cannot_build_mla shows.
- MLA without q LoRA (deepseek-v3-plain): with Transformer Engine, 0.19 asks for a norm that the
  model does not have, and mckpt refuses to write for it, as test_mla_without_q_lora shows. Its
  launch line is judged.
- Fused kernels: MLA rotates without --apply-rope-fusion here, after its config was checked with it.
- Training.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

import mckpt
from mckpt import mapping
from mckpt.containers.dcp_metadata import read_metadata
from mckpt.formats.megatron import megatron_args
from mckpt.geometry.parallel import Parallel
from mckpt.options import SourceOptions
from tests.helpers import tiny
from tests.helpers.judging import LOGITS_ATOL, ask, failure, record
from tests.judge.test_megatron import EVERYWHERE

absent = (
    importlib.util.find_spec("megatron") is None
    or importlib.util.find_spec("megatron.training") is None
)
pytestmark = [
    pytest.mark.judge,
    pytest.mark.skipif(
        absent,
        reason="megatron.training is not installed: wheels of megatron-core have it from 0.17 on",
    ),
    pytest.mark.filterwarnings("ignore"),  # torch and transformers cause it by their imports
]

TE, LOCAL = "transformer_engine", "local"
FORMATS = ("torch_dist", "torch")
MLA = ("deepseek-v3", "deepseek-v3-plain")
MOE = ("mixtral", "qwen3-moe", "qwen3-moe-raw", *MLA)
NOT_LOADABLE = "deepseek-v3-plain"  # cannot be loaded with Transformer Engine from 0.19 on
# llama-rope-scaled: the stock trainer computes with 8, whatever the value of --rope-scaling-factor
INEXACT = ["rope_factor"]
CONFIGS = sorted((tiny.FIXTURES / "configs").glob("*.json"))


def size_of(case: str, form: str, impl: str) -> dict[str, int]:
    if impl == TE:
        return {"tp": 2, "pp": 2, "ep": 2, "etp": 1} if case in MOE else {"tp": 2, "pp": 2}
    if form == "torch_dist":
        return {"ep": 2, "etp": 1} if case in MOE else {"tp": 2}
    return (
        {"pp": 2, "vpp": 2}
        if case not in MOE and tiny.config(case)["num_hidden_layers"] % 4 == 0
        else {"pp": 2}
    )


CASES = [
    (case, form, impl)
    for impl, left_out in ((LOCAL, MLA), (TE, (NOT_LOADABLE,)))
    for case in tiny.CASES
    if case not in left_out
    for form in FORMATS
    # The names of the other form are compared in tests/judge/test_megatron.py.
    if case in EVERYWHERE or "JUDGED" in os.environ or (impl == TE) == (form == "torch_dist")
]


def named(case: str, form: str, impl: str) -> str:
    return f"{case}-{form}-{'te' if impl == TE else 'local'}"


def launch_line(checkpoint: Path) -> list[str]:
    """Returns the words that bash reads from the megatron_args.sh of a checkpoint, and checks that
    megatron_args.json has the same. NullTokenizer takes the place of the tokenizer in DST/hf, which
    a tiny model has not trained.
    """
    unit = checkpoint / "release"
    script = f'. {unit / megatron_args.SHELL} && printf "%s\\n" "${{MEGATRON_ARGS[@]}}"'
    words = subprocess.run(
        ["bash", "-euc", script], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    words = ["../hf" if word == f"{unit}/../hf" else word for word in words]
    assert words == flat(json.loads((unit / megatron_args.JSON).read_text()))
    if megatron_args.MODEL in words:
        at = words.index(megatron_args.MODEL)
        del words[at : at + 2]
        words[words.index(megatron_args.TYPE) + 1] = "NullTokenizer"
    return words


def flat(flags: dict[str, Any]) -> list[str]:
    return [
        word
        for flag, value in flags.items()
        for word in ([flag] if value is True else [flag, str(value)])
    ]


def convert(work: Path, source: Path, case: str, form: str, impl: str, **more: Any) -> Path:
    """Converts by mckpt, at the sizes of the launch line."""
    out, size = work / named(case, form, impl), Parallel(**size_of(case, form, impl))
    wanted = {"format": form, "parallel": size, "transformer_impl": impl} | more
    mckpt.plan(source, out, allow_inexact=INEXACT, **wanted).run()
    return out


def through_the_trainer(
    source: Path, out: Path, tokens: np.ndarray | None, family: str | None = None, **more: Any
) -> np.ndarray | None:
    """Returns the logits that the stock trainer computes of the checkpoint `out`.

    Fails unless it saves the weights, and mckpt makes of them what `source` has, bit for bit.
    """
    saved, back = Path(f"{out}-saved"), Path(f"{out}-back")
    given = {"flags": launch_line(out), "checkpoint": out, "tokens": tokens, "save": saved}
    result = ask("stock", **given | more)
    known = SourceOptions(family=family)
    opened, written = mckpt.Checkpoint.open(saved, known), mckpt.open(out)
    assert (opened.format, opened.mapping.name) == (written.format, written.mapping.name)
    mckpt.plan(opened, back, format="hf", allow_inexact=INEXACT).run(check_replicas=True)
    found, wanted = (
        {name: array for path in d.glob("*.safetensors") for name, array in load_file(path).items()}
        for d in (back, source)
    )
    assert found.keys() == wanted.keys()
    for name, array in wanted.items():
        assert (found[name].dtype, found[name].shape) == (array.dtype, array.shape), name
        assert found[name].tobytes() == array.tobytes(), name
    # config.json is made from the stock trainer's own args
    assert mckpt.open(back).dims == mckpt.open(source).dims
    return result.get("logits")


def expect_keys(
    source: Path,
    place: Path,
    parallel: Parallel,
    dialect: str = "hybrid",
    dtypes: bool = True,
    objects: bool = True,
) -> dict[str, Path]:
    """Converts to both formats, and fails unless the tensors have the names and shapes of the model
    that the stock trainer builds. Returns the checkpoints by format.

    dtypes: also compare the dtypes of torch_dist. objects: the checkpoint has no objects beside
    those of the model, such as _extra_state.
    """
    import torch

    made = {form: place / form for form in FORMATS}
    for form, out in made.items():
        wanted = {"dialect": dialect, "allow_inexact": INEXACT, "parallel": parallel}
        mckpt.plan(source, out, format=form, **wanted).run()
    world = parallel.tp * parallel.pp  # ep 2, etp 1 takes the ranks of tp 2
    real = ask("stock", te=True, flags=launch_line(made["torch"]), world=world, keys=True)
    stored = read_metadata(made["torch_dist"] / "release" / ".metadata")
    ours = {key: [list(shape), dtype] for key, (dtype, shape, _) in stored.tensors.items()}
    tensors = {k: v for k, v in real["torch_dist"].items() if v[1] != "object"}
    of_shape = slice(None, 2 if dtypes else 1)
    assert {k: v[of_shape] for k, v in ours.items()} == {k: v[of_shape] for k, v in tensors.items()}
    theirs = set(real["torch_dist"]) - set(tensors)
    assert theirs and theirs <= set(stored.objects)
    assert not objects or set(stored.objects) - {"common_state/shard_0_1"} == theirs
    files = made["torch"] / "release"
    assert {path.name for path in files.glob("mp_rank_*")} == set(real["torch"])
    for directory, models in real["torch"].items():
        file = torch.load(files / directory / "model_optim_rng.pt", weights_only=False)
        names = ["model"] if len(models) == 1 else [f"model{i}" for i in range(len(models))]
        assert [name for name in file if name.startswith("model")] == names
        for name, wanted in zip(names, models, strict=True):
            held = {k: None if "_extra" in k else list(v.shape) for k, v in file[name].items()}
            assert held == {k: None if "_extra" in k else shape for k, shape in wanted.items()}
    return made


def published(path: Path) -> megatron_args.Launch:
    """Returns the launch line of a published model for 8 ranks, from its config.json alone."""
    config = json.loads(path.read_text())
    family = mapping.load("hf", mapping.family_with(config["architectures"][0]))
    dims = family.read(config)
    size = Parallel(tp=2, ep=4, etp=1) if dims["num_experts"] else Parallel(tp=2)
    if dims["num_heads"] % 2:
        size = Parallel(pp=2)
    given = {"padded_vocab_size": -(-dims["vocab_size"] // 256) * 256, "tp": size.tp}
    dialect = mapping.load("megatron", "gpt")
    args = dialect.write(dims, given)
    if family.dialect == "hybrid":  # GPTModel lacks these layers; a pattern describes them
        args = {name: args[name] for name in args if not name.startswith("heterogeneous_layers")}
    return megatron_args.launch(dialect, {**args, **size.args()})


@pytest.fixture(scope="module")
def references(work: Path, sources: dict[str, Path]) -> dict[str, np.ndarray]:
    """Returns transformers' logits of each source, computed as the stock trainer will:
    llama-rope-scaled with a factor of 8.
    """
    scaling = {**tiny.config("llama-rope-scaled")["rope_scaling"], "factor": 8.0}
    stock = tiny.tiny_random(
        "llama-rope-scaled", work / "hf" / "factor-8", dtype="float32", rope_scaling=scaling
    )
    used = sources | {"llama-rope-scaled": stock}
    return {
        case: tiny.hf_logits(used[case], tiny.tokens(case))
        for case in tiny.CASES
        if case != NOT_LOADABLE
    }


@pytest.mark.parametrize(("case", "form", "impl"), CASES, ids=[named(*one) for one in CASES])
def test_the_stock_trainer_computes_the_logits_of_transformers_and_saves_the_weights(
    case: str,
    form: str,
    impl: str,
    work: Path,
    sources: dict[str, Path],
    references: dict[str, np.ndarray],
) -> None:
    out, te = convert(work, sources[case], case, form, impl), impl == TE
    ranks = {"te": te, "world": 4 if te else 2}
    logits = through_the_trainer(sources[case], out, tiny.tokens(case), **ranks)
    apart = np.abs(logits - references[case]).max()
    assert apart < LOGITS_ATOL
    sizes = (
        f"{mckpt.Parallel(**size_of(case, form, impl))}"
        f" ({'names of Transformer Engine' if te else 'local'})"
    )
    record("stock trainer", case, form, sizes, apart, np.abs(references[case]).max())
    if case == "llama-rope-scaled":
        # The trainer ignores the factor, so mckpt requires --allow-inexact. With the source's own
        # factor the logits differ.
        own = tiny.hf_logits(sources[case], tiny.tokens(case))
        assert np.abs(own - logits).max() > 100 * LOGITS_ATOL


def test_the_vocabulary_has_the_rows_that_the_stock_trainer_computes(
    work: Path, sources: dict[str, Path], references: dict[str, np.ndarray]
) -> None:
    """The files of `torch` load only if both agree; padding that is kept is in the launch line.

    The embedding had 512 rows at tp 4, where Megatron makes 256 of the 193 at tp 2. These launch
    lines do not state the rows, so that Megatron computes them.
    """
    wide = work / "wide"
    mckpt.plan(sources["qwen3"], wide, format="torch", parallel=Parallel(tp=4)).run()
    for keep in (False, True):
        out, size = work / f"padded-{keep}", Parallel(tp=2, pp=2)
        mckpt.plan(wide, out, format="torch", parallel=size, keep_padding=keep).run()
        flags = launch_line(out)
        at = flags.index("--padded-vocab-size")
        assert flags[at + 1] == ("512" if keep else "256")
        del flags[at : at + 2]
        case = {"te": True, "world": 4, "checkpoint": out, "tokens": tiny.tokens("qwen3")}
        found = ask("stock", flags=flags, **case)["logits"]
        assert np.abs(found - references["qwen3"]).max() < LOGITS_ATOL
    flags += ["--make-vocab-size-divisible-by", "128"]
    assert "size mismatch" in failure("stock", flags=flags, **case)


def test_the_local_spec_cannot_build_mla(work: Path, sources: dict[str, Path]) -> None:
    out = convert(work, sources["deepseek-v3"], "deepseek-v3", "torch_dist", LOCAL)
    error = failure("stock", world=2, flags=launch_line(out), checkpoint=out)
    assert "unexpected keyword argument 'k_channels'" in error


def test_mla_without_q_lora(sources: dict[str, Path], work: Path) -> None:
    """The trainer cannot load it, and mckpt refuses the model for this reason: a checkpoint for
    0.18 lacks the weight that the error names. Its plain rope needs the flag that mckpt writes.
    """
    case, source = NOT_LOADABLE, sources[NOT_LOADABLE]
    with pytest.raises(mckpt.errors.MckptError, match=r"linear_q_proj\.layer_norm_weight"):
        mckpt.plan(source, work / "nowhere")
    out = convert(work, source, case, "torch", TE, megatron_version="0.18")
    flags, te = launch_line(out), {"te": True, "world": 4}
    if version("megatron-core") >= "0.19":
        error = failure("stock", flags=flags, checkpoint=out, **te)
        assert "linear_q_proj.layer_norm_weight" in error
    ask("stock", flags=flags, **te)
    flags.remove("--no-rope-fusion")
    error = failure("stock", flags=flags, **te)
    assert "apply_rope_fusion for MLA only works with YARN RoPE" in error


def test_a_flag_after_the_launch_line_overrides_it(work: Path, sources: dict[str, Path]) -> None:
    mckpt.convert(sources["qwen3"], out := work / "appended", tp=2, pp=2)
    flags = [*launch_line(out), "--seq-length", "64", "--max-position-embeddings", "1024"]
    args = ask("stock", te=True, world=4, flags=flags)["args"]
    assert args["seq_length"] == 64
    assert args["max_position_embeddings"] == 1024


@pytest.mark.parametrize("path", CONFIGS, ids=[path.stem for path in CONFIGS])
def test_the_launch_line_of_a_published_model_is_accepted(path: Path) -> None:
    args = ask("stock", te=True, world=8, flags=flat(published(path).flags))["args"]
    config = json.loads(path.read_text())
    family = mapping.load("hf", mapping.family_with(config["architectures"][0]))
    most = family.read(config)["max_positions"]
    assert (args["seq_length"], args["max_position_embeddings"]) == (min(most, 4096), most)
