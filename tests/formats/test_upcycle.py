"""Dense models that become mixtures of experts: each tensor beside numpy, and the logits."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
import yaml
from safetensors.numpy import load_file, save_file

import mckpt
from mckpt.errors import MckptError
from tests.formats.test_edit import Tensors, made, same, written
from tests.helpers import tiny
from tests.helpers.commands import good, refused

MLP = re.compile(r"(model\.layers\.(\d+)\.)mlp\.(gate|up|down)_proj\.weight")
MIXTRAL = {"gate": "w1", "up": "w3", "down": "w2"}
# the dense model -> the class of the edited one
CASES = {
    "llama": "MixtralForCausalLM",
    "mistral": "MixtralForCausalLM",
    "qwen3": "Qwen3MoeForCausalLM",
    "qwen2": "Qwen2MoeForCausalLM",
    "granite_residual_1": "GraniteMoeForCausalLM",
}
SHARED = ("qwen2",)  # a Qwen2-MoE has an expert that every token takes


def drawn(layer: int, experts: int, hidden: int, seed: int = 1234, std: float = 0.02) -> np.ndarray:
    """Returns the rows of a router in float32, one for each copy of the mlp."""
    generator = np.random.default_rng([seed, layer])
    return generator.standard_normal((experts, hidden), np.float32) * np.float32(std)


def times(tensor: np.ndarray, factor: float) -> np.ndarray:
    product = tensor.astype("f4") * np.float32(factor)
    return np.asarray(product, tensor.dtype)


def upcycled(
    source: Tensors, kind: str, experts: int, parts: int, factors: dict[str, float]
) -> Tensors:
    """Returns the tensors of a model of a class, as published ones are named."""
    out: Tensors = {}
    for name, tensor in source.items():
        found = MLP.fullmatch(name)
        if found is None:
            out[name] = tensor
            continue
        layer, number, part = found[1], int(found[2]), found[3]
        cut = np.split(tensor, parts, axis=1 if part == "down" else 0)
        every = [times(cut[j % parts], factors.get(part, 1)) for j in range(experts * parts)]
        hidden = tensor.shape[0 if part == "down" else 1]
        rows = drawn(number, experts, hidden).astype(tensor.dtype)
        router = np.stack([rows[j // parts] for j in range(experts * parts)])
        if kind == "GraniteMoeForCausalLM":
            out[f"{layer}block_sparse_moe.router.layer.weight"] = router
            if part == "down":
                out[f"{layer}block_sparse_moe.output_linear.weight"] = np.stack(every)
            elif part == "gate":
                up = times(source[name.replace("gate", "up")], factors.get("up", 1))
                ups = np.split(up, parts)
                both = [np.concatenate([g, ups[j % parts]]) for j, g in enumerate(every)]
                out[f"{layer}block_sparse_moe.input_linear.weight"] = np.stack(both)
            continue
        mixtral = kind == "MixtralForCausalLM"
        block = layer + ("block_sparse_moe." if mixtral else "mlp.")
        out[f"{block}gate.weight"] = router
        for j, one in enumerate(every):
            named = MIXTRAL[part] if mixtral else f"{part}_proj"
            out[f"{block}experts.{j}.{named}.weight"] = one
        if kind == "Qwen2MoeForCausalLM":
            shared = np.zeros_like(tensor) if part == "down" else tensor
            out[f"{block}shared_expert.{part}_proj.weight"] = shared
            out[f"{block}shared_expert_gate.weight"] = np.zeros((1, hidden), tensor.dtype)
    return out


def recipe(directory: Path, experts: int, topk: int, parts: int, more: str = "") -> Path:
    given = f"experts: {experts}, topk: {topk}, granularity: {parts}{more}"
    return written(f"- upcycle: {{{given}}}\n", directory)


@pytest.mark.parametrize("case", CASES)
def test_each_expert_is_a_part_of_the_mlp(case: str, tmp_path: Path) -> None:
    source, kind = made(case, tmp_path), CASES[case]
    tensors, before = tensors_of(source), mckpt.open(source).dims
    dist = tmp_path / "dist"
    mckpt.convert(source, dist, tp=2)
    shared = ", shared: true" * (case in SHARED)
    for parts, form, factors in (
        (1, "exact", {}),
        (2, "exact", {"down": 2.0}),
        (2, "megatron", dict.fromkeys(("gate", "up", "down"), 2 ** (1 / 3))),
    ):
        steps = recipe(tmp_path, 3, 2 * parts, parts, f", form: {form}{shared}")
        out, megatron, hf = (tmp_path / f"{form}{parts}{n}" for n in ("out", "megatron", "hf"))
        said = good("edit", source, out, "--recipe", steps).err
        assert ("edited, exact" in said) == (form == "exact"), said
        expected = upcycled(tensors, kind, 3, parts, factors)
        same(out, expected)
        good("edit", dist, megatron, "--recipe", steps, "--tp", 2, "--pp", 2, "--ep", 3)
        good("megatron-to-hf", megatron, hf)
        same(hf, expected)
        for directory in (out, megatron / "hf"):
            config = json.loads((directory / "config.json").read_text())
            assert config["architectures"] == [kind]
            assert config.get("rope_theta") == tiny_config(source).get("rope_theta")
            assert (directory / "tokenizer.json").exists() == (source / "tokenizer.json").exists()
        dims = mckpt.open(megatron).dims
        assert (dims["num_experts"], dims["experts_per_token"]) == (3 * parts, 2 * parts)
        assert dims["expert_ffn_size"] == before["ffn_size"] // parts
        args = mckpt.open(megatron).args
        assert args is not None and args["moe_token_dispatcher_type"] == "alltoall"
        assert mckpt.check(megatron).verdict == "sound"


def tensors_of(source: Path) -> Tensors:
    return load_file(source / "model.safetensors")


def tiny_config(source: Path) -> tiny.Config:
    found: tiny.Config = json.loads((source / "config.json").read_text())
    return found


def test_the_formats_of_megatron_have_the_same_experts(tmp_path: Path) -> None:
    source, steps = made("qwen3", tmp_path), recipe(tmp_path, 2, 4, 4)
    out, plain = tmp_path / "out", tmp_path / "plain"
    good("edit", source, out, "--recipe", steps)
    mckpt.convert(source, plain, format="torch", tp=4)
    without = tmp_path / "without"  # nothing but the args describes the model
    mckpt.convert(source, without / "full", tp=2)
    (without / "full" / "hf").rename(without / "hf")
    for number, (src, *options) in enumerate(
        (
            (source, "--format", "torch_dist", "--tp", 2, "--ep", 4, "--etp", 1),
            (source, "--format", "torch", "--tp", 2, "--ep", 2),
            (plain, "--format", "torch_dist", "--ep", 8, "--tp", 1),
            (without / "full", "--tp", 1),
        )
    ):
        megatron = tmp_path / f"megatron{number}"
        good("edit", src, megatron, "--recipe", steps, *options)
        assert not mckpt.diff(out, megatron)
        mckpt.convert(megatron, tmp_path / f"hf{number}")
        assert not mckpt.diff(out, tmp_path / f"hf{number}")
        assert mckpt.open(tmp_path / f"hf{number}").mapping.name == "qwen3_moe"


def test_transformers_computes_the_logits_of_the_dense_model(tmp_path: Path) -> None:
    """Measured: 3e-7 to 1.4e-6 of the largest logit, all of it the rounding of float32."""
    for case in CASES:
        source = (
            tiny.tiny_random(case, tmp_path / case) if case in tiny.CASES else made(case, tmp_path)
        )
        shared = ", shared: true" * (case in SHARED)
        tokens = np.random.default_rng(5).integers(0, 120, (2, 32))
        before = tiny.hf_logits(source, tokens)
        for parts, topk in ((1, 2), (2, 2), (4, 8)):
            out = tmp_path / f"{case}-{parts}"
            good("edit", source, out, "--recipe", recipe(tmp_path, 4, topk, parts, shared))
            after = tiny.hf_logits(out, tokens)
            apart = float(np.abs(after - before).max() / np.abs(before).max())
            assert apart < 3e-6, (case, parts, apart)


def test_states_that_cannot_follow_are_refused(tmp_path: Path) -> None:
    saved = tiny.unpack("optimizer/dp_zero_gather_scatter", tmp_path / "saved")
    steps = recipe(tmp_path, 2, 2, 2, ", form: megatron")
    arguments = ("edit", saved, tmp_path / "out", "--recipe", steps)
    refused(2, "--no-optimizer", args=arguments)
    good(*arguments, "--no-optimizer")


def test_a_router_of_zeros_and_other_seeds(tmp_path: Path) -> None:
    source = made("qwen3", tmp_path)
    out = {}
    for name, more in (
        ("zero", ", router: zero"),
        ("seed", ", seed: 7, std: 0.5"),
        ("same", ", seed: 7, std: 0.5"),
    ):
        out[name] = tmp_path / name
        good("edit", source, out[name], "--recipe", recipe(tmp_path, 2, 2, 1, more))
    router = "layers.3.moe.router.weight"
    assert not mckpt.open(out["zero"])[router][:].numpy().any()
    found = mckpt.open(out["seed"])[router][:].numpy()
    expected = drawn(3, found.shape[0], found.shape[1], 7, 0.5).astype(found.dtype)
    assert found.tobytes() == expected.tobytes()
    assert not mckpt.diff(out["seed"], out["same"])


def test_config_json_has_the_keys_of_the_new_class_alone(tmp_path: Path) -> None:
    source = made("internlm2", tmp_path)
    given = tiny_config(source)
    more = {"auto_map": {"AutoModelForCausalLM": "modeling.Model"}, "pad_token_id": 3}
    (source / "config.json").write_text(json.dumps({**given, **more}))
    out = tmp_path / "out"
    good("edit", source, out, "--recipe", recipe(tmp_path, 3, 2, 2))
    config = tiny_config(out)
    assert config["architectures"] == ["MixtralForCausalLM"] and "auto_map" not in config
    assert (config["pad_token_id"], config["num_local_experts"]) == (3, 6)
    assert given["bias"] is False and "bias" not in config
    assert None not in (config.get("rope_parameters") or config.get("rope_scaling") or {}).values()
    assert mckpt.open(out).mapping.unknown(config) == {}
    assert (
        mckpt.open(out).dims["num_experts"] == 6
    )  # it has no dynamic rope_scaling, which mixtral refuses


def test_run_config_describes_the_edited_model(tmp_path: Path) -> None:
    source, trained, out = made("qwen3", tmp_path), tmp_path / "trained", tmp_path / "out"
    good("hf-to-megatron", source, trained, "--run-config", "--tp", 2)
    steps = recipe(tmp_path, 2, 2, 2)
    steps.write_text("- layers: {drop: 3}\n" + steps.read_text())
    good("edit", trained, out, "--recipe", steps, "--tp", 2, "--ep", 2)
    good("edit", source, tmp_path / "hf", "--recipe", steps)
    good("hf-to-megatron", tmp_path / "hf", tmp_path / "new", "--run-config", "--tp", 2, "--ep", 2)
    written, expected = (
        yaml.safe_load((path / "release" / "run_config.yaml").read_text())["model"]
        for path in (out, tmp_path / "new")
    )
    assert written["num_layers"] == 3 and written["num_moe_experts"] == 4
    # the dense one has not the keys of routers, whose values are those of Megatron-Core
    assert written == {key: expected[key] for key in written}
    left = {key for key, value in expected.items() if value not in (None, False)} - written.keys()
    assert left == {"moe_router_score_function"}
    assert not mckpt.diff(out, tmp_path / "new")


def test_zeros_keep_their_sign(tmp_path: Path) -> None:
    source, name = made("qwen3", tmp_path), "model.layers.1.mlp.down_proj.weight"
    tensors = tensors_of(source)
    tensors[name] = np.where(tensors[name] > 0, 0, -0.0).astype(tensors[name].dtype)
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    out = tmp_path / "out"
    good("edit", source, out, "--recipe", recipe(tmp_path, 2, 2, 2))
    same(out, upcycled(tensors, CASES["qwen3"], 2, 2, {"down": 2.0}))


def test_edits_before_and_after(tmp_path: Path) -> None:
    source, out = made("qwen3", tmp_path), tmp_path / "out"
    tensors = tensors_of(source)
    before, after = "- layers: {keep: [0, 2]}\n", "- layers: {silent_after: 1}\n"
    text = "- upcycle: {experts: 2, topk: 2}\n"
    good("edit", source, out, "--recipe", written(before + text + after, tmp_path))
    found = mckpt.open(out)
    for number, old in enumerate((0, 2)):
        down = found[f"layers.{number}.moe.experts.1.down.weight"][:].numpy()
        wanted = tensors[f"model.layers.{old}.mlp.down_proj.weight"]
        assert down.tobytes() == wanted.tobytes()
    assert not found["layers.2.moe.experts.1.down.weight"][:].numpy().any()
    router = [found[f"layers.{n}.moe.router.weight"][:].numpy() for n in (1, 2)]
    assert router[0].tobytes() == router[1].tobytes() and router[0].any()
    assert tiny_config(out)["num_hidden_layers"] == 3
    text = "- upcycle: {experts: 2, topk: 2, granularity: 2}\n"
    steps = written(text + after, tmp_path)
    refused(2, "must be the last edit", args=("edit", source, tmp_path / "no", "--recipe", steps))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("experts: 2, topk: 3, granularity: 2", "topk 3 is not a multiple of granularity 2"),
        ("experts: 2, topk: 3, granularity: 2", "give topk 2, or form: megatron"),
        ("experts: 2, topk: 5, granularity: 5", "choose one of 1, 2, 4, 8, 16"),
        ("experts: 2, topk: 5", "topk 5 of 2 experts"),
        ("experts: 2", "topk is missing"),
        ("topk: 2", "experts is missing"),
        ("experts: 2, topk: 2, rows: 3", "rows is not one of experts, topk"),
        ("experts: two, topk: 2", "experts is a whole number"),
        ("experts: 2, topk: 0", "topk is a whole number"),
        ("experts: 2, topk: 2, router: mean", "router is normal or zero"),
        ("experts: 2, topk: 2, std: wide", "std is a number"),
        ("experts: 2, topk: 2, granularity: 2, router: zero", "give router: normal"),
        ("experts: 2, topk: 2, shared: true", "give shared: false"),
    ],
)
def test_a_recipe_that_cannot_be_done_names_the_line(
    given: str, words: str, tmp_path: Path
) -> None:
    source, out = made("qwen3", tmp_path), tmp_path / "out"
    steps = written(f"- layers: {{keep: 0-1}}\n- upcycle: {{{given}}}\n", tmp_path)
    refused(2, words, args=("edit", source, out, "--recipe", steps))
    refused(2, "recipe.yaml:2: upcycle", args=("edit", source, out, "--recipe", steps))
    assert not out.exists()


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("qwen3-moe", "mixture of experts already"),
        ("qwen2", "qkv_bias is True.*give shared: true"),
        ("gemma_silu", "norm_offset is True.*docs/surgery.md"),
        ("gpt2", "has biases in its mlp"),
        ("nemotron_h", "not every layer"),
    ],
)
def test_models_without_such_a_family_are_refused(case: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(MckptError, match=words):
        mckpt.edit(made(case, tmp_path), tmp_path / "out", recipe(tmp_path, 2, 2, 1))


def test_one_expert_for_a_token_is_refused_where_megatron_would_scale_it(tmp_path: Path) -> None:
    source, steps = made("qwen3", tmp_path), recipe(tmp_path, 2, 1, 1)
    good("edit", source, tmp_path / "hf", "--recipe", steps)
    mckpt.convert(source, tmp_path / "megatron")
    for src in (source, tmp_path / "megatron"):
        arguments = ("edit", src, tmp_path / "out", "--recipe", steps, "--format", "torch_dist")
        refused(4, "does not scale a single expert", args=arguments)
