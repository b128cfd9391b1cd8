"""What mckpt knows of megatron-core and transformers is true of the installed ones: args, keys of
config.json, the places of layers, and the ranks that get the parameters of Muon.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import re
import sys
from functools import partial
from importlib.metadata import version as find_version
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from mckpt import mapping
from mckpt.formats.megatron.optimizer import layer_wise
from mckpt.mapping import MappingFile
from mckpt.mapping.inert import inert_keys, is_listed, known_args
from mckpt.mapping.nodes import FOLDER, parse
from tests import read_keys
from tests.helpers import made_models, placement
from tests.helpers.commands import run
from tests.helpers.lazy import torch
from tests.helpers.tiny import STANDS_FOR

# Inert keys of single families that a class of transformers reads, and why they change nothing.
READ = {
    "attention_softmax_in_fp32, scale_attention_softmax_in_fp32": "the precision of a softmax",
    "attn_temperature_tuning": "a dim reads whether it is on",
    "chunk_size, mamba_chunk_size, use_mamba_kernels": "how a scan is cut, not its result",
    "dense_act_fn, is_gated_act": "made from feed_forward_proj, which a dim reads",
    "enable_moe_fp32_combine, reorder_and_upcast_attn": "the precision of a sum",
    "expand": "the width of a Mamba-2 is read from its heads",
    "head_dim, num_key_value_heads": "of latent attention, which has neither; or a width of rope",
    "image_token_id, use_qk_norm, video_token_id, vision_config": "of images",
    "vision_start_token_id": "of images",
    "shared_expert_intermediate_size": "of the talker of Qwen3-Omni, which is carried",
    "ignore_index": "of the loss",
    "index_head_dim, index_local_blocks, index_n_heads": "of an indexer that takes all positions up"
    " to those that the plan names",
    "indexer_types": "refused unless two other keys give the same",
    "is_decoder": "a causal language model is one",
    "intermediate_size": "of dense layers, where a model has none",
    "layer_types": "of caches and masks, where the window is that of another key",
    "enable_moe_block, layers_block_type, mlp_layer_types": "a dim reads it in an expression",
    "hidden_act": "of the towers of Gemma 4, whose text reads hidden_activation",
    "mlp_only_layers, sliding_window_pattern": "a dim reads it in an expression",
    "max_position_embeddings": "the first Qwen reads seq_length in its place",
    "num_logits_to_keep": "how many positions are computed",
    "original_max_position_embeddings": "longrope alone uses it",
    "rescale_prenorm_residual, time_step_floor, time_step_max, time_step_min, time_step_rank": "the"
    " start of the training",
    "residual_in_fp32": "the dtype of a sum",
    "scale_decoder_outputs": "true exactly where the embedding is tied, which a dim reads",
    "sliding_window, use_sliding_window": "with another key off, or of a part that is carried",
    "summary_activation, summary_first_dropout, summary_proj_to_labels, summary_type": "of a head",
    "summary_use_proj": "of a head",
}


@pytest.mark.judge
def test_the_installed_megatron_core_gives_the_same_placement() -> None:
    """The installed megatron-core gives the answers of the rows. It accepts some sizes that
    validate_args has already refused.
    """
    asked = placement.rows()
    command = [sys.executable, "-W", "ignore", "-m", "tests.helpers.placement"]
    done = run(command, input=json.dumps([row[:3] for row in asked]))
    answers = json.loads(done.stdout.splitlines()[-1])
    apart = [
        (row, found)
        for row, found in zip(asked, answers, strict=True)
        if row[3] not in ("lost", None) and found != row[3]
    ]
    assert not apart


@pytest.mark.judge
def test_every_arg_of_the_installed_megatron_is_known() -> None:
    """A new version's fields are carried by a dialect, refused by it away from one value
    (`expect`), or listed in mappings/inert_args.yaml with the reason why they change nothing.
    """
    found = importlib.util.find_spec("megatron.core")
    assert found and found.origin
    core = Path(found.origin).parent
    fields = fields_of(
        core / "model_parallel_config.py", core / "transformer/transformer_config.py"
    )
    assert len(fields) > 200
    for name in mapping.names("run_config"):
        assert unlisted(mapping.load("run_config", name), fields) == []
    trainer = core.parent / "training"  # megatron-core has it from 0.19 on
    args = fields_of(*trainer.glob("config/*_config.py"))
    for path in trainer.glob("*.py"):  # the parser, and what the trainer sets while it runs
        args |= destinations(path.read_text(), path.name == "arguments.py")
    if trainer.exists():
        assert {"num_layers", "curr_iteration", "enable_msc"} <= args
    # made of other args, which the dialects read
    computed = {"activation_func", "gated_linear_unit", "num_moe_experts"}
    for name in ("gpt", "hybrid", "t5", "bert"):
        assert unlisted(mapping.load("megatron", name), args | fields - computed) == []


def test_generation_keys_are_those_of_transformers() -> None:
    """A key is inert as a setting of generation if the installed GenerationConfig has it."""
    from transformers import GenerationConfig

    listed = set(parse(FOLDER / "inert_keys.yaml")[0]["generation"]["names"].split())
    fields = {name for name in GenerationConfig().to_dict() if not name.startswith("_")}
    assert fields - inert_keys() == set()
    assert listed - fields == set()


def test_no_class_of_transformers_computes_with_an_inert_key() -> None:
    """The source of a class does not read the keys that its family does not convert, but for those
    that are known to change nothing.
    """
    groups = parse(FOLDER / "inert_keys.yaml")[0].values()
    harmless = {key for group in groups if group.get("read") for key in group["names"].split()}
    harmless.update(key for keys in READ for key in keys.split(", "))
    sources = classes_of_transformers()
    assert "rms_norm_eps" in keys_read(sources["LlamaForCausalLM"])
    found: dict[str, set[str]] = {}
    # classes that a newer transformers than this one has
    newer = {made_models.config(case)["architectures"][0] for case in made_models.SINCE}
    for family in map(partial(mapping.load, "hf"), mapping.names("hf")):
        for named in family.architectures:
            if (source := sources.get(STANDS_FOR.get(named, named))) is None:
                assert named in newer, named
                continue
            read = keys_read(source)
            found.setdefault(family.name, set()).update(read & family.inert)
    assert {name: keys - harmless for name, keys in found.items() if keys - harmless} == {}
    assert harmless - set().union(*found.values()) - inert_keys() == set()


def test_no_family_lists_a_key_that_is_inert_in_all() -> None:
    for name in mapping.names("hf"):
        own = parse(FOLDER / "hf" / f"{name}.yaml")[0].get("inert") or ()
        assert not inert_keys().intersection(key for keys in own for key in keys)


def test_the_table_of_read_keys_is_that_of_its_transformers() -> None:
    """`python -m tests.read_keys` writes it again."""
    if find_version("transformers") != parse(read_keys.TABLE)[0]["transformers"]:
        pytest.skip("the table is of another version of transformers")
    assert read_keys.TABLE.read_text() == read_keys.table(), "run: python -m tests.read_keys"


def classes_of_transformers() -> dict[str, str]:
    """Returns the source of the file of each class of transformers."""
    found = importlib.util.find_spec("transformers")
    assert found and found.origin
    out = {}
    for path in Path(found.origin).parent.glob("models/*/modeling_*.py"):
        text = path.read_text()
        out.update(dict.fromkeys(re.findall(r"^class (\w+)", text, re.MULTILINE), text))
    return out


def keys_read(source: str) -> set[str]:
    """Returns the keys that code reads from a config."""
    return set(re.findall(r"config(?:\.|, \")(\w+)", source))


def fields_of(*paths: Path) -> set[str]:
    """Returns the fields of the dataclasses in some files of Python."""
    return {
        line.target.id
        for path in paths
        for made in ast.walk(ast.parse(path.read_text()))
        if isinstance(made, ast.ClassDef)
        for line in made.body
        if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name)
    }


def destinations(source: str, parser: bool) -> set[str]:
    """Returns the names under which code stores args: those that it sets, and those of its flags.

    parser: whether its flags are those of the trainer.
    """
    found = set(re.findall(r"\bargs\.(\w+) = ", source))
    for node in ast.walk(ast.parse(source)) if parser else ():
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "add_argument":
            named = [k.value for k in node.keywords if k.arg == "dest"] or node.args[:1]
            texts = [one.value for one in named if isinstance(one, ast.Constant)]
            found.update(str(text).lstrip("-").replace("-", "_") for text in texts)
    return found


def unlisted(file: MappingFile, names: set[str]) -> list[str]:
    known = known_args(file) | set(file.values)  # of some values
    return sorted(n for n in names - known if not is_listed(n))


@pytest.mark.judge
@pytest.mark.skipif(not find_spec("emerging_optimizers"), reason="needs megatron-core 0.19")
def test_megatron_core_deals_out_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.core.optimizer import layer_wise_optimizer

    monkeypatch.setattr(layer_wise_optimizer, "get_pg_rank", lambda group: group)
    numels = np.random.default_rng(0).integers(1, 9, 23).tolist()
    parameters = [torch.empty(n) for n in numels]
    experts = [bool(i % 3 == 0) for i in range(23)]
    for data, expert_data in ((3, 2), (2, 1)):
        own = SimpleNamespace(dp_cp=0, expt_dp=0)
        groups = [
            {"params": [p for p, e in zip(parameters, experts, strict=True) if e == expert]}
            | {"is_expert_parallel": expert}
            for expert in (False, True)
        ]
        of = layer_wise_optimizer.LayerWiseDistributedOptimizer._shard_params_ping_pong
        of(own, [SimpleNamespace(param_groups=groups)], data, expert_data)
        for expert, ranks, lists in (
            (False, data, own.dp_cp_params_list),
            (True, expert_data, own.expt_dp_params_list),
        ):
            mine = [p for p, e in zip(parameters, experts, strict=True) if e == expert]
            dealt = layer_wise.deal([len(p) for p in mine], ranks)
            for rank, held in enumerate(lists or []):
                wanted = [id(p) for p, r in zip(mine, dealt, strict=True) if r == rank]
                assert sorted(map(id, held)) == sorted(wanted)
