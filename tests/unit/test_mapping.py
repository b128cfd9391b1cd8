"""Mapping files: one broken file for each rule, and a custom family file."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mckpt
from mckpt import mapping
from mckpt.checkpoint import inspection
from mckpt.errors import MappingError
from mckpt.mapping import nodes
from mckpt.options import SourceOptions
from tests.helpers import tiny
from tests.helpers.tiny import TinyModel
from tests.unit.test_mapping_config import llama

# ------------------------------------------------------------------------------------- broken files


@pytest.mark.parametrize(
    ("base", "over", "merged"),
    [
        ("'{a,b}.w': '{p,q}'", "b.w: null", {"a.w": "p"}),
        ("'{a,b}.w': {of: 'x.{p,q}'}", "b.w: z", {"a.w": {"of": "x.p"}, "b.w": "z"}),
        ("a.w: p\nb.w: q\nc.w: r", "'{a,b}.w': null", {"c.w": "r"}),
        ("a.w: p\n'{b,c}.w': '{q,r}'", "'{a,b}.w': null", {"c.w": "r"}),
        ("'{a,b}.w': '{p,q}'", "'{a,b}.w': null\na.w: z", {"a.w": "z"}),
        ("'{a,b}.w': '{p,q}'", "'{a,b}.v': '{r,s}'", {"{a,b}.w": "{p,q}", "{a,b}.v": "{r,s}"}),
    ],
)
def test_a_key_with_braces_stands_for_one_key_for_each_word(base, over, merged):
    found = nodes.merge(*(nodes.load(one, "my.yaml") for one in (base, over)))
    assert nodes.plain(found) == merged


def test_a_null_that_removes_nothing_from_a_dialect_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "my.yaml"
    path.write_text("extends: llama\ndialects:\n  gpt:\n    tensors:\n      embd.weight: null\n")
    with pytest.raises(MappingError, match=r"my\.yaml:5: embd\.weight: null removes nothing"):
        mapping.dialect_for(own=str(path))


def test_a_date_is_a_text(tmp_path: Path) -> None:
    path = tmp_path / "my.yaml"
    path.write_text("extends: llama\nnotes: [2001-02-03, 2001-99-99]\n")
    assert mapping.load("hf", str(path)).notes == ("2001-02-03", "2001-99-99")


def test_braces_expand_to_one_rule_for_each_word() -> None:
    """Both sides of a rule have the same words in braces, and each word gives one rule."""
    rules = {r.key: r.of for r in mapping.load("hf", "llama").rules}
    for word in "qkv":
        assert rules[f"model.layers.{{layer}}.self_attn.{word}_proj.weight"] == (
            f"layers.{{layer}}.attn.{word}.weight",
        )
    assert not any("," in key for key in rules)


def test_no_family_has_an_architecture_that_is_refused() -> None:
    known = {a for name in mapping.names("hf") for a in mapping.load("hf", name).architectures}
    assert not known & mapping.refused().keys()


@pytest.mark.parametrize(
    ("kind", "name"), [(kind, name) for kind in ("hf", "megatron") for name in mapping.names(kind)]
)
def test_every_shipped_mapping_file_is_complete(kind: str, name: str) -> None:
    """The file has rules, sets every dim that has no neutral value, and lists no key of a dim as
    inert.
    """
    file = mapping.load(kind, name)
    assert file.rules
    silent = [
        d
        for d, about in mapping.schema().dims.items()
        if about.neutral is None and d not in file.dims
    ]
    assert silent == []
    used = {e for r in file.rules for e in r.of}
    assert used <= set(mapping.schema().tensors)
    assert not file.inert & {k for d in file.dims.values() for k in d.keys}


@pytest.mark.parametrize(
    ("kind", "name"), [(kind, name) for kind in mapping.KINDS for name in mapping.names(kind)]
)
def test_every_shipped_mapping_file_has_correct_expressions(kind: str, name: str) -> None:
    """A path is read as the file of a user, whose expressions are all checked."""
    path = mapping.folder(kind) / f"{name}.yaml"
    assert mapping.load(kind, str(path)).digest == mapping.load(kind, name).digest


def test_the_schema_has_correct_expressions() -> None:
    schema = mapping.schema()
    for name, dim in schema.dims.items():
        assert dim.neutral is None or dim.neutral.names <= schema.dims.keys(), name
    for name, tensor in schema.tensors.items():
        for size in tensor.shape:
            assert size.names <= schema.dims.keys(), name


def test_a_loaded_mapping_cannot_be_changed() -> None:
    loaded: Any = mapping.load("hf", "llama")
    with pytest.raises(AttributeError):
        loaded.rules = ()
    assert mapping.load("hf", "qwen3") is mapping.load("hf", "qwen3")
    before = len(mapping.load("hf", "llama").rules)
    mapping.load("hf", "mixtral")  # mixtral.yaml removes rules of its base
    assert len(mapping.load("hf", "llama").rules) == before


# ------------------------------------------------------------------------ a custom family file


MINE = """
architectures: [MineForCausalLM]
extends: llama
dims:
  hidden_size: d_model
