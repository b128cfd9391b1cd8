"""A checkpoint records how it was made.

It keeps the user's family file, the differences that --allow-inexact permitted, and dims that the
user corrected, so that later commands need no flag of the first one.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from mckpt import mapping
from mckpt.checkpoint.checkpoint import Checkpoint
from mckpt.errors import MappingError
from mckpt.options import SourceOptions
from tests.helpers import tiny
from tests.helpers.commands import edit_json, good, hf, mckpt, refused, shard, tree
from tests.helpers.tiny import TinyModel

MINE = """
architectures: [MineForCausalLM]
extends: base
dims:
  activation: {key: hidden_act, values: {gelu_pytorch_tanh: gelu_tanh}}
blocks:
  model.layers.{layer}.:
    tensors:
      post_attention_layernorm.weight: null
      ln_2.weight: mlp_norm.weight
"""
BASE = """
extends: llama
tensors:
  model.norm.weight: null
  ln_f.weight: final_norm.weight
blocks:
  model.layers.{layer}.:
    tensors:
      mlp.gate_proj.weight: null
      mlp.w1.weight: mlp.gate.weight
"""
NAMES = {"model.norm.": "ln_f.", "post_attention_layernorm": "ln_2", "gate_proj": "w1"}
KEPT = "mckpt-mapping.yaml"


@pytest.fixture(scope="module")
def mine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a custom model, its family file of two parts, and a Megatron checkpoint made
    with them.
    """
    root = tmp_path_factory.mktemp("mine")
    (root / "maps").mkdir()
    (root / "maps" / "mine.yaml").write_text(MINE)
    (root / "maps" / "base.yaml").write_text(BASE)
    config = {
        **tiny.config("llama"),
        "architectures": ["MineForCausalLM"],
        "hidden_act": "gelu_pytorch_tanh",
    }
    arrays = tiny.tensors(config)
    for old, new in NAMES.items():
        arrays = {name.replace(old, new): array for name, array in arrays.items()}
    (root / "hf").mkdir()
    tiny.write_weights(root / "hf", arrays)
    tiny.write_json(root / "hf" / "config.json", config)
    good(
        "hf-to-megatron",
        root / "hf",
        root / "ckpt",
        "--mapping",
        root / "maps" / "mine.yaml",
        "--allow-inexact",
        "activation",
    )
    return root


def test_later_commands_need_neither_the_mapping_nor_the_permission(
    mine: Path, tmp_path: Path
) -> None:
    said = good(
        "reshard", mine / "ckpt", tmp_path / "tp2", "--target-tp", 2, "--target-format", "torch"
    ).err
    assert f"{KEPT}, the family file that is kept with the checkpoint, is used" in said
    assert (
        "activation: 'gelu_tanh' is taken from mckpt.json: --allow-inexact activation was given"
        in said
    )
    assert "inexact: activation is 'gelu_tanh', and gpt would compute with 'silu'" in said
    for ckpt in (mine / "ckpt", tmp_path / "tp2"):  # the output of a reshard keeps them too
        assert good("diff", ckpt, mine / "ckpt").out.startswith(
            "the same to the last bit: 39 logical tensors"
        )
        assert good("diff", mine / "hf", ckpt).out.startswith(
            "the same to the last bit: 39 logical tensors"
        )
        assert "inexact: activation" in good("inspect", ckpt).out
        said = mckpt("verify", mine / "hf", ckpt, "--level", "bytes")
        # its config names another model than the source
        assert (
            said.code == 1
            and "activation: the config says gelu_tanh, and the args mean silu" in said.out
        ), said.out
        assert said.out.splitlines()[-1].startswith("INCOMPLETE")
    assert (
        good("plan", tmp_path / "tp2", tmp_path / "none", "--json").json["target"]["format"] == "hf"
    )
    back = tmp_path / "back"
    good("megatron-to-hf", tmp_path / "tp2", back)
    assert (back / "config.json").read_bytes() == (mine / "hf" / "config.json").read_bytes()
    assert good("diff", mine / "hf", back).out.startswith(
        "the same to the last bit: 39 logical tensors"
    )
    good("hf-to-megatron", back, tmp_path / "again", "--allow-inexact", "activation")


