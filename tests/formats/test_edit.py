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
from mckpt.errors import MckptError
from mckpt.geometry.parallel import Parallel
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
                out[f"{start}{new}{rest}"] = np.zeros_like(tensor) if zero else tensor
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


# dense and tied, experts, latent attention with multi-token prediction, a hybrid, gated delta nets
CASES = ("qwen3-tied", "qwen3-moe", "deepseek-v3", "bamba", "qwen3_next")


@pytest.mark.parametrize("case", CASES)
def test_layers_are_kept_repeated_and_silenced(case: str, tmp_path: Path) -> None:
    source = made(case, tmp_path)
    tensors = load_file(source / "model.safetensors")
    count = mckpt.open(source).dims["num_layers"]
    dist = tmp_path / "dist"
    experts = bool(mckpt.open(source).dims["num_experts"])
    mckpt.convert(source, dist, parallel=Parallel(tp=2, ep=2 if experts else 1, etp=1))
    every = list(range(count))
    cases = {
        f"drop: {count - 1}": [(n, False) for n in every[:-1]],
        "keep: [0, 1]": [(0, False), (1, False)],
        f"order: [0-{count - 1}, 1-1]": [*((n, False) for n in every), (1, False)],
        "silent_after: [0, 1]": [
            *((0, False), (0, True), (1, False), (1, True)),
            *((n, False) for n in every[2:]),
        ],
    }
    for number, (what, order) in enumerate(cases.items()):
        recipe = written(f"- layers: {{{what}}}\n", tmp_path)
        expected = with_layers(tensors, order, count)
        out, megatron = tmp_path / f"hf{number}", tmp_path / f"megatron{number}"
        good("edit", source, out, "--recipe", recipe)
        same(out, expected)
        good("edit", dist, megatron, "--recipe", recipe, "--tp", 1)
        assert not mckpt.diff(out, megatron)
        described = mckpt.open(megatron)
        assert described.dims["num_layers"] == len(order)
        assert mckpt.check(megatron).verdict == "sound"
        text = json.loads((out / "config.json").read_text())
        assert text["num_hidden_layers"] == len(order)


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


def test_models_that_an_edit_does_not_know_are_refused(tmp_path: Path) -> None:
    latent = made("deepseek-v3", tmp_path)
    for recipe, words in (
        ("- kv_heads: {times: 2}", "without such heads in each layer"),
        ("- untie", "has an output layer of its own"),
    ):
        with pytest.raises(MckptError, match=words):
            mckpt.edit(latent, tmp_path / "out", written(recipe, tmp_path))


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


def test_means_of_heads_with_the_optimizer(tmp_path: Path) -> None:
    source = tiny.unpack("optimizer/fully_sharded_model_space", tmp_path / "source")
    recipe, out = written("- kv_heads: {mean: 1}\n", tmp_path), tmp_path / "out"
    mckpt.edit(source, out, recipe, format="torch_dist", tp=1, pp=2)
    before, after = (mckpt.open(path).with_optimizer() for path in (source, out))
    assert before.keys() == after.keys()
    for name in after:
        values, wanted = after[name][:].numpy(), before[name][:].numpy()
        weight, _, kind = name.partition("@")
        if re.search(r"attn\.[kv]\.weight", name):
            held = wanted if kind else before[f"{weight}@master"][:].numpy()
            wanted = mean_heads(held, 2, 8).astype(wanted.dtype)
        assert values.tobytes() == wanted.tobytes(), name
    assert mckpt.check(out).verdict == "sound"


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
    held = load_file(untied / "model.safetensors")
    for row in (0, 70):  # by the sign of one zero or value
        held["lm_head.weight"][row, 3] *= -1
    tiny.write_weights(untied, held)
    (untied / "mckpt.json").unlink()
    refused(2, "tie: 2 of 197 rows", args=("edit", untied, tmp_path / "no", "--recipe", recipe))


def test_states_of_the_embedding_follow_when_it_is_tied_and_untied(tmp_path: Path) -> None:
    source, plain = (
        tiny.unpack("optimizer/fully_sharded_model_space", tmp_path / "a"),
        tmp_path / "b",
    )
    mckpt.convert(source, plain, format="hf")
    held = load_file(plain / "model.safetensors")
    tiny.write_weights(plain, {**held, "lm_head.weight": held["model.embed_tokens.weight"]})
    (plain / "mckpt.json").unlink()
    out = tmp_path / "out"
    refused(2, "of 64 rows", args=("edit", source, out, "--recipe", written("- tie", tmp_path)))
    recipe = written(f"- graft: {{from: {plain}, take: head}}\n- tie\n", tmp_path)
    mckpt.edit(source, out, recipe, format="torch_dist", tp=1, pp=2)
    before, after = (mckpt.open(path).with_optimizer() for path in (source, out))
    assert before.keys() - after.keys() == {n for n in before if n.startswith("lm_head.")}
    for name in after:
        assert after[name][:].numpy().tobytes() == before[name][:].numpy().tobytes(), name
    assert mckpt.check(out).verdict == "sound"
    mckpt.edit(out, tmp_path / "untied", ["untie"], tp=2, pp=1)
    untied = mckpt.open(tmp_path / "untied").with_optimizer()
    assert untied.keys() == before.keys()  # with the states of the output layer
    for name in untied:
        wanted = after[name.replace("lm_head.", "embed.")][:].numpy()
        assert untied[name][:].numpy().tobytes() == wanted.tobytes(), name


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