tensors:
  model.embed_tokens.weight: null
  model.norm.weight: null
  wte.weight: {of: embed.weight, stage: first}
  ln_f.weight: final_norm.weight
blocks:
  model.layers.{layer}.: null
  h.{layer}.:
    is: layers.{layer}.
    tensors:
      ln_{1,2}.weight: "{attn_norm,mlp_norm}.weight"
      c_attn.weight: {pack: concat, of: [attn.q.weight, attn.k.weight, attn.v.weight]}
      c_proj.weight: attn.o.weight
      gate_up.weight: {pack: concat, of: [mlp.gate.weight, mlp.up.weight]}
      down.weight: mlp.down.weight
"""


def mine(directory: Path) -> dict[str, np.ndarray]:
    """Writes the tiny Llama under MINE's names, its weights fused by numpy; returns its tensors."""
    arrays = tiny.tensors(tiny.config("llama"))
    out = {
        "wte.weight": arrays["model.embed_tokens.weight"],
        "ln_f.weight": arrays["model.norm.weight"],
        "lm_head.weight": arrays["lm_head.weight"],
    }
    for i in range(tiny.config("llama")["num_hidden_layers"]):

        def get(name: str, i: int = i) -> np.ndarray:
            return arrays[f"model.layers.{i}.{name}.weight"]

        out[f"h.{i}.ln_1.weight"], out[f"h.{i}.ln_2.weight"] = (
            get("input_layernorm"),
            get("post_attention_layernorm"),
        )
        out[f"h.{i}.c_attn.weight"] = np.concatenate([get(f"self_attn.{x}_proj") for x in "qkv"])
        out[f"h.{i}.c_proj.weight"], out[f"h.{i}.down.weight"] = (
            get("self_attn.o_proj"),
            get("mlp.down_proj"),
        )
        out[f"h.{i}.gate_up.weight"] = np.concatenate([get("mlp.gate_proj"), get("mlp.up_proj")])
    directory.mkdir()
    tiny.write_weights(directory, out)
    config = llama(
        architectures=["MineForCausalLM"],
        d_model=tiny.config("llama")["hidden_size"],
        hidden_size="drop",
    )
    tiny.write_json(directory / "config.json", config)
    return out


def test_a_custom_family_file_converts_there_and_back(tmp_path: Path) -> None:
    """The file has another prefix, other names and fused weights. Its model becomes the Llama in
    Megatron, and comes back under its own names.
    """
    (tmp_path / "mine.yaml").write_text(MINE)
    arrays = mine(tmp_path / "mine")
    known = SourceOptions(mapping=str(tmp_path / "mine.yaml"))
    with pytest.raises(MappingError, match="no family has the architecture MineForCausalLM"):
        mckpt.plan(tmp_path / "mine", tmp_path / "out")
    mckpt.plan(
        mckpt.Checkpoint.open(tmp_path / "mine", known),
        tmp_path / "out",
        format="torch",
        parallel=mckpt.Parallel(tp=2, pp=2),
    ).run()
    plain = tiny.tiny_random("llama", tmp_path / "llama")
    found = mckpt.diff(plain, mckpt.open(tmp_path / "out", mapping=str(tmp_path / "mine.yaml")))
    assert not found, found.json()
    assert found.same > 30

    mckpt.plan(mckpt.Checkpoint.open(tmp_path / "out", known), tmp_path / "back", format="hf").run()
    again = mckpt.open(tmp_path / "back", mapping=str(tmp_path / "mine.yaml"))
    assert set(again.opened.entries) == set(arrays)
    assert json.loads((tmp_path / "back" / "config.json").read_text()) == json.loads(
        (tmp_path / "mine" / "config.json").read_text()
    )
    raw = (tmp_path / "back" / "model.safetensors").read_bytes()
    for key, entry in again.opened.entries.items():
        assert raw[entry.at : entry.at + arrays[key].nbytes] == arrays[key].tobytes(), key


def scaled() -> str:
    """Returns the file of docs/new-model.md that adds a dim, a tensor and rules."""
    text = (Path(mckpt.__file__).parent.parent / "docs" / "new-model.md").read_text()
    return re.findall(r"(?s)```yaml\n(.*?)```", text[text.index("### Dims, tensors and rules") :])[
        0
    ]