def test_the_kept_family_file_is_complete_on_its_own(mine: Path) -> None:
    text = (mine / "ckpt" / "hf" / KEPT).read_text()
    manifest = json.loads((mine / "ckpt" / "release" / "mckpt.json").read_text())
    assert manifest["mapping_file"] == {"name": "mine.yaml", "digest": mapping.digest_of(text)}
    kept = mapping.load("hf", str(mine / "ckpt" / "hf" / KEPT))
    given = mapping.load("hf", str(mine / "maps" / "mine.yaml"))
    assert "extends:" not in text
    assert [(r.key, r.of, r.pack, r.condition) for r in kept.rules] == [
        (r.key, r.of, r.pack, r.condition) for r in given.rules
    ]
    assert (
        kept.dims.keys() == given.dims.keys()
        and kept.dims["activation"].values == given.dims["activation"].values
    )
    assert (kept.architectures, kept.inert, kept.ignore) == (
        given.architectures,
        given.inert,
        given.ignore,
    )


def test_a_family_file_that_extends_only_shipped_files_is_kept_byte_for_byte(
    tmp_path: Path,
) -> None:
    source = hf(tmp_path / "src")
    edit_json(source / "config.json", lambda c: c.update(architectures=["MineForCausalLM"]))
    text = b"# mine\narchitectures: [MineForCausalLM]\nextends: qwen3\n"
    (tmp_path / "mine.yaml").write_bytes(text)
    good("hf-to-megatron", source, tmp_path / "d", "--mapping", tmp_path / "mine.yaml")
    assert (tmp_path / "d" / "hf" / KEPT).read_bytes() == text
    assert (
        "--mapping"
        not in good(
            "reshard",
            tmp_path / "d",
            tmp_path / "e",
            "--tp",
            2,
            "--mapping",
            tmp_path / "mine.yaml",
        ).err
    )


def test_a_family_given_by_name_is_recorded(tmp_path: Path) -> None:
    source = hf(tmp_path / "src")
    edit_json(source / "config.json", lambda c: c.update(architectures=["MineForCausalLM"]))
    good("hf-to-megatron", source, tmp_path / "d", "--family", "qwen3")
    assert (
        "family qwen3 is taken from mckpt.json"
        in good("reshard", tmp_path / "d", tmp_path / "e", "--tp", 2).err
    )
    good("megatron-to-hf", tmp_path / "e", tmp_path / "back")
    assert good("diff", tmp_path / "d", tmp_path / "back").out.startswith(
        "the same to the last bit: 47 logical tensors"
    )
    # a family of mckpt, given by name
    good("hf-to-megatron", source, tmp_path / "named", "--mapping", "qwen3")
    assert good("diff", tmp_path / "d", tmp_path / "named").out.startswith(
        "the same to the last bit: 47 logical tensors"
    )


def test_a_family_file_that_is_not_stored_is_not_named_in_the_manifest(
    tiny_model: TinyModel, mine: Path, tmp_path: Path
) -> None:
    """A checkpoint without hf/ has no place for the family file. Converted to Hugging Face, it has
    one.
    """
    good("hf-to-megatron", tiny_model("llama"), tmp_path / "d")
    for path in [*(tmp_path / "d" / "hf").iterdir(), tmp_path / "d" / "release" / "mckpt.json"]:
        path.unlink()
    (tmp_path / "own.yaml").write_text("architectures: [OwnForCausalLM]\nextends: llama\n")
    own = ("--mapping", tmp_path / "own.yaml")
    assert (
        "mapping_file" not in good("reshard", tmp_path / "d", tmp_path / "e", *own, "--json").json
    )
    assert (
        "mapping_file"
        in good("megatron-to-hf", tmp_path / "e", tmp_path / "back", *own, "--json").json
    )
    assert good("diff", tmp_path / "back", tmp_path / "e").out.startswith(
        "the same to the last bit"
    )


