"""Edits of checkpoints: each element beside numpy, and the logits beside those of transformers."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

import mckpt
from mckpt.errors import UsageError
from tests.helpers import made_models, tiny
from tests.helpers.commands import good, refused

Tensors = dict[str, np.ndarray]
LAYER = re.compile(r"((?:model|backbone)\.layers\.)(\d+)(\..*)")
OUTPUTS = re.compile(r".*(o_proj|down_proj|out_proj|c_proj)(\.weight|\.bias|)")


def with_layers(source: Tensors, order: list[tuple[int, bool]], count: int) -> Tensors:
    """Returns the tensors with these layers: the number of the old one, and whether it is silent.
    Layers behind the decoder's are of multi-token prediction.
    """
    out: Tensors = {}
    for name, tensor in source.items():
        found = LAYER.fullmatch(name)
        if found is None:
            out[name] = tensor
            continue
        start, number, rest = found[1], int(found[2]), found[3]
        if number >= count:
            out[f"{start}{number - count + len(order)}{rest}"] = tensor
        for new, (old, silent) in enumerate(order):
            if old == number:
                zero = silent and OUTPUTS.fullmatch(rest)
                one = silent and rest == ".layer_scalar"
                values = np.zeros_like(tensor) if zero else np.ones_like(tensor) if one else tensor
                out[f"{start}{new}{rest}"] = values
    return out


def with_heads(source: Tensors, times: int, width: int) -> Tensors:
    """Returns the tensors with each head of keys and values several times."""
    out = dict(source)
    for name, tensor in source.items():
        if re.search(r"self_attn\.[kv]_proj\.(weight|bias)$", name):
            heads = tensor.reshape(-1, width, *tensor.shape[1:])
            out[name] = np.repeat(heads, times, axis=0).reshape(-1, *tensor.shape[1:])
    return out


def with_rows(source: Tensors, size: int, row: Callable[[np.ndarray], np.ndarray]) -> Tensors:
    """Returns the tensors with `size` rows of the vocabulary; row: makes a new one."""
    out = dict(source)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        if name in out:
            new = [row(out[name].astype("f8")).astype("f4").astype(out[name].dtype)]
            out[name] = np.concatenate([out[name], *[[r] for r in new * size]])[:size]
    return out


def made(case: str, directory: Path) -> Path:
    """Returns a tiny model in bfloat16, whose weights an offset of a norm does not round."""
    if case in tiny.CASES:
        return tiny.tiny_random(case, directory / case, "bfloat16")
    made_models.make([case], directory)
    return directory / case


def written(recipe: str, directory: Path) -> Path:
    path = directory / "recipe.yaml"
    path.write_text(recipe)
    return path


def same(found: Path, expected: Tensors) -> None:
    stored: Tensors = {}
    for file in found.glob("*.safetensors"):
        stored |= load_file(file)
    assert stored.keys() == expected.keys(), sorted(stored.keys() ^ expected.keys())[:4]
    for name, tensor in expected.items():
        assert stored[name].tobytes() == np.ascontiguousarray(tensor).tobytes(), name


@pytest.mark.parametrize("case", ["qwen3-tied", "qwen2", "qwen3-moe"])
def test_heads_rows_and_the_output_layer(case: str, tmp_path: Path) -> None:
    source = made(case, tmp_path)
    tensors, dims = load_file(source / "model.safetensors"), mckpt.open(source).dims
    dist = tmp_path / "dist"
    mckpt.convert(source, dist, format="torch", tp=2, pp=2)
    size = dims["vocab_size"]
    cases: dict[str, Callable[[Tensors], Tensors]] = {
        "- kv_heads: {times: 2}": lambda t: with_heads(t, 2, dims["head_dim"]),
        f"- vocab: {{size: {size + 40}}}": lambda t: with_rows(t, size + 40, lambda e: e.mean(0)),
        f"- vocab: {{size: {size + 9}, init: 5}}": lambda t: with_rows(t, size + 9, lambda e: e[5]),
        f"- vocab: {{size: {size + 1}, init: zero}}": lambda t: with_rows(
            t, size + 1, lambda e: np.zeros_like(e[0])
        ),
        f"- vocab: {{size: {size - 30}}}": lambda t: with_rows(t, size - 30, lambda e: e[0]),
    }
    if dims["tied"]:
        cases["- untie"] = lambda t: {**t, "lm_head.weight": t["model.embed_tokens.weight"]}
    for number, (text, expected) in enumerate(cases.items()):
        recipe = written(text + "\n", tmp_path)
        out, megatron = tmp_path / f"hf{number}", tmp_path / f"megatron{number}"
        good("edit", source, out, "--recipe", recipe)
        same(out, expected(tensors))
        good("edit", dist, megatron, "--recipe", recipe, "--tp", 4, "--pp", 1)
        assert not mckpt.diff(out, megatron), text


def test_exact_edits_keep_the_logits_of_transformers(tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    source = made("qwen3-tied", tmp_path)
    edits = "- layers: {silent_after: [0, 3]}\n- untie\n- kv_heads: {times: 2}\n"
    out = tmp_path / "out"
    said = good("edit", source, out, "--recipe", written(edits, tmp_path))
    assert said.err.count("edited, exact") == 3
    tokens = torch.arange(40)[None] % 190
    with torch.no_grad():
        before, after = (
            AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)(tokens).logits
            for path in (source, out)
        )
    assert before.equal(after)  # to the last bit


def test_several_edits_follow_each_other_and_continue(tmp_path: Path) -> None:
    source = made("qwen3-tied", tmp_path)
    tensors, dims = load_file(source / "model.safetensors"), mckpt.open(source).dims
    size = dims["vocab_size"] + 3
    text = f"- vocab: {{size: {size}}}\n- untie\n- layers: {{drop: [0, 2]}}\n"
    recipe, out = written(text, tmp_path), tmp_path / "out"
    mckpt.edit(source, out, recipe)
    rows = with_rows(tensors, size, lambda e: e.mean(0))
    head = {"lm_head.weight": rows["model.embed_tokens.weight"]}
    order = [(n, False) for n in range(dims["num_layers"]) if n not in (0, 2)]
    same(out, with_layers({**rows, **head}, order, dims["num_layers"]))
    assert "already" in good("edit", source, out, "--recipe", recipe).out  # the same command again
    config = json.loads((out / "config.json").read_text())
    assert (config["vocab_size"], config["tie_word_embeddings"]) == (size, False)


@pytest.mark.parametrize(
    ("recipe", "words"),
    [
        ("- layers: {drop: 9}", "recipe.yaml:1: layers"),
        ("- layers: {keep: 0, drop: 1}", "give one of keep"),
        ("- layers: {shuffle: 1}", "'shuffle' is not one of"),
        ("- layers: {drop: x}", "recipe.yaml:1"),
        ("- untie\n- grow: {}", "recipe.yaml:2: 'grow' is not an edit"),
        ("- untie: {now: 1}", "has no parameters"),
        ("- kv_heads: {times: 3}", "do not divide"),
        ("- kv_heads: {}", "wants times or mean"),
        ("- kv_heads: {mean: 3}", "mean 3: does not divide the 4 heads"),
        ("- kv_heads: {mean: 2}\n- untie", "must be the last edit"),
        ("- vocab: {init: mean}", "size is missing"),
        ("- vocab: {size: 500, init: guess}", "init is mean, normal"),
        ("- vocab: {size: 500, init: 1000}", "has the rows 0 to"),
        ("[", "recipe.yaml"),
        ("untie: 1", "a recipe is a list"),
        ("- tie", "is its output layer already"),
        ("- tie: 3", "wants its parameters"),
        ("- untie\n- untie", "has an output layer of its own"),
    ],
)
def test_a_recipe_that_cannot_be_done_names_the_line(
    recipe: str, words: str, tmp_path: Path
) -> None:
    source, out = made("qwen3-tied", tmp_path), tmp_path / "out"
    refused(2, words, args=("edit", source, out, "--recipe", written(recipe, tmp_path)))
    assert not out.exists()


def test_rows_of_tokens_in_use_are_not_left_out(tmp_path: Path) -> None:
    source = Path(__file__).parents[2] / "fixtures" / "tiny-qwen3"
    rows = mckpt.open(source).dims["vocab_size"]
    text = (source / "tokenizer.json").read_text()
    last = max(json.loads(text)["model"]["vocab"].values())
    last = max(last, *(token["id"] for token in json.loads(text)["added_tokens"]))
    assert last < rows
    out = tmp_path / "out"
    recipe = written(f"- vocab: {{size: {last}}}", tmp_path)
    refused(2, f"has tokens up to {last}", args=("edit", source, out, "--recipe", recipe))
    good("edit", source, out, "--recipe", written(f"- vocab: {{size: {last + 1}}}", tmp_path))


def mean_heads(tensor: np.ndarray, num: int, width: int) -> np.ndarray:
    """Returns the mean of each group of `num` neighbouring heads, in float32."""
    heads = tensor.astype("f4").reshape(-1, num, width, *tensor.shape[1:])
    total = np.zeros_like(heads[:, 0])
    for at in range(num):  # products of powers of 2 are exact, so one rounding is left
        total += np.float32(1 / num) * heads[:, at]
    return total.astype(tensor.dtype).reshape(-1, *tensor.shape[1:])


@pytest.mark.parametrize("case", ["llama", "qwen2", "qwen3-moe"])
def test_fewer_heads_are_the_means_of_their_neighbours(case: str, tmp_path: Path) -> None:
    source = made(case, tmp_path)
    tensors, dims = load_file(source / "model.safetensors"), mckpt.open(source).dims
    num = 4 if case == "qwen3-moe" else 2
    mean = dims["num_query_groups"] // num
    expected = {
        name: mean_heads(tensor, num, dims["head_dim"])
        if re.search(r"self_attn\.[kv]_proj\.(weight|bias)$", name)
        else tensor
        for name, tensor in tensors.items()
    }
    recipe = written(f"- kv_heads: {{mean: {mean}}}\n", tmp_path)
    out, dist, megatron = (tmp_path / name for name in ("out", "dist", "megatron"))
    said = good("edit", source, out, "--recipe", recipe)
    assert f"edited, formula: {mean} heads of keys and values" in said.err
    same(out, expected)
    mckpt.convert(source, dist, format="torch", tp=2, pp=2)
    good("edit", dist, megatron, "--recipe", recipe, "--tp", 1, "--pp", 1)
    assert not mckpt.diff(out, megatron)
    assert mckpt.open(megatron).dims["num_query_groups"] == mean


def test_an_output_layer_that_equals_the_embedding_is_tied(tmp_path: Path) -> None:
    source = made("qwen3-tied", tmp_path)
    tensors = load_file(source / "model.safetensors")
    untied, dist, again = tmp_path / "untied", tmp_path / "dist", tmp_path / "again"
    mckpt.edit(source, untied, written("- untie\n", tmp_path))
    mckpt.convert(untied, dist, tp=2, pp=2, divisible_by=128)
    recipe = written("- tie\n", tmp_path)
    for number, path in enumerate((untied, dist)):
        out = tmp_path / f"out{number}"
        said = good("edit", path, out, "--recipe", recipe, "--format", "hf")
        assert "edited, exact: the embedding is the output layer too" in said.err
        assert "lm_head.weight" in said.err + said.out
        same(out, tensors)
        assert json.loads((out / "config.json").read_text())["tie_word_embeddings"] is True
    good("edit", dist, again, "--recipe", recipe, "--tp", 1)
    assert not mckpt.diff(again, source)
    mckpt.edit(dist, tmp_path / "more", ["tie", "vocab: {size: 199}"], format="hf")
    same(tmp_path / "more", with_rows(tensors, 199, lambda e: e.mean(0)))
    held = load_file(untied / "model.safetensors")
    for row in (0, 70):  # by the sign of one zero or value
        held["lm_head.weight"][row, 3] *= -1
    tiny.write_weights(untied, held)
    (untied / "mckpt.json").unlink()
    refused(2, "tie: 2 of 197 rows", args=("edit", untied, tmp_path / "no", "--recipe", recipe))


def test_edits_need_no_file(tmp_path: Path) -> None:
    source = made("qwen3-tied", tmp_path)
    steps = ["layers: {drop: [0, 2]}", "untie", "vocab: {size: 300}"]
    recipe = written("".join(f"- {step}\n" for step in steps), tmp_path)
    good("edit", source, tmp_path / "file", "--recipe", recipe)
    listed = [part for step in steps for part in ("--edit", step)]
    first = written(f"- {steps[0]}\n", tmp_path)
    good("edit", source, tmp_path / "options", *listed)
    good("edit", source, tmp_path / "both", "--recipe", first, *listed[2:])
    mckpt.edit(source, tmp_path / "python", [{"layers": {"drop": [0, 2]}}, *steps[1:]])
    for name in ("options", "both", "python"):
        same(tmp_path / name, load_file(tmp_path / "file" / "model.safetensors"))
    for args, words in (
        ((), "give --recipe FILE, or --edit"),
        (("--edit", "layers: {drop: 9}"), "--edit 'layers: {drop: 9}': layers"),
        (("--edit", "untie", "--edit", "grow"), "--edit 'grow': 'grow' is not an edit"),
        (("--edit", "[untie"), "--edit '[untie': "),
        (("--edit", "- untie"), "wants one of layers"),
    ):
        refused(2, words, args=("edit", source, tmp_path / "none", *args))


@pytest.mark.parametrize(
    ("step", "words"),
    [
        ("layers: {keep: 0-99999999999}", "layer 4 of 4, which are numbered from 0"),
        ("layers: {order: [0, 3-1]}", "'3-1' is not a number or a range such as 0-3"),
        ("layers: {keep: [[0]]}", r"\[0\] is not a number or a range"),
        ("layers: {drop: -1}", "'-1' is not a number or a range"),
        ("prune: {ffn: 0-99999999999}", "the indices are different ones from 0 to 63"),
        ("prune: {ffn: {a: 0}}", "'a' is not the number of a layer"),
        ("mtp: {add: 1000000000}", "mtp_layers is 1000000000, and must be from 0 to 1000"),
        ("vocab: {size: 99999999999}", "an edit makes at most 16,777,216 rows"),
        ("vocab: {size: 16777217}", "size 16,777,217: an edit makes at most 16,777,216 rows"),
        ("graft: {from: SOURCE, take: layers.2-4}", "it has 4 layers and SRC 4, numbered from 0"),
    ],
)
def test_numbers_that_no_model_has_are_refused(step: str, words: str, tmp_path: Path) -> None:
    source = made("qwen3", tmp_path)
    step = step.replace("SOURCE", str(source))
    with pytest.raises(UsageError, match=words):
        mckpt.edit(source, tmp_path / "out", [step])
    assert not (tmp_path / "out").exists()
