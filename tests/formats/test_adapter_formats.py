"""Adapters of Megatron-Bridge are read right, and those that mckpt writes are the same at any size.

fixtures/adapters/bridge.tar.xz has adapters that Megatron-Bridge 0.6.2 saved at tp 2 (and ep 2, of
DeepSeek-V3), and checksums of the factors that it exported to PEFT from the same models.
fixtures/adapters/trained.tar.xz has two of linear_qkv in tiny-qwen3 that it saved at tp 2 with the
state of Adam, in the forms fully_reshardable (trained) and dp_reshardable (flat). Both programs are
tests/helpers/bridge_adapters.py.

fixtures/adapters/ungated.tar.xz has those of linear_fc1 in a Nemotron that 0.5.0 (DoRA) and
0.5.1 saved at tp 2 with the same program.

fixtures/adapters/shared.tar.xz has those of experts in a Qwen3-MoE that 0.3.1 saved at ep 2.

fixtures/adapters/swift.tar.xz has an adapter of tiny-qwen3 that `megatron export` of ms-swift 4.6.0
(mcore-bridge 1.6.5) made at tp 2 from the directory of PEFT that the test writes; the program is
tests/helpers/swift_adapters.py.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
import shutil
import zlib
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mckpt
from mckpt.adapters import merging
from mckpt.adapters.checkpoint import of_megatron
from mckpt.adapters.forms import opened_adapter
from mckpt.checkpoint.checkpoint import Checkpoint
from mckpt.checkpoint.files import open_files
from mckpt.containers import safe_pickle
from mckpt.conversion.planning import make_plan
from mckpt.options import SourceOptions, TargetOptions
from tests.helpers import adapters, lora, made_models, tiny
from tests.helpers.commands import Pt, edit_json, good, refused, save_pt
from tests.helpers.commands import mckpt as run
from tests.helpers.tiny import FIXTURES, TinyModel, unpack
from tests.unit import test_adapters

QWEN3, ADAPTER = FIXTURES / "tiny-qwen3", FIXTURES / "tiny-qwen3-lora"
# the case, the layout that its modules need, and the dialect in which Megatron-Bridge has the model
BLOCK = ("--layout", "block")
CASES = (("llama", "fused"), ("canon", "canonical"), ("q35", "fused"), ("ds", "fused"))
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")
SIZES = (("--tp", 1), ("--tp", 2, "--pp", 2), ("--tp", 4))


@pytest.fixture(scope="module")
def bridge(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return unpack("adapters/bridge", tmp_path_factory.mktemp("bridge")) / "adapters"


@pytest.mark.parametrize(("case", "layout"), CASES)
def test_an_adapter_of_megatron_bridge(
    case: str, layout: str, bridge: Path, tmp_path: Path
) -> None:
    place, peft = bridge / case, tmp_path / "peft"
    good("adapter", "to-hf", place / "bridge", peft, "--like", place / "hf")
    found = {
        key: hashlib.sha256(value.tobytes()).hexdigest()[:16]
        for key, value in lora.tensors(peft).items()
    }
    assert found == json.loads((place / "exported.json").read_text())
    config = json.loads((peft / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"]) == (4, 8)
    shown = good("adapter", "inspect", place / "bridge", "--like", place / "hf", "--json").json
    assert (shown["rank"], shown["alpha"], shown["base"]) == (4, 8, False)
    assert (shown["kind"] == "CanonicalLoRA") == (layout == "canonical")
    same = ("adapter", "reshard", place / "bridge", tmp_path / "there", "--like", place / "hf")
    for number, sizes in enumerate(SIZES):
        format = ("torch_dist", "torch")[number % 2]
        good(*same, "--target-format", format, *sizes, "--overwrite")
        good("adapter", "to-hf", tmp_path / "there", tmp_path / "back", "--like", place / "hf")
        assert lora.bytes_of(tmp_path / "back") == lora.bytes_of(peft)
        lora.remove(tmp_path / "back")


@pytest.mark.parametrize(
    ("sizes", "stages"),
    [
        ((), [[[0, 1, 2, 3]]]),
        (("--pp", 2, "--tp", 2), [[[0, 1]], [[2, 3]]]),
        (("--pp", 2, "--vpp", 2), [[[0], [2]], [[1], [3]]]),
        (("--pipeline-model-parallel-layout", "E|tttt|L", "--pp", 3), [[[]], [[0, 1, 2, 3]], [[]]]),
    ],
)
def test_adapters_of_some_layers(sizes: Any, stages: Any, tmp_path: Path) -> None:
    """Those of the other layers are left out, as wildcards of Megatron-Bridge leave them out. Each
    file numbers the layers from the first of its stage.
    """
    import torch

    more = (*BLOCK, "--format", "torch", *sizes)
    good("adapter", "to-megatron", ADAPTER, QWEN3, tmp_path / "a", *more)
    good("adapter", "to-hf", tmp_path / "a", tmp_path / "all")
    for file in (tmp_path / "a").rglob("*.pt"):
        state = torch.load(file, weights_only=False)
        chunks = stages[int(file.parent.name[11:] or 0)]
        for v, layers in enumerate(chunks):
            model = state[f"model{v}" if len(chunks) > 1 else "model"]
            for key in list(model):
                layer = layers[int(key.split(".")[2])]
                if layer == 3 or (layer == 1 and ".mlp." in key):
                    del model[key]
        torch.save(state, file)
    good("adapter", "to-hf", tmp_path / "a", tmp_path / "some")
    good("megatron-to-hf", tmp_path / "a", tmp_path / "found")
    assert lora.same(tmp_path / "found", tmp_path / "some")
    every, some = lora.tensors(tmp_path / "all"), lora.tensors(tmp_path / "some")
    missing = {key for key in every if ".layers.1.mlp." in key or ".layers.3." in key}
    assert missing and some.keys() == every.keys() - missing
    assert all((some[key] == every[key]).all() for key in some)
    # the adapters of the other layers become zeros, which compute the same
    good("adapter", "reshard", tmp_path / "a", tmp_path / "b", "--tp", 2, "--pp", 2)
    for adapter in ("some", "b"):
        good("adapter", "merge", QWEN3, tmp_path / adapter, tmp_path / f"{adapter} merged")
    good("diff", tmp_path / "some merged", tmp_path / "b merged")


def test_one_adapter_for_all_experts_stays_one(tmp_path: Path, bridge: Path) -> None:
    place = shutil.copytree(bridge / "ds/bridge", tmp_path / "a")
    file = next(place.rglob("run_config.yaml"))
    text = file.read_text()
    assert "share_expert_adapters: false" in text
    for shared in ("false", "true"):
        file.write_text(
            text.replace("share_expert_adapters: false", f"share_expert_adapters: {shared}")
        )
        like = ("--like", bridge / "ds/hf", "--overwrite")
        good("adapter", "reshard", place, tmp_path / "b", "--tp", 1, *like)
        written = next((tmp_path / "b").rglob("run_config.yaml")).read_text()
        assert f"share_expert_adapters: {shared}" in written


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return unpack("adapters/trained", tmp_path_factory.mktemp("trained")) / "adapters"


@pytest.mark.parametrize(
    ("form", "sizes"),
    [
        ("trained", ("--tp", 1)),
        ("trained", ("--tp", 2, "--pp", 4)),
        ("flat", ("--tp", 1)),
        ("flat", ("--pp", 2)),
    ],
)
def test_the_state_of_the_optimizer_is_kept(
    form: str, sizes: Any, trained: Path, tmp_path: Path
) -> None:
    """Each factor has the state of its own elements: the first step of Adam, from which they follow
    (learning rate 0.01, weight decay 0.01), had the gradient 3 * factor + 0.25.
    """
    like = ("--like", QWEN3)
    good("adapter", "reshard", trained / form, tmp_path / "a", *like, *sizes)
    good("adapter", "to-hf", trained / form, tmp_path / "before", *like)
    good("adapter", "to-hf", tmp_path / "a", tmp_path / "after", *like)
    assert lora.same(tmp_path / "before", tmp_path / "after")
    source, _ = of_megatron(tmp_path / "a", SourceOptions(like=QWEN3))
    source = source.with_optimizer()
    names = [name for name in source if "@" not in name]
    assert len(source) == 4 * len(names) == 4 * 4 * 6  # 4 layers, A and B of q, k and v
    for name in names:
        factor, *states = (
            source[name + state].numpy() for state in ("", "@master", "@exp_avg", "@exp_avg_sq")
        )
        gradient = states[1].astype("f8") / 0.1
        before = (gradient - 0.25) / 3
        assert np.array_equal(states[0], factor)
        assert np.allclose(states[2], 0.001 * gradient**2, rtol=1e-5, atol=1e-12)
        assert np.allclose(factor, before * (1 - 1e-4) - 0.01 * np.sign(gradient), atol=1e-5)
    assert source.optimizer is not None and source.files.common is not None
    ((group,),) = source.optimizer.groups
    assert (group["step"], group["lr"]) == (1, 0.01)
    assert (tmp_path / "a/iter_0000000").is_dir()


def test_a_state_that_is_not_kept_is_named(trained: Path, tmp_path: Path) -> None:
    like = ("--like", QWEN3)
    reshard = ("adapter", "reshard", trained / "flat", tmp_path / "a", *like)
    whole = ("adapter", "reshard", trained / "trained", tmp_path / "a", *like)
    more = (*whole, "--target-format", "torch")
    refused(2, "--target-format torch_dist", args=more, untouched=tmp_path)
    assert "left behind: optimizer" in good(*reshard, "--no-optimizer").err
    assert (
        "left behind" not in good("adapter", "reshard", tmp_path / "a", tmp_path / "b", *like).err
    )
    to_hf = good("adapter", "to-hf", trained / "trained", tmp_path / "peft", *like)
    assert "left behind: optimizer" in to_hf.err


def test_a_state_of_other_factors_is_refused(trained: Path, tmp_path: Path) -> None:
    """The adapters are those of one checkpoint, and the states those of another."""
    place = shutil.copytree(trained / "trained", tmp_path / "a")
    file = next(place.rglob("__0_0.distcp"))
    source, _ = of_megatron(place, SourceOptions(like=QWEN3))
    s = source.layout.stored[0]
    at = int(s.at[list(s.file).index(source.layout.files.index(str(file)))])
    content = bytearray(file.read_bytes())
    content[at : at + 4] = np.float32(7).tobytes()
    file.write_bytes(content)
    reshard = ("adapter", "reshard", place, tmp_path / "b", "--like", QWEN3)
    refused(
        3,
        "layers.0.attn.q.weight:lora_A.2: 1 of 64 elements differ",
        args=reshard,
        untouched=tmp_path,
    )


def test_a_rank_file_of_the_fused_layout(tmp_path: Path) -> None:
    """The rows of B are those of linear_qkv and linear_fc1; A is cut along its rank, or for a row
    of the base along its input.
    """
    import mckpt
    from mckpt.containers import torch_file

    weights = lora.tensors(QWEN3)
    parts = ("q_proj", "k_proj", "v_proj")
    modules = [f"model.layers.1.self_attn.{name}" for name in (*parts, "o_proj")]
    stored = lora.factors(weights, modules)
    for name in parts[1:]:
        key = f"{lora.PREFIX}model.layers.1.self_attn.{{}}.lora_A.weight"
        stored[key.format(name)] = stored[key.format("q_proj")]
    adapter = lora.save(tmp_path / "adapter", stored)
    mckpt.adapter_to_megatron(adapter, QWEN3, tmp_path / "torch", format="torch", tp=2)
    q, k, v, o = (stored[f"{lora.PREFIX}{module}.lora_B.weight"] for module in modules)
    a, row = (stored[f"{lora.PREFIX}{modules[i]}.lora_A.weight"] for i in (0, 3))
    groups = [np.concatenate([x.reshape(8, -1, 4)[group] for x in (q, k, v)]) for group in range(8)]
    wanted = {
        "linear_qkv.adapter.linear_in": np.split(a, 2),
        "linear_qkv.adapter.linear_out": np.split(np.concatenate(groups), 2),
        "linear_proj.adapter.linear_in": np.split(row, 2, 1),
        "linear_proj.adapter.linear_out": np.split(o, 2),
    }
    for rank in range(2):
        file = tmp_path / f"torch/release/mp_rank_{rank:02d}/model_optim_rng.pt"
        with file.open("rb") as opened:
            value, data = torch_file.read(opened.fileno(), str(file))
        assert not [key for key in value["model"] if ".adapter." not in key]
        for name, shards in wanted.items():
            view = safe_pickle.as_tensor(
                value["model"][f"decoder.layers.1.self_attention.{name}.weight"]
            )
            assert view is not None
            at, nbytes = data[view.storage][0], shards[rank].nbytes
            there = np.frombuffer(file.read_bytes()[at : at + nbytes], "f4").reshape(view.shape)
            assert np.array_equal(there, shards[rank]), name
            empty = value["model"][f"decoder.layers.0.self_attention.{name}.weight"]
            assert safe_pickle.as_tensor(empty) is not None


@pytest.mark.parametrize(
    ("options", "layout"),
    [
        (("--layout", "canonical"), ""),
        (("--layout", "canonical", "--format", "torch"), ""),
        (("--sequential-experts",), ""),
        (("--sequential-experts", "--format", "torch"), "canonical"),
        (("--layout", "block", "--tp", 2), "block"),
    ],
)
def test_experts_whose_gate_and_up_have_factors_of_their_own(
    options: tuple[Any, ...], layout: str, experts: tuple[Path, Path], tmp_path: Path
) -> None:
    """CanonicalLoRA has one adapter for gate and up of grouped experts, which cannot hold both
    factors A. The sums of products are compared by numpy.
    """
    base, adapter = experts
    there, back = tmp_path / "there", tmp_path / "back"
    for convert in (
        ("adapter", "to-megatron", adapter, base, there),
        ("hf-to-megatron", base, there, "--adapter", adapter),
    ):
        if not layout:
            refused(2, "here they differ", "Give --layout block", args=(*convert, *options))
            assert not there.exists()
            continue
        good(*convert, *options, "--overwrite")
        good("adapter", "to-hf", there, back, "--overwrite")
        config = json.loads((back / "adapter_config.json").read_text())
        scale, mine = config["lora_alpha"] / config["r"], lora.tensors(back)
        for module in adapters.modules(base, *config["target_modules"]):
            expected = lora.product(lora.tensors(adapter), module, 2)
            assert (lora.product(mine, module, scale) == expected).all(), module


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Returns a mixture of experts, and an adapter with factors of its own for every matrix."""
    work = tmp_path_factory.mktemp("experts")
    base = tiny.tiny_random("qwen3-moe", work / "base", num_hidden_layers=2, num_experts=4)
    shapes = adapters.modules(base, "q_proj", "k_proj", "v_proj", *MLP)
    made = adapters.factors(shapes, shared=False)
    return base, adapters.write(work / "adapter", made)