def test_a_kept_family_file_that_was_changed_is_refused_and_can_be_overridden(
    mine: Path, tmp_path: Path
) -> None:
    ckpt = tmp_path / "ckpt"
    good("reshard", mine / "ckpt", ckpt, "--target-pp", 2)
    before = mapping.digest_of((ckpt / "hf" / KEPT).read_text())
    (ckpt / "hf" / KEPT).write_text((ckpt / "hf" / KEPT).read_text() + "# changed\n")
    after = mapping.digest_of((ckpt / "hf" / KEPT).read_text())
    for args in (
        ("reshard", ckpt, tmp_path / "d"),
        ("diff", ckpt, mine / "ckpt"),
        ("megatron-to-hf", ckpt, tmp_path / "e"),
    ):
        refused(4, before, after, KEPT, "--mapping", args=args, untouched=tmp_path)
        assert mckpt(*args, "--mapping", mine / "maps" / "mine.yaml").code == 0
    (ckpt / "hf" / KEPT).unlink()
    refused(4, before, "is not there", args=("diff", ckpt, mine / "ckpt"), untouched=tmp_path)


def test_checkpoints_of_one_directory_share_the_family_file(mine: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.yaml"
    other.write_text((mine / "ckpt" / "hf" / KEPT).read_text() + "# other\n")
    args = ("hf-to-megatron", mine / "hf", tmp_path / "d", "--allow-inexact", "activation")
    good(*args, "--mapping", mine / "maps" / "mine.yaml")
    refused(6, KEPT, args=(*args, "--mapping", other, "--iteration", 3), untouched=tmp_path)
    good(*args, "--mapping", mine / "maps" / "mine.yaml", "--iteration", 3)


def test_args_must_agree_in_everything_that_was_not_allowed(mine: Path, tmp_path: Path) -> None:
    good("reshard", mine / "ckpt", tmp_path / "d", "--target-tp", 2)
    manifest = tmp_path / "d" / "release" / "mckpt.json"
    edit_json(manifest, lambda m: m["inexact"].clear())
    refused(
        4,
        "activation is 'silu'",
        "but 'gelu_tanh' by ",
        args=("diff", tmp_path / "d", mine / "ckpt"),
    )
    edit_json(
        manifest, lambda m: (m["inexact"].update(activation="why"), m["dims"].update(norm_eps=0.5))
    )
    edit_json(tmp_path / "d" / "hf" / "config.json", lambda c: c.pop("rms_norm_eps"))
    refused(4, "norm_eps", args=("diff", tmp_path / "d", mine / "ckpt"))


# ---- layers of multi-token prediction that config.json counts but the files do not contain


def test_a_setting_wins_over_config_json_if_the_tensors_agree_with_it(
    headless: Path, tmp_path: Path
) -> None:
    said = good("hf-to-megatron", headless, tmp_path / "d", "--set", "mtp_layers=0", "--tp", 2).err
    assert (
        "mtp_layers: config.json has num_nextn_predict_layers 1; the value of --set, 0, is used,"
        " because the tensors agree with it" in said
    )
    assert (
        json.loads((tmp_path / "d" / "hf" / "config.json").read_text())["num_nextn_predict_layers"]
        == 0
    )
    good("reshard", tmp_path / "d", tmp_path / "r", "--target-pp", 2)
    good("megatron-to-hf", tmp_path / "r", tmp_path / "back")
    written = json.loads((tmp_path / "back" / "config.json").read_text())
    assert written == {
        **json.loads((headless / "config.json").read_text()),
        "num_nextn_predict_layers": 0,
    }
    good("hf-to-megatron", tmp_path / "back", tmp_path / "again")
    for ckpt in ("d", "r", "back"):
        assert good("diff", tmp_path / ckpt, tmp_path / "again").out.startswith(
            "the same to the last bit: 201 logical tensors"
        )
    said = good("verify", headless, tmp_path / "r", "--level", "bytes", "--set", "mtp_layers=0").out
    assert said.splitlines()[-1].startswith("PASS")


def test_settings_correct_the_config_that_is_written_from_another_directory(
    tmp_path: Path, headless: Path
) -> None:
    """--like names a config.json that counts layers which the Megatron checkpoint does not have."""
    good("hf-to-megatron", headless, tmp_path / "d", "--set", "mtp_layers=0")
    for name in ("hf", "release"):
        for path in (tmp_path / "d" / name).glob("*.json" if name == "hf" else "mckpt.json"):
            path.unlink()
    good(
        "megatron-to-hf",
        tmp_path / "d",
        tmp_path / "back",
        "--like",
        headless,
        "--set",
        "mtp_layers=0",
    )
    assert (
        json.loads((tmp_path / "back" / "config.json").read_text())["num_nextn_predict_layers"] == 0
    )
    assert tree(tmp_path / "back")


def test_a_family_file_in_a_directory_without_a_manifest_is_used(
    mine: Path, tmp_path: Path
) -> None:
    """A trainer saved further iterations into the same save directory, so only hf/ tells the
    family.
    """
    good("reshard", mine / "ckpt", tmp_path / "d", "--target-tp", 2)
    (tmp_path / "d" / "release" / "mckpt.json").unlink()
    assert Checkpoint.open(tmp_path / "d").model.options.mapping == str(
        tmp_path / "d" / "hf" / KEPT
    )
    with pytest.raises(
        MappingError, match="activation"
    ):  # nothing records which differences were allowed
        _ = Checkpoint.open(tmp_path / "d").dims
    assert (
        Checkpoint.open(tmp_path / "d", SourceOptions(settings={"activation": "gelu_tanh"})).dims[
            "activation"
        ]
        == "gelu_tanh"
    )


@pytest.fixture(scope="module")
def two_heads(tmp_path_factory: pytest.TempPathFactory, tiny_model: TinyModel) -> Path:
    """A model whose config.json says that the embedding is the output layer, with a file that has
    both, of other values.
    """
    root = tmp_path_factory.mktemp("two-heads") / "hf"
    shutil.copytree(tiny_model("qwen3"), root)
    edit_json(root / "config.json", lambda config: config.update(tie_word_embeddings=True))
    return root


@pytest.mark.parametrize("command", ["plan", "hf-to-megatron --dry-run", "hf-to-megatron"])
def test_a_second_output_layer_is_refused_before_anything_is_written(
    two_heads: Path, tmp_path: Path, command: str
) -> None:
    name, *options = command.split()
    said = mckpt(name, two_heads, tmp_path / "d", *options)
    assert said.code == 3 and "lm_head.weight" in said.err and "--set tied=false" in said.err
    assert not (tmp_path / "d").exists()


def test_a_second_output_layer_is_kept_if_the_user_says_so(two_heads: Path, tmp_path: Path) -> None:
    """transformers 5 computes with it too."""
    good("hf-to-megatron", two_heads, tmp_path / "d", "--set", "tied=false", "--tp", 2)
    good("megatron-to-hf", tmp_path / "d", tmp_path / "back")
    config = json.loads((two_heads / "config.json").read_text())
    written = json.loads((tmp_path / "back" / "config.json").read_text())
    assert written == {**config, "tie_word_embeddings": False}
    good("diff", two_heads, tmp_path / "back", "--set", "tied=false")
    before, after = (shard(p / "model.safetensors") for p in (two_heads, tmp_path / "back"))
    assert before[0].keys() == after[0].keys() and "lm_head.weight" in after[0]


def test_an_equal_output_layer_is_not_another_one(tiny_model: TinyModel, tmp_path: Path) -> None:
    arrays = tiny.tensors(config := {**tiny.config("qwen3"), "tie_word_embeddings": True})
    arrays["lm_head.weight"] = arrays["model.embed_tokens.weight"]
    (tmp_path / "hf").mkdir()
    tiny.write_weights(tmp_path / "hf", arrays)
    tiny.write_json(tmp_path / "hf" / "config.json", {**config, "torch_dtype": "bfloat16"})
    good("plan", tmp_path / "hf", tmp_path / "d")
    words = ("tie_word_embeddings is True", "the tensors agree with it")
    refused(4, *words, args=("plan", tmp_path / "hf", tmp_path / "e", "--set", "tied=false"))
