"""Each edit of each kind of model: it is refused by name, or transformers loads all of the result
(tests/judge/test_edit_matrix.py has its elements).
"""

from __future__ import annotations

import json
import re
import shutil
from functools import reduce
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from safetensors.numpy import load_file

import mckpt
from mckpt.errors import MappingError, SourceError, UsageError
from tests.formats.test_edit import same, with_layers
from tests.helpers import made_models, tiny
from tests.helpers.tiny import TinyModel

# dense, tied, experts, latent attention and multi-token prediction, a hybrid, gated delta nets
CASES = ("llama", "qwen3-tied", "qwen3-moe", "deepseek-v3", "nemotron_h", "qwen3_next")
# name -> the recipe, and whether the logits stay the same
EDITS = {
    "drop": ("- layers: {drop: 1}", False),
    "order": ("- layers: {order: [0, 2, 1, 2, 3]}", False),
    "silent": ("- layers: {silent_after: [1, 3]}", True),
    "untie": ("- untie", True),
    "repeat": ("- kv_heads: {times: 2}", True),
    "rows": ("- vocab: {size: 700, init: normal}", False),
    "mtp": ("- mtp: {add: 1}", True),
}
# (edit, case) -> the words of the refusal
REFUSED = {
    **{("untie", case): "has an output layer of its own" for case in CASES if "tied" not in case},
    ("repeat", "deepseek-v3"): "an attention without such heads in each layer",
    ("repeat", "qwen3_next"): "an attention without such heads in each layer",
    ("mtp", "nemotron_h"): "the last layer of the model is `attn`",
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("edit", EDITS)
def test_an_edit_of_a_kind_of_model(
    edit: str, case: str, tiny_model: TinyModel, tmp_path: Path
) -> None:
    source, (text, exact) = tiny_model(case, "float32"), EDITS[edit]
    recipe, out = tmp_path / "recipe.yaml", tmp_path / "out"
    recipe.write_text(text)
    if (edit, case) in REFUSED:
        with pytest.raises(UsageError, match=REFUSED[edit, case]):
            mckpt.edit(source, out, recipe)
        assert not out.exists()
        return
    mckpt.edit(source, out, recipe)
    tokens = made_models.tokens(case)
    logits = tiny.hf_logits(out, tokens)
    assert np.isfinite(logits).all()
    if exact:
        wanted = tiny.hf_logits(source, tokens)
        apart = np.abs(logits[..., : wanted.shape[-1]] - wanted).max()
        assert apart < 2e-5 * np.abs(wanted).max()


@pytest.mark.parametrize("case", ["gemma4_moe", "gemma3", "gpt_oss", "falcon_h1", "mimo_v2_flash"])
def test_silent_layers_keep_the_logits(case: str, tiny_model: TinyModel, tmp_path: Path) -> None:
    """Gemma 4 multiplies the residual stream by a number in each layer."""
    source, tokens = tiny_model(case, "float32"), made_models.tokens(case)
    mckpt.edit(source, tmp_path / "out", ["layers: {silent_after: [0, 1, 2]}"])
    wanted = tiny.hf_logits(source, tokens)
    apart = np.abs(tiny.hf_logits(tmp_path / "out", tokens) - wanted).max()
    assert apart < 2e-5 * np.abs(wanted).max()
    mckpt.convert(source, tmp_path / "start", format="torch_dist")
    mckpt.edit(
        tmp_path / "start", tmp_path / "dist", ["layers: {silent_after: [0, 1, 2]}"], format="hf"
    )
    assert not mckpt.diff(tmp_path / "out", tmp_path / "dist")


@pytest.mark.parametrize(
    "case",
    [
        *("gpt_oss", "cwm", "smollm3", "mimo_v2_flash", "llava_onevision1_5"),
        "exaone4",
    ],
)
def test_args_and_configs_follow_the_layers(
    case: str, tiny_model: TinyModel, tmp_path: Path
) -> None:
    import torch

    source, start, order = tiny_model(case, "float32"), tmp_path / "start", [3, 0, 1, 1, 2]
    mckpt.convert(source, start, format="torch_dist")
    if case == "gpt_oss":  # as --window-attn-skip-freq 2 gives it
        path = start / "release" / "common.pt"
        common = torch.load(path, weights_only=False)
        assert common["args"].window_attn_skip_freq == [1, 0, 1, 0]
        common["args"].window_attn_skip_freq = 2
        torch.save(common, path)
    recipe = [f"layers: {{order: {order}}}"]
    mckpt.edit(source, tmp_path / "hf", recipe)
    mckpt.edit(start, tmp_path / "out", recipe)
    before = mckpt.open(source).dims
    for name in ("hf", "out"):
        after = mckpt.open(tmp_path / name).dims
        for settings in ("window_layers", "rope_layers"):
            assert [*after[settings]] == [before[settings][n] for n in order]
    mckpt.convert(tmp_path / "out", tmp_path / "back", format="hf")
    assert not mckpt.diff(tmp_path / "hf", tmp_path / "back")
    assert np.isfinite(tiny.hf_logits(tmp_path / "back", made_models.tokens(case))).all()


@pytest.mark.parametrize("case", ["minimax_m3", "minimax_m3_sparse"])
def test_lists_of_a_config_that_no_dim_has_follow_the_layers(
    case: str, tiny_model: TinyModel, tmp_path: Path
) -> None:
    source = tiny_model(case, "float32")
    mckpt.edit(source, tmp_path / "out", ["layers: {order: [3, 0, 2]}"])
    old, new = (made_models.text(read_json(path)) for path in (source, tmp_path / "out"))
    sparse = "sparse_attention_config"
    for place in ((sparse, "sparse_attention_freq"), (sparse, "sparse_disable_index_value")):
        before, after = (reduce(dict.__getitem__, place, one) for one in (old, new))
        assert after == [before[number] for number in (3, 0, 2)] == [1, 0, 1]
    before, after = (mckpt.open(path).dims["attn_blocks"] for path in (source, tmp_path / "out"))
    assert list(after) == [before[number] for number in (3, 0, 2)]
    # the weights of indexers too, which are carried
    tensors, start = load_file(source / "model.safetensors"), "language_model.model.layers."
    towers = {name: tensor for name, tensor in tensors.items() if not name.startswith(start)}
    same(tmp_path / "out", towers | _reordered(tensors, start, (3, 0, 2)))
    assert np.isfinite(tiny.hf_logits(tmp_path / "out", made_models.tokens(case))).all()


def _reordered(
    tensors: dict[str, np.ndarray], start: str, order: tuple[int, ...]
) -> dict[str, np.ndarray]:
    """Returns the tensors of some layers under their new numbers."""
    return {
        f"{start}{new}.{name.removeprefix(f'{start}{old}.')}": tensor
        for new, old in enumerate(order)
        for name, tensor in tensors.items()
        if name.startswith(f"{start}{old}.")
    }


def read_json(directory: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((directory / "config.json").read_text())
    return found


def test_what_a_config_computes_of_several_dims_follows(
    tiny_model: TinyModel, tmp_path: Path
) -> None:
    source, start = tiny_model("llama_nemotron", "float32"), tmp_path / "start"
    mckpt.convert(source, start, format="torch_dist")
    of_model = [b["attention"]["n_heads_in_group"] for b in blocks(source)]
    for path, name in ((source, "out"), (start, "out/hf")):
        mckpt.edit(path, tmp_path / "out", ["kv_heads: {times: 2}"])
        groups = [b["attention"]["n_heads_in_group"] for b in blocks(tmp_path / name)]
        assert groups == [n and n // 2 for n in of_model]
        assert mckpt.open(tmp_path / "out").dims["num_query_groups"] == 8
        shutil.rmtree(tmp_path / "out")


def blocks(directory: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = read_json(directory)["block_configs"]
    return found


@pytest.mark.parametrize("case", ["llama_nemotron", "mimo_v2_flash", "gemma4"])
def test_layers_of_several_shapes(case: str, tiny_model: TinyModel, tmp_path: Path) -> None:
    source = tiny_model(case, "float32")
    before, dims = load_file(source / "model.safetensors"), mckpt.open(source).dims
    mckpt.edit(source, tmp_path / "heads", ["kv_heads: {times: 2}"])
    wanted = dict(before)
    for name, tensor in before.items():
        if found := re.search(r"\.layers\.(\d+)\.self_attn\.([kv])_proj\.weight$", name):
            widths = dims["head_dims" if found[2] == "k" else "v_head_dims"]
            heads = np.split(tensor, len(tensor) // widths[int(found[1])])
            wanted[name] = np.concatenate([head for head in heads for _ in range(2)])
    same(tmp_path / "heads", wanted)
    silent = [f"layers: {{silent_after: 0-{dims['num_layers'] - 1}}}"]
    mckpt.edit(source, tmp_path / "silent", silent)
    order = [(n, quiet) for n in range(dims["num_layers"]) for quiet in (False, True)]
    decoder = {name: t for name, t in before.items() if "mtp" not in name}
    written = load_file(tmp_path / "silent" / "model.safetensors")
    for name, tensor in with_layers(decoder, order, dims["num_layers"]).items():
        assert written[name].tobytes() == tensor.tobytes(), name
    if case == "llama_nemotron":  # the widths are 512, 256, any and 256
        mckpt.edit(source, tmp_path / "one", ["layers: {drop: [1, 3]}"])
        same(tmp_path / "one", with_layers(before, [(0, False), (2, False)], 4))
        mckpt.convert(source, tmp_path / "start", format="torch_dist")
        for path in (source, tmp_path / "start"):
            mckpt.edit(path, tmp_path / "less", ["layers: {drop: 0}"], format="torch_dist")
            mckpt.convert(tmp_path / "less", tmp_path / "back", format="hf")
            rest = [(layer, False) for layer in (1, 2, 3)]
            same(tmp_path / "back", with_layers(before, rest, 4))
            assert mckpt.open(tmp_path / "back").dims["ffn_size"] == 256
            shutil.rmtree(tmp_path / "less")
            shutil.rmtree(tmp_path / "back")


def test_layers_come_from_models_with_other_sets_of_shapes(
    tiny_model: TinyModel, tmp_path: Path
) -> None:
    """The mlps of `some` have one width, and those of the whole model have two."""
    whole, some = tiny_model("llama_nemotron", "float32"), tmp_path / "some"
    tensors, config = load_file(whole / "model.safetensors"), (whole / "config.json").read_text()
    shutil.copytree(whole, some)
    text = json.loads(config)
    few = {"block_configs": [blocks(whole)[n] for n in (0, 2)], "num_hidden_layers": 2}
    tiny.write_json(some / "config.json", text | few)
    others = with_layers({n: -t for n, t in tensors.items()}, [(0, False), (2, False)], 4)
    tiny.write_weights(some, others)
    mckpt.edit(whole, tmp_path / "grafted", [f"graft: {{from: {some}, take: layers.0}}"])
    first = {name: t for name, t in others.items() if ".layers.0." in name}
    same(tmp_path / "grafted", tensors | first)
    mckpt.edit(some, tmp_path / "into", [f"graft: {{from: {whole}, take: layers.0}}"])
    first = {name: t for name, t in tensors.items() if ".layers.0." in name}
    same(tmp_path / "into", others | first)
    for number, order in enumerate(
        ([(whole, 0), (whole, 2)], [(some, 0), (whole, 1)], [(whole, 3), (some, 0), (some, 1)])
    ):
        slices = [
            {"sources": [{"model": str(model), "layer_range": [n, n + 1]}]} for model, n in order
        ]
        recipe, out = tmp_path / "merge.json", tmp_path / f"{number}"
        tiny.write_json(recipe, {"merge_method": "passthrough", "slices": slices})
        mckpt.merge([], out, recipe=recipe)
        of = {whole: tensors, some: others}
        wanted = {name: t for name, t in of[order[0][0]].items() if "embed" in name}
        last = of[order[-1][0]]
        wanted |= {
            name: t for name, t in last.items() if name in ("lm_head.weight", "model.norm.weight")
        }
        for new, (model, old) in enumerate(order):
            start = f"model.layers.{old}."
            wanted |= {
                f"model.layers.{new}.{name.removeprefix(start)}": t
                for name, t in of[model].items()
                if name.startswith(start)
            }
        same(out, wanted)


def test_layers_come_from_models_with_other_widest_mlps(
    tiny_model: TinyModel, tmp_path: Path
) -> None:
    """The widest mlps have 512 units in `wide` and 256 in `narrow`, in Megatron's rows of padding
    too.
    """
    wide, narrow = tiny_model("llama_nemotron", "float32"), tmp_path / "narrow"
    tensors = load_file(wide / "model.safetensors")
    mckpt.edit(wide, narrow, ["layers: {keep: [1, 3]}"])
    others = {n: -t for n, t in load_file(narrow / "model.safetensors").items()}
    tiny.write_weights(narrow, others)
    (narrow / "mckpt.json").unlink()
    runs = {path: tmp_path / f"{path.name}-run" for path in (wide, narrow)}
    for path, run in runs.items():
        mckpt.convert(path, run, format="torch_dist", tp=2)
    of = {wide: tensors, narrow: others}
    for number, order in enumerate(
        ([(narrow, 1), (wide, 2)], [(wide, 0), (narrow, 1)], [(wide, 3), (narrow, 0)])
    ):
        wanted = {n: t for n, t in of[order[0][0]].items() if "embed" in n}
        wanted |= {n: of[order[-1][0]][n] for n in ("lm_head.weight", "model.norm.weight")}
        for new, (model, old) in enumerate(order):
            layer = {n: t for n, t in of[model].items() if f".layers.{old}." in n}
            wanted |= {n.replace(f".{old}.", f".{new}.", 1): t for n, t in layer.items()}
        for form, paths in (("hf", {path: path for path in of}), ("torch_dist", runs)):
            slices = [
                {"sources": [{"model": str(paths[model]), "layer_range": [n, n + 1]}]}
                for model, n in order
            ]
            recipe, out = tmp_path / "merge.json", tmp_path / f"{number}-{form}"
            tiny.write_json(recipe, {"merge_method": "passthrough", "slices": slices})
            mckpt.merge([], out, recipe=recipe)
            if form != "hf":
                mckpt.convert(out, tmp_path / f"{number}-back", format="hf")
                out = tmp_path / f"{number}-back"
            same(out, wanted)
    mckpt.edit(
        wide,
        tmp_path / "into",
        ["layers: {keep: [1, 3]}", f"graft: {{from: {narrow}, take: layers.1}}"],
    )
    wanted = with_layers(tensors, [(1, False), (3, False)], 4)
    same(tmp_path / "into", wanted | {n: t for n, t in others.items() if ".layers.1." in n})


def test_dropped_layers_of_multi_token_prediction_were_the_only_ones_of_a_shape(
    tiny_model: TinyModel, tmp_path: Path
) -> None:
    source = tiny_model("mimo_v2_flash", "float32")
    steps = ["layers: {keep: [0, 3]}", "mtp: {drop: true}"]
    mckpt.edit(source, tmp_path / "out", steps, format="torch_dist")
    tensors, found = load_file(source / "model.safetensors"), mckpt.open(tmp_path / "out")
    for new, old in enumerate((0, 3)):
        for part in "kvo":
            wanted = tensors[f"model.layers.{old}.self_attn.{part}_proj.weight"]
            assert (found[f"layers.{new}.attn.{part}.weight"].numpy() == wanted).all()


def test_a_checkpoint_of_megatron_bridge_describes_its_edited_model(
    tiny_model: TinyModel, tmp_path: Path
) -> None:
    """Its run_config.yaml alone has the dims, as those of layers of multi-token prediction."""
    source, start = tiny_model("mimo_v2_flash", "float32"), tmp_path / "start"
    tensors = load_file(source / "model.safetensors")
    mckpt.convert(source, start, format="torch_dist")
    mckpt.edit(start, tmp_path / "out", ["mtp: {drop: true}"])
    (path,) = (tmp_path / "out").rglob("run_config.yaml")
    assert yaml.safe_load(path.read_text())["model"]["mtp_num_layers"] is None
    mckpt.convert(tmp_path / "out", tmp_path / "back", format="hf")
    same(tmp_path / "back", {name: t for name, t in tensors.items() if "mtp" not in name})
    mckpt.edit(start, tmp_path / "few", ["layers: {keep: [0, 3]}"])  # with no window
    assert mckpt.open(tmp_path / "few").dims["query_groups"] == [2, 2, 4, 4]
    with pytest.raises(
        UsageError, match=r"query_groups is \[2, 4, 4, 2, 4, 4, 2\], and it would be"
    ):
        mckpt.edit(start, tmp_path / "more", ["mtp: {add: 1}"])
    assert not (tmp_path / "more").exists()


def of_both_formats(source: Path, keep: list[int], folder: Path) -> tuple[Path, Path, list[str]]:
    """Returns a model, the same for Megatron, and the edit that keeps some layers."""
    mckpt.convert(source, folder / "start", format="torch_dist")
    return source, folder / "start", [f"layers: {{keep: {keep}}}"]


@pytest.mark.parametrize(
    ("case", "keep"), [("llama_nemotron", [0]), ("llama_nemotron", [3]), ("deepseek-v3", [1, 3])]
)
def test_layers_that_are_alike_are_those_of_a_plain_model(
    case: str, keep: list[int], tiny_model: TinyModel, tmp_path: Path
) -> None:
    """Megatron has one key for all layers then, and its args describe one kind of layer."""
    source, start, steps = of_both_formats(tiny_model(case, "float32"), keep, tmp_path)
    mckpt.edit(source, tmp_path / "hf", steps)
    mckpt.convert(tmp_path / "hf", tmp_path / "new", format="torch_dist")
    mckpt.edit(start, tmp_path / "out", steps)
    wanted, found = mckpt.open(tmp_path / "new"), mckpt.open(tmp_path / "out")
    assert set(found.opened.keys()) == set(wanted.opened.keys())
    args = [{n: v for n, v in (one.args or {}).items() if v is not None} for one in (wanted, found)]
    assert args[0] == args[1]
    mckpt.convert(tmp_path / "out", tmp_path / "back", format="hf")
    same(tmp_path / "back", load_file(tmp_path / "hf" / "model.safetensors"))


@pytest.mark.parametrize("keep", [[1, 2], [0, 3], [1]])
def test_attentions_of_one_kind_are_left(
    keep: list[int], tiny_model: TinyModel, tmp_path: Path
) -> None:
    """Layers 1 and 2 have windows, and twice as many heads of keys and values."""
    source = tiny_model("mimo_v2_flash", "float32")
    tensors = load_file(source / "model.safetensors")
    wanted = with_layers(
        {n: t for n, t in tensors.items() if "mtp" not in n}, [(n, False) for n in keep], 4
    )
    mckpt.convert(source, tmp_path / "start", format="torch_dist")
    steps = [f"layers: {{keep: {keep}}}", "mtp: {drop: true}"]
    for name, path in (("one", source), ("other", tmp_path / "start")):
        mckpt.edit(path, tmp_path / name, steps, format="hf")
        same(tmp_path / name, wanted)
        assert np.isfinite(
            tiny.hf_logits(tmp_path / name, made_models.tokens("mimo_v2_flash"))
        ).all()
    if keep != [0, 3]:
        with pytest.raises(MappingError, match="Megatron-Bridge has one key for all layers then"):
            mckpt.edit(source, tmp_path / "dist", steps, format="torch_dist")


@pytest.mark.parametrize(
    ("case", "keep"), [("nemotron_h", [4, 6, 7]), ("bamba", [1, 3]), ("qwen3_next", [1, 3])]
)
def test_the_layers_that_are_left_are_attentions_and_mlps(
    case: str, keep: list[int], tiny_model: TinyModel, tmp_path: Path
) -> None:
    """The model has no sizes of Mamba-2 layers and gated delta nets any more."""
    source, start, steps = of_both_formats(tiny_model(case, "float32"), keep, tmp_path)
    tensors = mckpt.open(source)
    places = {f"layers.{old}.": f"layers.{new}." for new, old in enumerate(keep)}
    for number, (path, form) in enumerate(
        (path, form) for path in (source, start) for form in ("hf", "torch_dist")
    ):
        out = tmp_path / f"{number}"
        mckpt.edit(path, out, steps, format=form)
        found = mckpt.open(out)
        assert found.dims["mamba_heads"] == found.dims["linear_key_heads"] == 0
        for name, tensor in tensors.items():
            first = re.match(r"layers\.\d+\.", name)
            if first is None or first[0] in places:
                new = name if first is None else places[first[0]] + name[first.end() :]
                assert (found[new].numpy() == tensor.numpy()).all(), name
        if form != "hf":
            mckpt.convert(out, tmp_path / "back", format="hf", overwrite=True)
            out = tmp_path / "back"
        assert np.isfinite(tiny.hf_logits(out, made_models.tokens(case))).all()


@pytest.mark.parametrize(
    "case", ["gemma4_moe", "nemotron_h", "nemotron_h_moe", "gemma3", "gpt_oss"]
)
def test_the_config_of_transformers_itself_follows(
    case: str, tiny_model: TinyModel, tmp_path: Path
) -> None:
    """It states the layers in more keys than published files have."""
    plain, source = tiny_model(case, "float32"), tmp_path / "source"
    config = read_json(plain)
    tiny.class_of(config).config_class.from_dict(config).save_pretrained(source)
    tiny.write_json(
        source / "config.json", {**read_json(source), "architectures": config["architectures"]}
    )
    shutil.copy(plain / "model.safetensors", source)
    tokens = made_models.tokens(case)
    for number, step in enumerate(
        (
            "layers: {order: [0, 2, 1, 1, 2]}",
            "layers: {silent_after: [0, 1, 2]}",
            "kv_heads: {times: 2}",
        )
    ):
        out = tmp_path / f"{number}"
        mckpt.edit(source, out, [step])
        mckpt.edit(plain, tmp_path / f"plain{number}", [step])
        logits = tiny.hf_logits(out, tokens)
        assert (logits == tiny.hf_logits(tmp_path / f"plain{number}", tokens)).all()


@pytest.mark.parametrize(
    ("case", "step", "name"),
    [
        ("llama", "heads: 0-2", "num_heads"),
        ("llama", "hidden: 0-62", "num_heads"),
        ("gpt_bigcode_heads", "heads: 0-6", "num_heads"),
        ("helium", "heads: 0", "head_dim"),
        ("olmoe", "heads: 0-6", "head_dim"),
        ("bamba", "hidden: 0-89", "mamba_heads"),
    ],
)
def test_sizes_that_the_class_of_transformers_cannot_have_are_refused(
    case: str, step: str, name: str, tiny_model: TinyModel, tmp_path: Path
) -> None:
    """transformers loads no such config, or its tensors have other shapes."""
    source = tiny_model(case, "float32")
    with pytest.raises(MappingError, match=f"  - {name}: "):
        mckpt.edit(source, tmp_path / "out", [f"prune: {{{step}}}"])
    mckpt.edit(source, tmp_path / "out", [f"prune: {{{step}}}"], allow_inexact=[name])
    with pytest.raises(Exception, match=r"multiple of|divi|mismatched"):
        tiny.load(tmp_path / "out")


def test_a_hybrid_needs_no_experts_and_llama_nemotron_both_parts(
    tiny_model: TinyModel, tmp_path: Path
) -> None:
    source = tiny_model("nemotron_h_moe", "float32")
    assert mckpt.open(source).dims["layer_parts"][1::3] == ["mamba", "mlp"]
    together = "layer 0 would be `mamba`, and layer 1 `mlp`, which are one layer in a hybrid"
    with pytest.raises(UsageError, match=together):
        mckpt.edit(source, tmp_path / "together", ["layers: {keep: [1, 4]}"])
    _, start, steps = of_both_formats(source, [4, 1], tmp_path)
    steps = ["layers: {order: [4, 1]}"]
    for path in (source, start):
        mckpt.edit(path, tmp_path / "hf", steps, format="hf", overwrite=True)
        assert mckpt.open(tmp_path / "hf").dims["num_experts"] == 0
        assert np.isfinite(
            tiny.hf_logits(tmp_path / "hf", made_models.tokens("nemotron_h_moe"))
        ).all()
    mckpt.edit(source, tmp_path / "dist", steps, format="torch_dist")
    assert not mckpt.diff(tmp_path / "hf", tmp_path / "dist")
    source = tiny_model("llama_nemotron", "float32")
    for layer, kind in ((1, "mlp"), (2, "attn")):
        assert mckpt.open(source).dims["layer_parts"][layer] == kind
        steps = [f"layers: {{keep: {layer}}}"]
        with pytest.raises(MappingError, match="no layer has an attention, or none has an mlp"):
            mckpt.edit(source, tmp_path / kind, steps)
        mckpt.edit(source, tmp_path / kind, steps, format="torch_dist")
        assert mckpt.open(tmp_path / kind).dims["layer_parts"] == [kind]


def test_layers_with_a_temperature_are_left_out(tiny_model: TinyModel, tmp_path: Path) -> None:
    """Those that are not rotated have one."""
    mckpt.edit(tiny_model("llama4_scout", "float32"), tmp_path / "out", ["layers: {drop: 1}"])
    logits = tiny.hf_logits(tmp_path / "out", made_models.tokens("llama4_scout"))
    assert np.isfinite(logits).all()
    assert mckpt.open(tmp_path / "out").dims["attn_temperature"] == 0


def test_a_model_of_no_family_names_the_nearest_one(tiny_model: TinyModel, tmp_path: Path) -> None:
    mckpt.edit(
        tiny_model("qwen3_next", "float32"),
        tmp_path / "out",
        ["mtp: {add: 2}"],
        format="torch_dist",
    )
    shutil.rmtree(tmp_path / "out" / "hf", ignore_errors=True)
    with pytest.raises(MappingError, match=r"describe:\n  - qwen3_next: it is for models where"):
        mckpt.convert(tmp_path / "out", tmp_path / "hf", format="hf")


def test_dropped_layers_of_multi_token_prediction_may_have_another_embedding(
    tiny_model: TinyModel, tmp_path: Path
) -> None:
    source, copy = tmp_path / "source", "model.layers.4.embed_tokens.weight"
    shutil.copytree(tiny_model("deepseek-v3", "float32"), source)
    tensors = load_file(source / "model.safetensors")
    tiny.write_weights(source, tensors | {copy: tensors[copy] + 1})
    decoder = {n: t for n, t in tensors.items() if ".layers.4." not in n}
    mckpt.edit(source, tmp_path / "out", ["mtp: {drop: true}"])
    same(tmp_path / "out", decoder)
    with pytest.raises(SourceError, match="holds different copies of one tensor"):
        mckpt.edit(source, tmp_path / "kept", ["layers: {keep: 0-2}"])


@pytest.mark.parametrize(
    ("step", "order"),
    [
        ("{drop: 1}", [0, 2, 3]),
        ("{order: [0, 1, 1, 2, 3]}", [0, 1, 1, 2, 3]),
        ("{keep: 0}", [0]),
        ("{keep: [0, 2]}", [0, 2]),
        ("{silent_after: 1}", [0, 1, 1, 2, 3]),
    ],
)
def test_the_period_of_indexers_follows_the_layers(
    step: str, order: list[int], tiny_model: TinyModel, tmp_path: Path
) -> None:
    """Layers 0 and 2 of 4 have an indexer; the others take the keys of the layer before."""
    source, case = tiny_model("glm_moe_dsa", "float32"), "glm_moe_dsa"
    mckpt.edit(source, tmp_path / "out", [f"layers: {step}"])
    tensors, found = mckpt.open(source), mckpt.open(tmp_path / "out")
    wanted = {name: tensors[name] for name in tensors if not name.startswith("layers.")}
    for new, old in enumerate(order):
        start = f"layers.{old}."
        layer = (name for name in tensors if name.startswith(start))
        wanted |= {f"layers.{new}.{n.removeprefix(start)}": tensors[n] for n in layer}
    assert set(found) == set(wanted)
    if "silent" not in step:
        assert all((found[n].numpy() == t.numpy()).all() for n, t in wanted.items())
    logits = tiny.hf_logits(tmp_path / "out", made_models.tokens(case))
    assert np.isfinite(logits).all()
    if "silent" in step:
        assert (logits == tiny.hf_logits(source, made_models.tokens(case))).all()


@pytest.mark.parametrize(
    ("step", "words"),
    [
        ("layers: {drop: 0}", "would have indexers in the layers 1 of 3"),
        ("layers: {silent_after: 0}", "the next layer takes the keys that layer 0 chose"),
        ("mtp: {add: 1}", "would have indexers in the layers 0, 2 of 5"),
    ],
)
def test_indexers_that_no_period_describes_are_refused(
    step: str, words: str, tiny_model: TinyModel, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=words):
        mckpt.edit(tiny_model("glm_moe_dsa", "float32"), tmp_path / "out", [step])
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("case", ["nemotron_h", "qwen3_next"])
def test_args_of_a_hybrid_count_the_parts_of_its_layers(
    case: str, tiny_model: TinyModel, tmp_path: Path
) -> None:
    """Megatron counts an attention or a Mamba-2, and an mlp, as a layer each."""
    source, start = tiny_model(case, "float32"), tmp_path / "start"
    mckpt.convert(source, start, format="torch_dist")
    for path in (source, start):
        mckpt.edit(path, tmp_path / "out", ["layers: {keep: [1, 2]}"], format="torch_dist", tp=2)
        args = mckpt.open(tmp_path / "out").args or {}
        parts = mckpt.open(tmp_path / "out").dims["layer_parts"]
        assert args["num_layers"] == sum(len(one.split()) for one in parts)
        assert len(args["hybrid_layer_pattern"].replace("|", "")) == args["num_layers"]
        shutil.rmtree(tmp_path / "out")


def test_a_run_config_has_layers_that_its_config_json_lacks(
    tiny_model: TinyModel, tmp_path: Path
) -> None:
    """No config.json of Gemma 2 has layers of multi-token prediction."""
    source = tiny_model("gemma2", "float32")
    mckpt.edit(source, tmp_path / "out", ["mtp: {add: 1}"], format="torch_dist")
    found, tensors = mckpt.open(tmp_path / "out"), mckpt.open(source)
    assert found.dims["mtp_layers"] == 1
    assert all((found[n].numpy() == tensors[n].numpy()).all() for n in tensors)
    last = f"layers.{tensors.dims['num_layers'] - 1}."
    for name in tensors:
        if name.startswith(last):
            new = f"layers.{tensors.dims['num_layers']}.{name.removeprefix(last)}"
            assert (found[new].numpy() == tensors[name].numpy()).all()