@pytest.fixture
def restored() -> Iterator[None]:
    """Removes what a test added to the schema; else later plans of this process would have it."""
    known = mapping.schema()
    tables = (known.dims, known.tensors, known.added)
    before = [dict(table) for table in tables]
    yield
    for table, was in zip(tables, before, strict=True):
        table.clear()
        table.update(was)


@pytest.mark.usefixtures("restored")
def test_a_family_file_adds_dims_tensors_and_rules(tmp_path: Path) -> None:
    """The part goes to Megatron and back, a reshard needs no option, and other models stay."""
    (tmp_path / "scaled.yaml").write_text(scaled())
    arrays = tiny.tensors(tiny.config("llama"))
    c = llama(architectures=["ScaledForCausalLM"], use_attn_scale=True)
    for i in range(c["num_hidden_layers"]):
        drawn = np.random.RandomState(i).standard_normal(c["hidden_size"])
        arrays[f"model.layers.{i}.self_attn.scale"] = drawn.astype(np.float32)
    (tmp_path / "hf").mkdir()
    tiny.write_weights(tmp_path / "hf", arrays)
    tiny.write_json(tmp_path / "hf" / "config.json", c)

    known, sizes = SourceOptions(mapping=str(tmp_path / "scaled.yaml")), mckpt.Parallel(tp=2, pp=2)
    wanted: dict[str, Any] = {"format": "torch_dist", "parallel": sizes}
    mckpt.plan(mckpt.Checkpoint.open(tmp_path / "hf", known), tmp_path / "out", **wanted).run()
    stored = mckpt.open(tmp_path / "out")
    keys = set(stored.opened.keys())
    assert "decoder.layers.self_attention.scale" in keys
    assert stored.args is not None and stored.args["attention_scale"] is True
    assert "--attention-scale" in next((tmp_path / "out").rglob("megatron_args.sh")).read_text()
    mckpt.plan(
        tmp_path / "out", tmp_path / "tp4", format="torch", parallel=mckpt.Parallel(tp=4)
    ).run()
    mckpt.plan(tmp_path / "tp4", tmp_path / "back", format="hf").run()
    assert not mckpt.diff(tmp_path / "hf", tmp_path / "back")

    with pytest.raises(MappingError, match="attn_scale is True, and hybrid would compute with"):
        mckpt.plan(
            mckpt.Checkpoint.open(tmp_path / "hf", known),
            tmp_path / "no",
            dialect="hybrid",
            **wanted,
        )
    plain = tiny.tiny_random("llama", tmp_path / "llama")
    mckpt.plan(plain, tmp_path / "plain", **wanted).run()
    assert "attention_scale" not in (mckpt.open(tmp_path / "plain").args or {})


@pytest.mark.usefixtures("restored")
@pytest.mark.parametrize(
    ("was", "now", "why"),
    [
        ('neutral: "False", ', "", r"mine\.yaml:5: attn_scale: it needs `neutral`"),
        ("type: bool", "type: flag", r"mine\.yaml:5: attn_scale: its type is 'flag', and must be"),
        ("type: bool, ", "", r"mine\.yaml:5: attn_scale: it needs `type`"),
        ("[hidden_size]", "[hidden_size +]", r"mine\.yaml:7: layers\.\{layer\}\.attn\.scale: "),
        (
            "    attn_scale: {type: bool",
            "    head_dim: {type: bool",
            "head_dim has another definition",
        ),
        (
            "  gpt:\n",
            "  gtp:\n",
            r"the dialect 'gtp' is not known; known are bert, bridge, bridge_gemma4, gpt",
        ),
        ("    flags:", "    flag:", r"mine\.yaml:\d+: 'flag' is not a key of a mapping file"),
    ],
)
def test_a_wrong_addition_is_refused(was: str, now: str, why: str, tmp_path: Path) -> None:
    text = scaled()
    assert was in text
    text = text.replace(was, now)
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    with pytest.raises(MappingError, match=why):
        mapping.load("megatron", "gpt", str(path))


@pytest.mark.parametrize("dialect", [None, "gpt"])
def test_a_mistake_in_the_rules_of_another_dialect_is_refused(
    dialect: str | None, tmp_path: Path, tiny_model: TinyModel
) -> None:
    """Reading loads all dialects, so mckpt would write a checkpoint that it cannot read."""
    path = tmp_path / "mine.yaml"
    path.write_text("extends: qwen3\ndialects:\n  hybrid:\n    also:\n      a: 'tied +'\n")
    source = mckpt.open(tiny_model("qwen3"), mapping=str(path))
    with pytest.raises(MappingError, match=r"mine\.yaml:5: 'tied \+' is not an expression"):
        mckpt.plan(source, tmp_path / "out", dialect=dialect)


