"""Mapping files: one broken file for each rule, expressions, and configs both ways."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import mckpt
from mckpt import api, mapping
from mckpt.checkpoint import inspection
from mckpt.conversion.to_hf import choose_family
from mckpt.errors import MappingError, UsageError
from mckpt.mapping.expression import Expression, ExpressionError
from tests import tiny
from tests.tiny import FIXTURES, TinyModel

CONFIGS = sorted((FIXTURES / "configs").rglob("*.json"))
IDS = [str(p.relative_to(FIXTURES / "configs")) for p in CONFIGS]
TINY = [FIXTURES / "tiny" / f"{case}.json" for case in tiny.CASES]


# ------------------------------------------------------------------------------------- broken files


BROKEN: dict[str, tuple[str, str]] = {
    "unknown section": (
        "extends: llama\ntensor: {}\n",
        r"my\.yaml:2: 'tensor' is not a key of a mapping file; the keys are architectures, extends",
    ),
    "unknown dim": (
        "extends: llama\ndims:\n  num_layer: n_layer\n",
        r"my\.yaml:3: logical\.yaml has no dim 'num_layer'",
    ),
    "a broken requires": (
        'extends: llama\nrequires: "mla and ("\n',
        r"my\.yaml: 'mla and \(' is no expression",
    ),
    "a broken derive": (
        "extends: llama\nderive:\n  a: 1 +\n",
        r"my\.yaml:3: '1 \+' is no expression",
    ),
    "a broken also": ("extends: llama\nalso:\n  b: c =\n", r"my\.yaml:3: 'c =' is no expression"),
    "a broken inexact": (
        "extends: llama\ninexact:\n  x: {when: num_layers !=, why: w}\n",
        r"my\.yaml:3: 'num_layers !=' is no expression",
    ),
    "inexact without why": (
        "extends: llama\ninexact:\n  x: {when: 'True'}\n",
        r"my\.yaml:3: x wants `when` and `why`",
    ),
    "a broken instead": (
        (
            "extends: llama\nblocks:\n  foo.:\n    instead: {when: 1 +, key: bar.}\n    tensors:"
            " {a.weight: /embed.weight}\n"
        ),
        r"my\.yaml:3: '1 \+' is no expression",
    ),
    "half an instead": (
        (
            "extends: llama\nblocks:\n  foo.:\n    instead: {key: bar.}\n    tensors: {a.weight:"
            " /embed.weight}\n"
        ),
        r"my\.yaml:3: `instead` of foo\. wants `key` and `when`",
    ),
    "a dim that says nothing": (
        "extends: llama\ndims:\n  head_dim: {default: '128'}\n",
        r"my\.yaml:3: head_dim has no key, no const and no read",
    ),
    "unknown word of a dim": (
        "dims:\n  head_dim: {keys: head_dim}\n",
        r"my\.yaml:2: head_dim may say key, default, values, const, read",
    ),
    "a dim that is a list": (
        "dims:\n  head_dim: [head_dim]\n",
        r"my\.yaml:2: head_dim may say key, .*not \['head_dim'\]",
    ),
    "unknown tensor": (
        "tensors:\n\n  wte.weight: embeddings.weight\n",
        r"my\.yaml:3: wte\.weight: logical\.yaml has no tensor 'embeddings\.weight'",
    ),
    "unknown tensor of a block": (
        (
            "blocks:\n  h.{layer}.:\n    is: layers.{layer}.\n    tensors:\n      c_attn.weight:"
            " attn.qkv.weight\n"
        ),
        (
            r"my\.yaml:5: h\.\{layer\}\.c_attn\.weight: logical\.yaml has no tensor"
            r" 'layers\.\{layer\}\.attn\.qkv\.weight'"
        ),
    ),
    "unknown packing": (
        "tensors:\n  a: {pack: zip, of: [embed.weight, lm_head.weight]}\n",
        r"my\.yaml:2: a: no packing 'zip'; known: one, concat, gated, qkv",
    ),
    "several tensors and no pack": (
        "tensors:\n  a: {of: [embed.weight, lm_head.weight]}\n",
        r"my\.yaml:2: a: several tensors need a `pack`",
    ),
    "unknown tp kind": (
        "tensors:\n  a: {of: embed.weight, tp: columns}\n",
        r"my\.yaml:2: a: no tp kind 'columns'; known: column, row, vocab, replicated",
    ),
    "unknown word of a rule": (
        "tensors:\n  a: {of: embed.weight, stages: first}\n",
        r"my\.yaml:2: a: a rule may say of, pack, .*, not stages",
    ),
    "a bad expression": (
        "tensors:\n  a: {of: embed.weight, when: not tied and}\n",
        r"my\.yaml:2: 'not tied and' is no expression",
    ),
    "a bad expression of a dim": (
        "dims:\n  head_dim: {key: d, default: hidden_size //}\n",
        r"my\.yaml:2: 'hidden_size //' is no expression",
    ),
    "a call": (
        "tensors:\n  a: {of: embed.weight, when: open('x')}\n",
        r"my\.yaml:2: .*only all, any, .*, is_list can be called",
    ),
    "a call of an attribute": (
        "tensors:\n  a: {of: embed.weight, when: config.pop('x')}\n",
        r"my\.yaml:2: .*can be called",
    ),
    "a key twice": (
        "tensors:\n  a: embed.weight\n  a: lm_head.weight\n",
        r"my\.yaml:3: 'a' stands here twice \(first in line 2\)",
    ),
    "a section twice": (
        "inert: []\ndims: {}\ninert: []\n",
        r"my\.yaml:3: 'inert' stands here twice \(first in line 1\)",
    ),
    "extends what is not there": (
        "extends: lama\n",
        r"my\.yaml:1: there is no mapping 'lama' to extend",
    ),
    "extends itself": (
        "extends: my\n",
        r"my\.yaml:1: there is no mapping 'my' to extend \(it extends itself\)",
    ),
    "an index not of the tensor": (
        "tensors:\n  a.{layer}: embed.weight\n",
        r"my\.yaml:2: a\.\{layer\}: \{layer\} is not an index of embed\.weight",
    ),
    "an unknown index": (
        (
            "blocks:\n  h.{layer}.:\n    is: layers.{layer}.\n    tensors:\n      e.{e}.weight:"
            " moe.experts.{expert}.up.weight\n"
        ),
        r"my\.yaml:5: h\.\{layer\}\.e\.\{e\}\.weight: \{e\} is not an index of",
    ),
    "different indices": (
        "tensors:\n  a: {pack: concat, of: [embed.weight, 'layers.{layer}.attn_norm.weight']}\n",
        r"my\.yaml:2: a: its tensors do not have the same indices",
    ),
    "not YAML": ("tensors: {a: [}\n", r"(?s)my\.yaml: not valid YAML: .*line 1"),
    "a tag of Python": (
        "tensors: !!python/object/apply:os.system ['true']\n",
        r"my\.yaml: not valid YAML: .*could not determine a constructor",
    ),
    "braces of other lengths": (
        (
            "blocks:\n  h.{layer}.:\n    is: layers.{layer}.\n    tensors:\n      '{q,k,v}.weight':"
            " 'attn.{q,k}.weight'\n"
        ),
        r"my\.yaml:5: h\.\{layer\}\.\{q,k,v\}\.weight: \{q,k\} has 2 words, and the key has 3",
    ),
    "braces on one side": (
        "tensors:\n  a: '{embed,lm_head}.weight'\n",
        r"my\.yaml:2: a: \{embed,lm_head\} has 2 words, and the key has 0",
    ),
    "a section that is text": (
        "extends: llama\ntensors: embed.weight\n",
        r"my\.yaml:2: tensors holds keys and values, not 'embed\.weight'",
    ),
    "architectures as text": (
        "architectures: LlamaForCausalLM\n",
        r"my\.yaml:1: architectures holds a list, not 'LlamaForCausalLM'",
    ),
    "a block that is text": (
        "blocks:\n  h.: layers.\n",
        r"my\.yaml:2: h\. holds keys and values, not 'layers\.'",
    ),
    "values that are no list": (
        "expect:\n  rope_type: rope\n",
        r"my\.yaml:2: rope_type holds a list, not 'rope'",
    ),
    "a rule that is a number": (
        "tensors:\n  a: 5\n",
        r"my\.yaml:2: a: wants a tensor, or of, pack, .*, not 5",
    ),
    "a number in `of`": (
        "tensors:\n  a: {of: [1, 2], pack: concat}\n",
        r"my\.yaml:2: a: `of` names tensors, not \[1, 2\]",
    ),
    "a list": ("- a\n- b\n", r"my\.yaml: a mapping file holds keys and values, not list"),
    "nothing": ("", r"my\.yaml: a mapping file holds keys and values, not NoneType"),
    "a key that is no name": (
        "tensors:\n  1.5: embed.weight\n",
        r"my\.yaml:2: the key 1\.5 must be a name",
    ),
    "no UTF-8": ("\udcff", r"my\.yaml: cannot be read"),
}


@pytest.mark.parametrize("what", BROKEN)
def test_the_error_of_a_broken_file_names_the_line(what: str, tmp_path: Path) -> None:
    text, message = BROKEN[what]
    path = tmp_path / "my.yaml"
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(MappingError, match=message):
        mapping.load("hf", str(path))


def test_braces() -> None:
    """One rule for each word, on both sides."""
    rules = {r.key: r.of for r in mapping.load("hf", "llama").rules}
    for word in "qkv":
        assert rules[f"model.layers.{{layer}}.self_attn.{word}_proj.weight"] == (
            f"layers.{{layer}}.attn.{word}.weight",
        )
    assert not any("," in key for key in rules)


def test_all_problems_at_once(tmp_path: Path) -> None:
    path = tmp_path / "my.yaml"
    path.write_text(
        "dims:\n  no_such: x\ntensors:\n  a: nothing\n  b: {of: embed.weight, tp: diagonal}\n"
    )
    with pytest.raises(MappingError) as caught:
        mapping.load("hf", str(path))
    assert [f"my.yaml:{line}:" in str(caught.value) for line in (2, 4, 5)] == [True] * 3


def test_a_line_of_the_base_is_named_in_the_base(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text("tensors:\n  a: nothing\n")
    (tmp_path / "my.yaml").write_text("# one\n# two\n# three\nextends: base\n")
    with pytest.raises(MappingError, match=r"base\.yaml:2: a: "):
        mapping.load("hf", str(tmp_path / "my.yaml"))


def test_no_such_file(tmp_path: Path) -> None:
    with pytest.raises(
        MappingError,
        match=r"no mapping 'lama'; known: .*llama, mistral.*path of a file that ends in \.yaml",
    ):
        mapping.load("hf", "lama")
    with pytest.raises(MappingError, match=r"none\.yaml: no such file$"):
        mapping.load("hf", str(tmp_path / "none.yaml"))


def test_an_unknown_architecture_shows_how_to_write_a_file() -> None:
    with pytest.raises(
        MappingError,
        match=(
            r"(?s)no family has the architecture NoSuchForCausalLM; known: .*my\.yaml.*extends:"
            r" llama.*--mapping my\.yaml"
        ),
    ):
        mapping.family_with("NoSuchForCausalLM")


@pytest.mark.parametrize(
    ("kind", "name"), [(kind, name) for kind in ("hf", "megatron") for name in mapping.names(kind)]
)
def test_every_file_that_comes_with_mckpt(kind: str, name: str) -> None:
    """It is a mapping; every dim without a neutral value is said; every inert key is no key of a
    dim.
    """
    file = mapping.load(kind, name)
    assert file.rules
    silent = [
        d for d, about in mapping.hub().dims.items() if about.neutral is None and d not in file.dims
    ]
    assert silent == []
    used = {e for r in file.rules for e in r.of}
    assert used <= set(mapping.hub().tensors)
    assert not file.inert & {k for d in file.dims.values() for k in d.keys}


def test_a_mapping_is_frozen() -> None:
    loaded: Any = mapping.load("hf", "llama")
    with pytest.raises(AttributeError):
        loaded.rules = ()
    assert mapping.load("hf", "qwen3") is mapping.load("hf", "qwen3")
    before = len(mapping.load("hf", "llama").rules)
    mapping.load("hf", "mixtral")  # which takes rules of its base away
    assert len(mapping.load("hf", "llama").rules) == before


# -------------------------------------------------------------------------------------- expressions


SCOPE = {
    "a": 3,
    "b": 2.5,
    "xs": [1, 0, 1],
    "none": None,
    "config": {"k": 7, "inner": {"z": 1}},
    "yes": True,
}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("a + 2 * 4 - 1", 10),
        ("7 // 2", 3),
        ("7 / 2", 3.5),
        ("7 % 4", 3),
        ("-a", -3),
        ("not yes", False),
        ("a == 3 and b < 3", True),
        ("1 < a <= 3", True),
        ("3 < a <= 3", False),
        ("none or 5", 5),
        ("0 or none", None),
        ("1 and 2", 2),
        ("0 and 2", 0),
        ("xs[0]", 1),
        ("xs[-1]", 1),
        ("config.k", 7),
        ("config.missing", None),
        ("config.inner.z", 1),
        ("config.inner.no.deeper", None),
        ("config.k.deeper", None),
        ("'x' if yes else 'y'", "x"),
        ("a in [1, 3]", True),
        ("a not in [1, 3]", False),
        ("[i * 2 for i in range(4)]", [0, 2, 4, 6]),
        ("[i for i in xs if i]", [1, 1]),
        ("any(xs)", True),
        ("all(xs)", False),
        ("len(xs)", 3),
        ("max(a, 1)", 3),
        ("min(a, 1)", 1),
        ("float(a)", 3.0),
        ("int('4')", 4),
        ("bool(none)", False),
        ("is_list(xs)", True),
        ("is_list(a)", False),
        ("[1] * 3", [1, 1, 1]),
        ("'torch.' + 'float32'", "torch.float32"),
        ("none != None", False),
        ("[[j for j in range(i)] for i in range(3)]", [[], [0], [0, 1]]),
        ("True", True),
        (True, True),
        (7, 7),
        (1.5, 1.5),
    ],
)
def test_expressions(text: Any, value: Any) -> None:
    assert Expression(text)(SCOPE) == value


def test_names_are_the_free_ones() -> None:
    assert Expression("[i + layer for i in range(n) if moe[i]]").names == {"layer", "n", "moe"}


# not in the language: no calls but of a few functions, no attributes but of dicts, no statements
NO_EXPRESSIONS = r"""
__import__('os')
().__class__
(1).__class__
[].__class__
''.join(xs)
xs.append(1)
open('x')
eval('1')
lambda: 1
(lambda: 1)()
{1: 2}
{1, 2}
{i for i in xs}
{i: i for i in xs}
(i for i in xs)
(1, 2)
f'{a}'
a := 1
(a := 1)
import os
a; b
a = 1
*xs
range(*xs)
max(key=a)
2 ** 9
1 << 9
a | 1
a & 1
a ^ 1
~a
+a
a @ b
await a
yield
xs[0:1]
...
a is b
a is not b
[i for i, j in xs].x
config['k'].x
(a + b).real
print(1)
getattr(a, 'x')
type(a)
range.__call__(3)
any.x(1)
(
1 +
a b
b'x'
1j
"""
ODD = ["", "\x00", "(" * 500 + ")" * 500, "+".join("1" * 1500)]


@pytest.mark.parametrize("text", [*NO_EXPRESSIONS.strip().split("\n"), *ODD])
def test_other_python_is_no_expression(text: str) -> None:
    with pytest.raises(ExpressionError):
        Expression(text)


NO_VALUES = r"""
missing
a[0]
xs[9]
1 / 0
a % 0
none + 1
len(a)
int('x')
[i for i in a]
max()
range('x')
range(10000000)
len(range(0, 99999999999))
[0] * 100000000000
'x' * 100000000000
100000000000 * [0]
[i for i, j in xs]
[i + j for i in xs for j in xs]
any
"""


@pytest.mark.parametrize("text", NO_VALUES.strip().split("\n"))
def test_an_expression_without_a_value_is_an_error(text: str) -> None:
    """Refused when it is parsed or when it is asked for, at once either way, and as the
    one error.
    """
    with pytest.raises(ExpressionError):
        Expression(text)(SCOPE)


def test_attributes_read_dicts_only() -> None:
    """Never an attribute of a Python object, whatever its name."""

    class Secret:
        k = "secret"

    assert Expression("config.k")({"config": Secret()}) is None
    assert Expression("config.__class__")({"config": {}}) is None
    assert Expression("a.__class__.__base__")(SCOPE) is None


# --------------------------------------------------------------------------------------------- dims


def bears(config: dict[str, Any]) -> dict[str, Any]:
    """The keys of a config that bear on logits, by the names of transformers 4; null is as absent.

    Listed by hand, apart from mappings/.
    """
    keys = """
        vocab_size hidden_size num_hidden_layers num_attention_heads num_key_value_heads head_dim
        intermediate_size hidden_act rms_norm_eps rope_theta tie_word_embeddings attention_bias
        mlp_bias max_position_embeddings num_local_experts num_experts num_experts_per_tok
        moe_intermediate_size norm_topk_prob decoder_sparse_step mlp_only_layers model_type
        architectures q_lora_rank kv_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim
        n_routed_experts n_shared_experts first_k_dense_replace moe_layer_freq n_group topk_group
        routed_scaling_factor scoring_func topk_method num_nextn_predict_layers
        """
    out = {k: config[k] for k in keys.split() if config.get(k) is not None}
    # the same model
    out["model_type"] = {"kimi_k2": "deepseek_v3"}.get(config["model_type"], config["model_type"])
    if config.get("use_sliding_window", True) and config.get("sliding_window"):
        out["sliding_window"] = config["sliding_window"]
    rope = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    out.update({k: rope.pop(k) for k in ("rope_theta",) if k in rope})
    rope["rope_type"] = rope.pop("type", rope.get("rope_type")) or "default"
    out.update({f"rope.{k}": v for k, v in rope.items()})
    if "num_local_experts" in out and config["model_type"] == "qwen3_moe":
        out["num_experts"] = out.pop("num_local_experts")  # transformers 5
    return out


@pytest.mark.parametrize("path", [*CONFIGS, *TINY], ids=[*IDS, *(f"tiny/{p.name}" for p in TINY)])
def test_write_of_read_is_the_config(path: Path) -> None:
    """On every key that bears on logits; what is written beyond them is what transformers takes for
    granted.
    """
    config = json.loads(path.read_text())
    family = mapping.load("hf", mapping.family_with(config["architectures"][0]))
    dims = family.read(config)
    written = {"architectures": list(family.architectures), **family.write(dims)}
    wanted, found = bears(config), bears(written)
    assert {k: found.get(k) for k in wanted} == wanted
    assert family.read(written) == dims
    assert family.inexact(dims) == {}
    # which is about how weights are stored, and not the family's
    assert set(family.unknown(config)) <= {"quantization_config"}
    assert all(type(v) in (int, float, bool, str, list, type(None)) for v in dims.values())


@pytest.mark.parametrize("path", CONFIGS, ids=IDS)
def test_megatron_args_say_what_the_config_says(path: Path) -> None:
    """Through Megatron's args and back: equal dims, but for what the plan calls inexact; and one
    family is chosen from args alone.
    """
    config = json.loads(path.read_text())
    name = mapping.family_with(config["architectures"][0])
    family, dialect = mapping.load("hf", name), mapping.load("megatron", "mcore")
    dims = family.read(config)
    inexact = dialect.inexact(dims)
    again = dialect.read(dialect.write(dims))
    free = {d for d, spec in family.dims.items() if spec.free}
    apart = {k for k in dims if dims[k] != again[k]} - free
    assert apart <= inexact.keys()
    known = {
        "mistral-7b-v0.1": {"sliding_window"},
        "llama-3.2-1b": {"rope_factor"},
        "kimi-k2": {"rope_beta_fast"},
    }
    wanted = known.get(path.stem, set())
    assert inexact.keys() == wanted, inexact

    source: Any = SimpleNamespace(naming=api.Known(), dims=again, path=path)
    chosen, note = choose_family(source)
    assert chosen.name == ("llama" if name == "mistral" else name), note
    written = {"architectures": [chosen.architectures[0]], **chosen.write(again)}
    same = {k: v for k, v in bears(written).items() if k not in ("architectures", "model_type")}
    wanted_keys = {
        k: v
        for k, v in bears(config).items()
        if k not in ("architectures", "model_type", "sliding_window")
    }
    assert {k: same.get(k) for k in wanted_keys} == wanted_keys


def llama(**changed: Any) -> dict[str, Any]:
    return {k: v for k, v in {**tiny.config("llama"), **changed}.items() if v != "drop"}


REFUSED: dict[str, tuple[dict[str, Any], list[str]]] = {
    "missing": (
        {"hidden_size": "drop", "num_hidden_layers": "drop"},
        [
            "num_hidden_layers is missing (decoder layers)",
            "hidden_size is missing (width of the residual stream)",
        ],
    ),
    "types": (
        {
            "hidden_size": "64",
            "rms_norm_eps": "1e-5x",
            "tie_word_embeddings": 1,
            "vocab_size": True,
            "intermediate_size": 2.5,
        },
        [
            "hidden_size is '64', and must be of type int",
            "norm_eps is '1e-5x', and must be of type float",
            "tied is 1, and must be of type bool",
            "vocab_size is True, and must be of type int",
            "ffn_size is 2.5, and must be of type int",
        ],
    ),
    "negative": ({"num_hidden_layers": -1}, ["num_layers is -1, and must be from 1 to 10000"]),
    "values": ({"hidden_act": "gelu"}, ["hidden_act is 'gelu'; llama.yaml knows 'silu'"]),
    "rope type": (
        {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}},
        ["rope_scaling.rope_type is 'yarn'; llama.yaml knows 'default', 'llama3'"],
    ),
    "disagree": (
        {"rope_parameters": {"rope_theta": 5.0}},
        ["says two things of rope_theta: rope_theta", "rope_parameters.rope_theta 5.0"],
    ),
    "lists": ({"hidden_size": [64]}, ["hidden_size is [64], and must be of type int"]),
    "rope incomplete": (
        {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
        ["rope_scaling.low_freq_factor", "is missing"],
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_config_that_cannot_be_read_lists_all(what: str) -> None:
    changed, messages = REFUSED[what]
    with pytest.raises(MappingError) as caught:
        mapping.load("hf", "llama").read(llama(**changed), source="some/config.json")
    text = str(caught.value)
    assert text.startswith("some/config.json does not describe a model that llama.yaml knows:")
    for message in messages:
        assert message in text
    assert "could not be read" not in text


def test_known_dims_fill_silence_and_must_agree() -> None:
    family = mapping.load("hf", "llama")
    assert family.read(llama(vocab_size="drop"), {"vocab_size": 9})["vocab_size"] == 9
    assert family.read(llama(), {"vocab_size": 131})["vocab_size"] == 131
    with pytest.raises(MappingError, match="vocab_size is 131 by vocab_size, but 9 was given"):
        family.read(llama(), {"vocab_size": 9})


def test_a_config_of_a_billion_layers_costs_no_memory() -> None:
    """mixtral.yaml makes a list of as many entries as there are layers."""
    with pytest.raises(MappingError, match="must be from 1 to 10000"):
        mapping.load("hf", "mixtral").read({**tiny.config("mixtral"), "num_hidden_layers": 10**9})


def test_inert_keys_need_no_inner_list(tmp_path: Path) -> None:
    (tmp_path / "my.yaml").write_text("extends: llama\ninert: [one_key, [another]]\n")
    assert mapping.load("hf", str(tmp_path / "my.yaml")).inert == mapping.load(
        "hf", "llama"
    ).inert | {"one_key", "another"}


def test_scores_of_latent_attention_are_scaled_without_yarn_too() -> None:
    """By megatron-core (multi_latent_attention.py), and by no family."""
    dialect, family = mapping.load("megatron", "mcore"), mapping.load("hf", "deepseek_v3")
    args = dialect.write(family.read(tiny.config("deepseek-v3-plain")))
    assert dialect.read(args)["rope_type"] == "default"
    dims = dialect.read({**args, "rotary_scaling_factor": 40, "mscale_all_dim": 1.0})
    assert "rope_type is 'mscale'" in family.inexact(dims)["config"]


def test_an_arg_without_a_dim_is_refused() -> None:
    """Expectations of the dialect: unset is as listed, another value is another model."""
    dialect = mapping.load("megatron", "mcore")
    dims = mapping.load("hf", "llama").read(llama())
    args = dialect.write(dims)
    assert dialect.read({**args, "qk_l2_norm": None}) == dims
    with pytest.raises(MappingError, match=r"qk_l2_norm is True, and mcore\.yaml knows only False"):
        dialect.read({**args, "qk_l2_norm": True})
    with pytest.raises(
        MappingError, match=r"(?s)position_embedding_type is 'none'.*glu_linear_offset is 1\.0"
    ):
        dialect.read({**args, "position_embedding_type": "none", "glu_linear_offset": 1.0})


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@pytest.mark.parametrize(
    ("changed", "name"),
    [
        ({"rope_scaling": {**LLAMA3, "factor": 32.0}}, "rope_factor"),
        ({"rope_scaling": {**LLAMA3, "low_freq_factor": 2.0}}, "rope_low_freq_factor"),
        ({"rope_theta": 10000.5}, "rope_theta"),
        ({"mlp_bias": True}, "qkv_bias"),
    ],
)
def test_inexact_names_the_dim(changed: dict[str, Any], name: str) -> None:
    found = mapping.load("megatron", "mcore").inexact(
        mapping.load("hf", "llama").read(llama(**changed))
    )
    assert name in found
    assert found[name].startswith(f"{name} is ")


def test_a_window_is_inexact_and_refused_by_a_plan(tmp_path: Path) -> None:
    source = tiny.tiny_random("mistral", tmp_path / "hf")
    config = json.loads((source / "config.json").read_text())
    tiny.write_json(source / "config.json", {**config, "sliding_window": 16})
    with pytest.raises(
        MappingError,
        match=(
            r"sliding_window is 16, and mcore would compute with None\n.*--allow-inexact"
            r" sliding_window"
        ),
    ):
        mckpt.plan(source, tmp_path / "out")
    mckpt.plan(source, tmp_path / "out", allow_inexact=["sliding_window"])


def test_unknown_keys_of_a_config() -> None:
    """Those that say nothing are no trouble; a plan to Megatron refuses the others by name."""
    family = mapping.load("hf", "llama")
    assert family.unknown(
        llama(final_logit_softcapping=30.0, new_flag=False, other=None, empty=[], nothing={})
    ) == ["final_logit_softcapping"]
    assert family.unknown(llama()) == []


def test_keys_that_a_file_expects_are_known(tmp_path: Path) -> None:
    """transformers 5 writes rope_interleave: true into the config.json of a DeepSeek-V3."""
    source = tiny.tiny_random("deepseek-v3", tmp_path / "hf", rope_interleave=True)
    assert (
        mapping.load("hf", "deepseek_v3").unknown(json.loads((source / "config.json").read_text()))
        == []
    )
    mckpt.plan(source, tmp_path / "out")
    other = tiny.tiny_random("deepseek-v3", tmp_path / "other", rope_interleave=False)
    with pytest.raises(
        MappingError, match=r"rope_interleave is False, and deepseek_v3\.yaml knows only True"
    ):
        mckpt.plan(other, tmp_path / "out")


def test_an_unknown_key_is_refused_by_a_plan(tmp_path: Path) -> None:
    source = tiny.tiny_random("llama", tmp_path / "hf")
    tiny.write_json(source / "config.json", llama(final_logit_softcapping=30.0))
    with pytest.raises(
        MappingError,
        match=r"says final_logit_softcapping 30\.0, of which llama\.yaml knows nothing",
    ):
        mckpt.plan(source, tmp_path / "out")
    mckpt.plan(source, tmp_path / "out", allow_inexact=["final_logit_softcapping"])


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("num_layers=3", ("num_layers", 3)),
        ("tied=true", ("tied", True)),
        ("rope_theta=5.0", ("rope_theta", 5.0)),
        ("moe_layers=[0, 1]", ("moe_layers", [0, 1])),
    ],
)
def test_settings(text: str, value: Any) -> None:
    assert mapping.parse_setting(text) == value


@pytest.mark.parametrize(
    "text",
    ["num_layers", "layers=3", "num_layers=three", "tied=3", "num_layers=-1", "num_layers=[", "=3"],
)
def test_settings_refused(text: str) -> None:
    with pytest.raises(UsageError, match=re.escape(f"--set {text!r}")):
        mapping.parse_setting(text)


# ------------------------------------------------------------------------- a file of the user's own


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
    """The tiny Llama under MINE's names, its weights fused by numpy; returns its tensors."""
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


def test_a_file_of_the_users_own(tmp_path: Path) -> None:
    """Another prefix, other names, fused weights: to Megatron, where it is the Llama it was made
    of, and back under its own names.
    """
    (tmp_path / "mine.yaml").write_text(MINE)
    arrays = mine(tmp_path / "mine")
    known = mckpt.Known(mapping=str(tmp_path / "mine.yaml"))
    with pytest.raises(MappingError, match="no family has the architecture MineForCausalLM"):
        mckpt.plan(tmp_path / "mine", tmp_path / "out")
    mckpt.plan(
        tmp_path / "mine",
        tmp_path / "out",
        known=known,
        format="torch",
        parallel=mckpt.Parallel(tp=2, pp=2),
    ).run()
    plain = tiny.tiny_random("llama", tmp_path / "llama")
    found = mckpt.diff(plain, mckpt.open(tmp_path / "out", mapping=str(tmp_path / "mine.yaml")))
    assert not found, found.json()
    assert found.same > 30

    mckpt.plan(tmp_path / "out", tmp_path / "back", known=known, format="hf").run()
    again = mckpt.open(tmp_path / "back", mapping=str(tmp_path / "mine.yaml"))
    assert set(again.opened.entries) == set(arrays)
    assert json.loads((tmp_path / "back" / "config.json").read_text()) == json.loads(
        (tmp_path / "mine" / "config.json").read_text()
    )
    raw = (tmp_path / "back" / "model.safetensors").read_bytes()
    for key, entry in again.opened.entries.items():
        assert raw[entry.at : entry.at + arrays[key].nbytes] == arrays[key].tobytes(), key


WITHOUT_NORMS = """
extends: llama
ignore:
  model.norm.weight: left out
  "model.layers.{layer}.post_attention_layernorm.weight": left out
tensors:
  model.norm.weight: null
blocks:
  model.layers.{layer}.:
    tensors:
      post_attention_layernorm.weight: null
"""


def test_all_tensors_that_the_other_side_lacks_are_one_error(
    tiny_model: TinyModel, tmp_path: Path
) -> None:
    """A family file without two norms; `mappings check` finds the same."""
    (tmp_path / "mine.yaml").write_text(WITHOUT_NORMS)
    source = tiny_model("llama")
    known = mckpt.Known(mapping=str(tmp_path / "mine.yaml"))
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
            mckpt.plan(source, tmp_path / "out", known=known, **wanted)
        assert list(caught.value.problems) == lacking
    with pytest.raises(MappingError) as caught:
        inspection.check_mapping(tmp_path / "mine.yaml", source / "config.json")
    assert list(caught.value.problems) == lacking


def test_a_plan_asks_for_what_the_target_model_has(tiny_model: TinyModel, tmp_path: Path) -> None:
    """A family whose norms are LayerNorms, and which names no biases for them: Megatron's model has
    biases.
    """
    (tmp_path / "mine.yaml").write_text("extends: llama\ndims:\n  norm: {const: layernorm}\n")
    source = tiny_model("llama")
    with pytest.raises(MappingError) as caught:
        mckpt.plan(source, tmp_path / "out", known=mckpt.Known(mapping=str(tmp_path / "mine.yaml")))
    lacking = [problem.split()[0] for problem in caught.value.problems]
    assert lacking == [
        "final_norm.bias",
        "layers.{layer}.attn_norm.bias",
        "layers.{layer}.mlp_norm.bias",
    ]


def test_a_model_that_its_file_does_not_fit(tmp_path: Path) -> None:
    """Missing, left over and of another shape, all at once."""
    (tmp_path / "mine.yaml").write_text(MINE)
    mine(tmp_path / "mine")
    arrays = tiny.tensors({**tiny.config("llama"), "num_hidden_layers": 1})
    arrays["wte.weight"] = arrays.pop("model.embed_tokens.weight")[:5]
    (tmp_path / "mine" / "model.safetensors").unlink()
    tiny.write_weights(tmp_path / "mine", arrays)
    with pytest.raises(mckpt.errors.SourceError) as caught:
        mckpt.plan(
            tmp_path / "mine",
            tmp_path / "out",
            known=mckpt.Known(mapping=str(tmp_path / "mine.yaml")),
        )
    text = str(caught.value)
    assert (
        "wte.weight is [5, 64] in model.safetensors, and should be [131, 64] by config.json" in text
    )
    assert "ln_f.weight is missing; it should be [64]" in text
    assert "and 16 more" in text