@pytest.mark.parametrize(
    "options",
    [(), ("--format", "torch"), ("--tp", 2, "--ep", 2, "--etp", 2), ("--layout", "block")],
)
def test_experts_of_another_rank_have_another_scale(
    options: tuple[Any, ...], experts: tuple[Path, Path], tmp_path: Path
) -> None:
    """Megatron-Bridge gives experts the rank dim / topk with `normalize_moe_lora`, and one alpha;
    with 2 experts for a token, their scale is twice that of other weights. numpy multiplies.
    """
    base, _ = experts
    topk = json.loads((base / "config.json").read_text())["num_experts_per_tok"]
    shapes = adapters.modules(base, "q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
    made = adapters.factors(shapes, lambda one: 4 * topk // (topk if ".experts." in one else 1))
    own = {"r": 4 * topk, "rank_pattern": {r"experts\.\d+\.\w+_proj": 4}, "lora_alpha": 8}
    adapter = adapters.write(tmp_path / "adapter", made, **own)
    there, back = tmp_path / "there", tmp_path / "back"
    good("adapter", "to-megatron", adapter, base, there, *options)
    for path in there.rglob("run_config.yaml"):  # which torch has none of
        assert "normalize_moe_lora: true" in path.read_text()
    good("adapter", "reshard", there, tmp_path / "again", "--pp", 2, "--tp", 1, "--etp", 1)
    good("adapter", "to-hf", tmp_path / "again", back)
    config = json.loads((back / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == "somebody/base"
    mine = lora.tensors(back)
    for module in adapters.modules(base, *config["target_modules"]):
        scale = config["lora_alpha"] / mine[f"base_model.model.{module}.lora_A.weight"].shape[0]
        expected = lora.product(
            lora.tensors(adapter), module, 8 / (4 if ".experts." in module else 4 * topk)
        )
        assert (lora.product(mine, module, scale) == expected).all(), module
    merged = {k: tmp_path / k for k in ("one", "other")}
    good("adapter", "merge", base, adapter, merged["one"])
    good("adapter", "merge", base, back, merged["other"])
    stored = [(path / "model.safetensors").read_bytes() for path in merged.values()]
    assert stored[0] == stored[1]
    adapters.write(adapter, made, **own, alpha_pattern={"q_proj": 5})
    refused(2, "different scales", args=("adapter", "to-megatron", adapter, base, tmp_path / "no"))


def _without(change: Callable[[Any], bool]) -> Callable[[Any], Any]:
    """Returns a fault that loses some stored tensors of a layout."""

    def fault(layout: Any) -> Any:
        kept = [s for s in layout.stored if not change(s)]
        assert len(kept) < len(layout.stored)
        return replace(layout, stored=kept)

    return fault


def _each(change: Callable[[Any, Any], tuple[Any, Any]]) -> Callable[[Any], Any]:
    """Returns a fault of the places of members."""
    return lambda members: dict(change(*one) for one in members.items())


FAULTS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "the factors A of up are not read": (
        "checkpoint._layout_of",
        _without(lambda s: "up.weight:lora_A" in s.key),
    ),
    "a factor of the source is read twice": (
        "checkpoint._layout_of",
        lambda layout: replace(layout, stored=[*layout.stored, layout.stored[0]]),
    ),
    "a factor A has no place": (
        "placing._members",
        _each(lambda place, m: (place, m._replace(has_a=m.has_a and "k." not in place[0]))),
    ),
    "an expert is left out": (
        "placing._members",
        lambda members: {p: m for p, m in members.items() if p[2] != 1},
    ),
    "layers are shifted": (
        "placing._members",
        _each(lambda place, m: ((place[0], place[1] + 1, place[2]), m)),
    ),
    "factors of one module overlap": (
        "placing._members",
        _each(lambda place, m: (place, m._replace(first=0))),
    ),
    "the rank is too small": ("placing._needed", lambda rank: rank - 2),
    "the tensors of one rank are lost": ("factors.placed", _without(lambda s: 1 in s.file)),
    "one side of all factors is lost": (
        "factors.placed",
        _without(lambda s: s.key.endswith("linear_out.weight")),
    ),
    "rows of a factor begin too late": (
        "factors._of_member",
        lambda piece: piece and piece._replace(start=piece.start + 1),
    ),
    "a factor is written as that of another weight": (
        "factors._of_member",
        lambda piece: piece and piece._replace(tensor=piece.tensor.replace(".k.", ".v.")),
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_plan_of_an_adapter_refuses_faults(
    fault: str, experts: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every element of each factor is used, and every element of the target is written once."""
    base, adapter = experts
    convert = ("adapter", "to-megatron", adapter, base, tmp_path / "there")
    convert = (*convert, "--layout", "block", "--format", "torch", "--tp", 2)
    good(*convert, "--dry-run")
    place, change = FAULTS[fault]
    module, _, name = place.partition(".")
    module = f"mckpt.adapters.{module}"
    original = getattr(import_module(module), name)
    monkeypatch.setattr(f"{module}.{name}", lambda *args: change(original(*args)))
    refused(5, "would not use each source element", args=convert, untouched=convert[4])


def test_alpha_is_never_guessed(bridge: Path, tmp_path: Path) -> None:
    there = tmp_path / "there"
    more = ("--layout", "block", "--format", "torch")
    good("adapter", "to-megatron", ADAPTER, QWEN3, there, *more)
    edit_json(there / "release/mckpt.json", lambda manifest: manifest.pop("adapter"))
    refused(2, "give --alpha", args=("adapter", "to-hf", there, tmp_path / "peft"))
    good("adapter", "to-hf", there, tmp_path / "peft", "--alpha", 5)
    config = json.loads((tmp_path / "peft/adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"]) == (6, 5)


@pytest.mark.parametrize("where", ["peft", "megatron"])
def test_experts_that_share_one_factor_of_two(where: str, tmp_path: Path) -> None:
    """Bridge names it "shared outer": A of gate and up, and B of down, are those of all experts."""
    import torch

    base = tiny.tiny_random("qwen3-moe", tmp_path / "base")
    weights = lora.tensors(base)
    every = lora.factors(weights, (key for key in lora.matrices(weights) if ".experts." in key))
    outer: dict[str, np.ndarray] = {}
    for key in sorted(every):
        shared = re.sub(r"\.experts\.\d+\.", ".experts.", key)
        if re.search(r"down_proj\.lora_B|(gate|up)_proj\.lora_A", key):
            of_all = shared.replace("up_proj", "gate_proj")  # both have the A of linear_fc1
            every[key] = outer.setdefault(of_all, every[key][None])[0]
            outer[shared] = every[key][None]
        else:
            outer[key] = every[key]
    assert len(outer) < len(every)
    lora.save(tmp_path / "every", every)
    if where == "peft":  # as Megatron-Bridge exports it, for SGLang
        given = lora.save(tmp_path / "outer", outer)
    else:
        given = tmp_path / "there"
        form = ("--format", "torch", "--ep", 2)
        good("adapter", "to-megatron", tmp_path / "every", base, given, *form)
        for file in given.rglob("*.pt"):
            state = torch.load(file, weights_only=False)
            for key in list(state["model"]):
                if re.search(
                    r"\.experts\.linear_fc(1.adapter.linear_in|2.adapter.linear_out)", key
                ):
                    state["model"][key] = state["model"][key][0]
            torch.save(state, file)
        resharded = good("adapter", "reshard", given, tmp_path / "tp2", "--tp", 2, "--ep", 2)
        assert "experts that shared factors have each its own" in resharded.err
        good("adapter", "to-hf", tmp_path / "tp2", tmp_path / "back")
        assert lora.same(tmp_path / "back", tmp_path / "every")
    for number, adapter in enumerate((tmp_path / "every", given)):
        good("adapter", "merge", base, adapter, tmp_path / f"merged{number}")
    good("diff", tmp_path / "merged0", tmp_path / "merged1")


def test_adapters_of_megatron_are_merged(tmp_path: Path) -> None:
    there, merged = tmp_path / "there", tmp_path / "merged"
    good("adapter", "to-megatron", ADAPTER, QWEN3, there, "--layout", "canonical", "--tp", 2)
    good("adapter", "merge", QWEN3, ADAPTER, merged)
    good("hf-to-megatron", QWEN3, tmp_path / "base", "--pp", 2)
    good("adapter", "merge", QWEN3, there, tmp_path / "a")
    good("adapter", "merge", tmp_path / "base", there, tmp_path / "b")
    for other in ("a", "b"):
        good("diff", merged, tmp_path / other)
    good("megatron-to-hf", there, tmp_path / "peft")
    assert lora.same(tmp_path / "peft", ADAPTER)
    alone = ("megatron-to-hf", there, tmp_path / "c", "--merge")
    refused(2, "without the weights", "mckpt adapter merge BASE", args=alone)
    without = ("megatron-to-hf", tmp_path / "base", tmp_path / "c", "--merge")
    refused(2, "has no adapters", args=without)


def test_weights_beside_their_adapters(tmp_path: Path) -> None:
    """As a trainer that wraps its modules saves them: the whole model under the names in memory."""
    torch = ("--format", "torch")
    good("hf-to-megatron", QWEN3, tmp_path / "base", *torch)
    factors = ("--layout", "block", *torch)
    good("adapter", "to-megatron", ADAPTER, QWEN3, tmp_path / "adapter", *factors)
    own, other = (
        Pt(tmp_path / f"{name}/release/mp_rank_00/model_optim_rng.pt")
        for name in ("base", "adapter")
    )
    model = own.value["model"]
    for key, record in other.value["model"].items():
        view = safe_pickle.as_tensor(record)
        assert view is not None
        stem = key.partition(".adapter.")[0]
        model[key] = own.put("bfloat16", view.shape, other.data[view.storage])
        if f"{stem}.weight" in model:
            model[f"{stem}.to_wrap.weight"] = model.pop(f"{stem}.weight")
    own.save()
    (tmp_path / "base/release/mckpt.json").unlink()
    refused(2, "give --alpha", args=("megatron-to-hf", tmp_path / "base", tmp_path / "c"))
    # the rank is 6, and the scale of the adapter 2
    good("megatron-to-hf", tmp_path / "base", tmp_path / "whole", "--merge", "--alpha", 12)
    good("adapter", "merge", QWEN3, ADAPTER, tmp_path / "merged")
    good("diff", tmp_path / "merged", tmp_path / "whole")


@pytest.mark.parametrize("layout", ["block", "canonical"])
def test_an_adapter_is_written_beside_the_weights(layout: str, tmp_path: Path) -> None:
    convert = ("hf-to-megatron", QWEN3, tmp_path / "a", "--adapter", ADAPTER)
    said = good(*convert, "--dry-run").out
    assert "--layout canonical (CanonicalLoRA), because layers.0.attn.q.weight" in said
    convert = (*convert, "--layout", layout, "--tp", 2)
    assert "filled factors and padding of the vocabulary" in good(*convert, "--dry-run").out
    good(*convert, "--pp", 2)
    torch = ("--target-tp", 1, "--target-pp", 1, "--target-format", "torch")
    good("adapter", "reshard", tmp_path / "a", tmp_path / "b", *torch)
    good("adapter", "merge", QWEN3, ADAPTER, tmp_path / "merged")
    good("adapter", "to-megatron", ADAPTER, QWEN3, tmp_path / "alone", "--layout", layout)
    for place in (tmp_path / "a", tmp_path / "b"):
        assert "sound" in good("check", place).out
        good("diff", tmp_path / "a", place)
        found = run("diff", place, tmp_path / "alone")
        assert "56 logical tensors equal, 0 differ, 47 missing" in found.out
        whole = place.with_suffix(".whole")
        good("megatron-to-hf", place, whole, "--merge")
        good("diff", tmp_path / "merged", whole)
        good("megatron-to-hf", place, place.with_suffix(".peft"))
        # the factors of the form `block` have the ranks of all weights of a linear
        assert layout == "block" or lora.same(place.with_suffix(".peft"), ADAPTER)
        verdict = ("verify", QWEN3, place, "--adapter", ADAPTER, "--level", "bytes")
        assert "PASS" in good(*verdict).out
    edit_json(tmp_path / "b/release/mckpt.json", lambda found: found["adapter"].update(alpha=99))
    other = run("diff", tmp_path / "a", tmp_path / "b")
    assert (other.code, "adapters: alpha / rank" in other.out) == (1, True)
    assert mckpt.diff(tmp_path / "a", tmp_path / "b").changed[0].what == "alpha / rank"


@pytest.mark.parametrize("format", ["torch_dist", "torch"])
def test_an_adapter_beside_weights_whose_shapes_differ_by_layer(
    format: str, tmp_path: Path
) -> None:
    base, adapter = test_adapters.made("llama_nemotron", tmp_path / "base"), tmp_path / "adapter"
    weights = lora.tensors(base)
    modules = lora.matrices(weights, ("norm", "embed", "lm_head"))
    lora.save(adapter, lora.factors(weights, modules))
    sizes = ("--format", format, "--tp", 2, "--layout", "block")
    good("hf-to-megatron", base, tmp_path / "a", "--adapter", adapter, *sizes)
    good("megatron-to-hf", tmp_path / "a", tmp_path / "b", "--merge")
    merged, added = lora.tensors(tmp_path / "b"), dict.fromkeys(modules, 2.0)
    test_adapters.expect_merged(base, tmp_path / "b", lora.tensors(adapter), added)
    assert {merged[f"{module}.weight"].shape for module in modules} != {
        weights[f"{modules[0]}.weight"].shape
    }


def test_a_merge_of_adapters_of_megatron_is_found_again(tmp_path: Path) -> None:
    """The factors lie in a temporary directory, which is another one each time."""
    good("adapter", "to-megatron", ADAPTER, QWEN3, tmp_path / "a", *BLOCK)
    merge = ("adapter", "merge", QWEN3, tmp_path / "a", tmp_path / "b")
    states = []
    for _ in range(2):
        base = Checkpoint.open(QWEN3)
        with opened_adapter(tmp_path / "a", base) as found:
            plan = make_plan(merging.merge(base, found), tmp_path / "c", TargetOptions())
            states.append((plan.digest, str(plan.state())))
    assert states[0] == states[1]
    good(*merge)
    file = next((tmp_path / "b").glob("*.safetensors"))
    before = file.stat()
    assert "done already" in good(*merge).out
    assert file.stat() == before


@pytest.fixture(scope="module")
def swift(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return unpack("adapters/swift", tmp_path_factory.mktemp("swift")) / "swift"


def test_an_adapter_of_ms_swift(swift: Path, tmp_path: Path) -> None:
    shapes = adapters.modules(QWEN3, *ATTENTION, *MLP)
    peft = adapters.write(
        tmp_path / "peft", adapters.factors(shapes, rank=2), r=2, lora_alpha=8, use_rslora=True
    )
    wanted, like = lora.tensors(peft), ("--like", QWEN3)
    shown = good("adapter", "inspect", swift, *like, "--json").json
    assert (shown["program"], shown["kind"], shown["rank"]) == ("ms-swift", "LoRA", 2)
    assert shown["alpha"] == pytest.approx(8 * 2**0.5)
    good("megatron-to-hf", swift, tmp_path / "read", *like)
    found = lora.tensors(tmp_path / "read")
    assert found.keys() == wanted.keys()
    assert all(np.array_equal(found[key], wanted[key]) for key in wanted)
    for number, sizes in enumerate(SIZES):
        there, back = tmp_path / f"there{number}", tmp_path / f"back{number}"
        good("adapter", "reshard", swift, there, *like, *sizes)
        assert good("adapter", "inspect", there, *like, "--json").json["program"] == "ms-swift"
        good("adapter", "to-hf", there, back, *like)
        assert lora.bytes_of(back) == lora.bytes_of(tmp_path / "read")
    for adapter in (swift, peft, tmp_path / "there1"):
        good("adapter", "merge", QWEN3, adapter, tmp_path / "merged" / adapter.name)
    merged = [lora.tensors(tmp_path / "merged" / name) for name in ("swift", "peft", "there1")]
    weights = lora.tensors(QWEN3)
    for module, scale in ((module, 8 / 2**0.5) for module in shapes):
        key = f"{module}.weight"
        added = lora.product(wanted, module, scale)
        assert all(lora.apart(one[key], weights[key], added) <= 0.5 for one in merged)


def test_an_adapter_for_ms_swift_has_its_names_args_and_order(swift: Path, tmp_path: Path) -> None:
    """Written at the sizes of the sample, it has the same entries with the same values."""
    shapes = adapters.modules(QWEN3, *ATTENTION, *MLP)
    peft = adapters.write(tmp_path / "peft", adapters.factors(shapes, rank=2), r=2, lora_alpha=8)
    written = ("adapter", "to-megatron", peft, QWEN3, tmp_path / "a", "--layout", "swift")
    out = good(*written, "--tp", 2)
    assert (
        "--lora_rank 2 --lora_alpha 8 --target_modules linear_fc1 linear_fc2" in out.out + out.err
    )
    assert (tmp_path / "a/latest_checkpointed_iteration.txt").read_text() == "1"
    ours, theirs = (
        {
            key: value
            for key, value in entries(place / "iter_0000001").items()
            if "common" not in key
        }
        for place in (tmp_path / "a", swift)
    )
    assert ours.keys() == theirs.keys() and len(ours) == 40
    assert all(np.array_equal(ours[key], theirs[key]) for key in ours)
    args = open_files(tmp_path / "a", SourceOptions()).args
    assert args is not None
    assert (args["tuner_type"], args["lora_rank"], args["lora_alpha"]) == ("lora", 2, 8)
    refused(
        2,
        "differ",
        "--layout swift-block",
        args=(*written[:2], ADAPTER, *written[3:], "--overwrite"),
    )
    refused(2, "does not read", "torch_dist", args=(*written, "--format", "torch", "--overwrite"))
    good(*written[:2], ADAPTER, *written[3:5], *("--layout", "swift-block", "--overwrite"))
    good("adapter", "merge", QWEN3, tmp_path / "a", tmp_path / "merged")
    good("adapter", "merge", QWEN3, ADAPTER, tmp_path / "wanted")
    good("diff", tmp_path / "merged", tmp_path / "wanted")


@pytest.mark.parametrize("sizes", [("--tp", 2), ("--tp", 2, "--pp", 2)])
def test_the_adapters_that_verl_saves(sizes: Any, tmp_path: Path) -> None:
    """verl has Megatron-Bridge's modules, and saves a dict of each rank without alpha or args."""
    good(
        "adapter",
        "to-megatron",
        ADAPTER,
        QWEN3,
        tmp_path / "a",
        *BLOCK,
        "--format",
        "torch",
        *sizes,
    )
    good("adapter", "to-hf", tmp_path / "a", tmp_path / "wanted")
    alpha = json.loads((tmp_path / "wanted/adapter_config.json").read_text())["lora_alpha"]
    place = tmp_path / "actor/adapter_checkpoint"
    place.mkdir(parents=True)
    for file in (tmp_path / "a").rglob("*.pt"):
        rank = Pt(file)
        state = {k: v for k, v in rank.value["model"].items() if v is not None}
        save_pt(place / f"{file.parent.name}_adapter.pt", {"adapter_state_dict": state}, rank.data)
    read = ("adapter", "to-hf", place, tmp_path / "read", "--like", QWEN3)
    refused(2, "give --alpha", args=read)
    good(*read, "--alpha", alpha)
    assert lora.bytes_of(tmp_path / "read") == lora.bytes_of(tmp_path / "wanted")
    next(place.glob("mp_rank_01*")).unlink()
    refused(3, "mp_rank_0", args=(*read, "--alpha", alpha, "--overwrite"))


def test_rows_by_rank_need_the_tp_of_the_file(tmp_path: Path) -> None:
    """verl 0.9 saves torch_dist without args."""
    for layout, code in (("block", 0), ("canonical", 2)):
        place = tmp_path / layout
        made_of = ("adapter", "to-megatron", ADAPTER, QWEN3, place, "--layout", layout)
        good(*made_of, "--tp", 2)
        for name in ("run_config.yaml", "mckpt.json"):
            (place / "release" / name).unlink()
        common = Pt(place / "release/common.pt")
        del common.value["args"]
        common.save()
        read = ("adapter", "to-hf", place / "release", tmp_path / f"{layout} read")
        read += ("--like", QWEN3, "--alpha", 12)
        if code:
            refused(code, "in the order of the tensor-parallel ranks", args=read)
        else:
            good(*read)


def test_a_mamba_has_the_factor_b_in_the_sections_of_the_weight(
    tiny_model: TinyModel, tmp_path: Path
) -> None:
    """Megatron-Bridge saves the rows of z, x, B, C and dt apart (ParallelLinearAdapter); these are
    the rows of in_proj of transformers from the first on. tests/judge/test_bridge_adapters.py asks
    Megatron-Bridge.
    """
    base, there = tiny_model("nemotron_h", "float32"), tmp_path / "there"
    made = adapters.factors(adapters.modules(base, "in_proj"))
    adapter = adapters.write(tmp_path / "adapter", made)
    good("adapter", "to-megatron", adapter, base, there, "--tp", 2)
    found = entries(there / "release")
    first = 0
    for section, rows in {"z": 96, "x": 96, "B": 80, "C": 80, "dt": 16}.items():
        key = f"decoder.layers.2.mixer.in_proj.adapter.linear_out.weight.{section}"
        b = made["base_model.model.backbone.layers.2.mixer.in_proj.lora_B.weight"]
        assert np.array_equal(found[key], b[first : first + rows])
        first += rows
    assert first == len(b)
    good("adapter", "reshard", there, tmp_path / "pp2", "--target-tp", 4, "--target-pp", 2)
    for place in (there, tmp_path / "pp2"):
        good("adapter", "to-hf", place, tmp_path / "back", "--overwrite")
        back = adapters.weights(tmp_path / "back")
        # PEFT takes the names of transformers in memory
        wanted = {key.replace(".backbone.", ".model."): array for key, array in made.items()}
        assert back.keys() == wanted.keys()
        assert all(np.array_equal(back[key], wanted[key]) for key in wanted)


@pytest.mark.parametrize("case", ["nemotron_h", "mamba2"])
def test_an_adapter_that_peft_does_not_load_is_merged_only(
    tiny_model: TinyModel, case: str, tmp_path: Path
) -> None:
    base, there, back = tiny_model(case, "float32"), tmp_path / "there", tmp_path / "back"
    made = adapters.factors(adapters.modules(base, "in_proj", "out_proj"))
    adapter = adapters.write(tmp_path / "adapter", made)
    with pytest.raises(ValueError, match="'out_proj' is incompatible with Mamba-based models"):
        adapters.peft_logits(base, adapter, made_models.tokens(case))
    good("adapter", "to-megatron", adapter, base, there, "--tp", 2)
    refused(2, "out_proj.weight", f"a {case} model", args=("adapter", "to-hf", there, back))
    assert not back.exists()
    good("adapter", "merge", base, there, back)
    wanted = adapters.merged(base, adapter)
    assert not adapters.differences(adapters.weights(back), wanted)


def test_the_parent_of_named_adapters_names_them(tmp_path: Path) -> None:
    """PEFT saves each adapter but `default` below the directory."""
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(tiny.load(QWEN3), peft.LoraConfig(), adapter_name="one")
    model.add_adapter("two", peft.LoraConfig())
    saved, out = tmp_path / "saved", tmp_path / "out"
    model.save_pretrained(saved)
    for command in (("merge", QWEN3, saved), ("to-megatron", saved, QWEN3), ("to-hf", saved)):
        words = f"has 2 adapters below it; give {saved / 'one'} or {saved / 'two'}"
        refused(3, words, args=("adapter", *command, out))
    good("adapter", "merge", QWEN3, saved / "two", out)


@pytest.mark.parametrize("release", ["0.5.0", "0.5.1"])
def test_rows_of_an_fc1_without_a_gate_are_read_of_any_release(
    release: str, tmp_path: Path
) -> None:
    """Megatron-Bridge up to 0.5.0 saves each linear_fc1 as if it had a gate
    (ParallelLinearAdapter.sharded_state_dict). The factors are those of `fill` in
    tests/helpers/bridge_adapters.py, of two tensor-parallel ranks.
    """
    saved = unpack("adapters/ungated", tmp_path) / "adapters"
    like = ("--like", saved / "hf")
    good("adapter", "reshard", saved / release, tmp_path / "tp4", "--target-tp", 4, *like)
    (tmp_path / "tp4/iter_0000000/mckpt.json").unlink()
    for number, place in enumerate((saved / release, tmp_path / "tp4")):
        good("adapter", "to-hf", place, tmp_path / f"{number}", *like)
        found = adapters.weights(tmp_path / f"{number}")
        for layer in range(2):
            module = f"base_model.model.model.layers.{layer}.mlp.up_proj."
            fc1 = f"decoder.layers.{layer}.mlp.linear_fc1.adapter."
            shapes = {"lora_B.weight": ("linear_out.weight", (56, 4))}
            if release == "0.5.0":  # DoRA
                shapes["lora_magnitude_vector"] = ("weight_magnitude", (56,))
            for end, (name, shape) in shapes.items():
                seed = zlib.crc32(f"{fc1}{name}".encode())
                drawn = (np.random.RandomState([seed, 0, tp, 0, 0]).randn(*shape) for tp in (0, 1))
                wanted = np.concatenate([one / 8 for one in drawn]).astype(np.float32)
                assert np.array_equal(found.pop(module + end), wanted)
            assert found.pop(module + "lora_A.weight").shape == (4, 48)
        assert not found


def test_an_adapter_that_all_experts_share_is_that_of_each(tmp_path: Path) -> None:
    """Megatron-Bridge 0.3 has one for a layer. Its factors are those of `fill` in
    tests/helpers/bridge_adapters.py, and with them its logits were those of the merged weights.
    """
    saved = unpack("adapters/shared", tmp_path) / "adapters"
    like = ("--like", saved / "hf")
    good("adapter", "reshard", saved / "0.3.1", tmp_path / "tp2", "--target-tp", 2, *like)
    for number, place in enumerate((saved / "0.3.1", tmp_path / "tp2")):
        good("adapter", "to-hf", place, tmp_path / f"{number}", *like)
        found = adapters.weights(tmp_path / f"{number}")
        for layer in range(2):
            for fc, linears in (("fc1", ("gate_proj", "up_proj")), ("fc2", ("down_proj",))):
                rows, columns = (128, 48) if fc == "fc1" else (48, 64)
                start = f"decoder.layers.{layer}.mlp.experts.linear_{fc}.adapter."
                shapes = {"linear_in": (4, columns), "linear_out": (rows, 4)}
                a, b = (
                    np.random.RandomState([zlib.crc32(f"{start}{end}.weight".encode()), 0, 0, 0, 0])
                    .randn(*shape)
                    .astype(np.float32)
                    / 8
                    for end, shape in shapes.items()
                )
                of_linears = np.split(b, len(linears))
                for expert, (linear, own) in itertools.product(
                    range(4), zip(linears, of_linears, strict=True)
                ):
                    module = f"base_model.model.model.layers.{layer}.mlp.experts.{expert}.{linear}"
                    assert np.array_equal(found.pop(f"{module}.lora_A.weight"), a)
                    assert np.array_equal(found.pop(f"{module}.lora_B.weight"), own)
        assert not found


def entries(directory: Path) -> dict[str, Any]:
    """Returns the tensors of a torch_dist checkpoint, and None for each of its objects."""
    import torch
    from torch.distributed.checkpoint import FileSystemReader
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

    stored = FileSystemReader(directory).read_metadata().state_dict_metadata
    found = {
        key: torch.empty(entry.size, dtype=entry.properties.dtype)
        for key, entry in stored.items()
        if hasattr(entry, "size")
    }
    _load_state_dict(found, FileSystemReader(directory), no_dist=True)
    return {key: found[key].numpy() if key in found else None for key in stored}