WITHOUT_NORMS = """
extends: llama
drop:
  model.norm.weight: left out
  "model.layers.{layer}.post_attention_layernorm.weight": left out
tensors:
  model.norm.weight: null
blocks:
  model.layers.{layer}.:
    tensors:
      post_attention_layernorm.weight: null
"""


def test_one_error_lists_all_tensors_that_the_other_side_lacks(
    tiny_model: TinyModel, tmp_path: Path
) -> None:
    """The family file lacks two norms, and `mappings check` reports the same two."""
    (tmp_path / "mine.yaml").write_text(WITHOUT_NORMS)
    source = tiny_model("llama")
    known = SourceOptions(mapping=str(tmp_path / "mine.yaml"))
    lacking = [
        (
            "final_norm.weight [64] (norm before the output layer): Megatron needs it, and"
            " mine.yaml has no rule for it"
        ),
        (
            "layers.{layer}.mlp_norm.weight [64] (norm before the mlp or the experts): Megatron"
            " needs it, and mine.yaml has no rule for it"
        ),
    ]
    for wanted in ({}, {"dtype": "fp32"}, {"format": "torch"}):
        with pytest.raises(MappingError) as caught:
            mckpt.plan(mckpt.Checkpoint.open(source, known), tmp_path / "out", **wanted)
        assert list(caught.value.problems) == lacking
    with pytest.raises(MappingError) as caught:
        inspection.check_mapping(tmp_path / "mine.yaml", source / "config.json")
    assert list(caught.value.problems) == lacking


def test_a_plan_requires_every_tensor_of_the_target_model(
    tiny_model: TinyModel, tmp_path: Path
) -> None:
    """The family has LayerNorms without biases, but Megatron's model has biases."""
    (tmp_path / "mine.yaml").write_text("extends: llama\ndims:\n  norm: {const: layernorm}\n")
    source = tiny_model("llama")
    with pytest.raises(MappingError) as caught:
        mckpt.plan(mckpt.open(source, mapping=str(tmp_path / "mine.yaml")), tmp_path / "out")
    lacking = [problem.split()[0] for problem in caught.value.problems]
    assert lacking == [
        "final_norm.bias",
        "layers.{layer}.attn_norm.bias",
        "layers.{layer}.mlp_norm.bias",
    ]


def test_a_model_that_does_not_fit_its_family_file_is_refused(tmp_path: Path) -> None:
    """One error lists tensors that are missing, left over and of another shape."""
    (tmp_path / "mine.yaml").write_text(MINE)
    mine(tmp_path / "mine")
    arrays = tiny.tensors({**tiny.config("llama"), "num_hidden_layers": 1})
    arrays["wte.weight"] = arrays.pop("model.embed_tokens.weight")[:5]
    (tmp_path / "mine" / "model.safetensors").unlink()
    tiny.write_weights(tmp_path / "mine", arrays)
    with pytest.raises(mckpt.errors.SourceError) as caught:
        mckpt.plan(
            mckpt.open(tmp_path / "mine", mapping=str(tmp_path / "mine.yaml")),
            tmp_path / "out",
        )
    text = str(caught.value)
    assert (
        "wte.weight is [5, 64] in model.safetensors, and should be [131, 64] by config.json" in text
    )
    assert "ln_f.weight is missing; it should be [64]" in text
    assert "and 16 more" in text


def test_a_parsed_form_is_kept_for_the_next_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has the values and lines of the file. If it is damaged or old, it is made again."""
    monkeypatch.setattr(nodes, "FOLDER", tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    file = tmp_path / "some.yaml"

    def parsed() -> tuple[object, object]:
        nodes._loaded.cache_clear()
        root = nodes.parse(file)[0]
        return root, (root.lines, root["a"].lines)

    file.write_text("a: {b: [1, x: {2: null}], true: 0.5}\nc: text\n")
    first = parsed()
    with monkeypatch.context() as without:
        without.delattr(nodes, "load")
        assert parsed() == first
    (kept,) = (tmp_path / "__pycache__").iterdir()
    kept.write_bytes(kept.read_bytes()[:-9])
    assert parsed() == first
    file.write_text("a: {b: 2}\n")
    assert parsed() == ({"a": {"b": 2}}, ({"a": "some.yaml:1"}, {"b": "some.yaml:1"}))
