"""Every edit of every kind of model, from and to both formats, with and without the state of the
optimizer: each element beside tests/helpers/edit_reference.py, or a refusal by its words.

It takes two minutes of one core, 20 s of which are the training of the sources.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from safetensors.numpy import load_file

if not find_spec("megatron.core"):
    pytest.skip("megatron-core is not installed", allow_module_level=True)

import mckpt
from mckpt.checkpoint.checkpoint import Checkpoint
from mckpt.errors import MckptError
from tests.helpers import edit_reference as ref
from tests.helpers import made_models, optimizer_samples, tiny
from tests.helpers.edit_reference import Tensors
from tests.helpers.judging import explain, judge

pytestmark = [pytest.mark.judge, pytest.mark.newest]

# dense, tied, experts, latent attention and multi-token prediction, a hybrid, gated delta nets
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3-tied": {"num_hidden_layers": 4},
    "qwen3-moe": {"num_experts": 6, "num_experts_per_tok": 2, "num_key_value_heads": 4},
    "deepseek-v3": {"n_routed_experts": 8, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2},
    "nemotron_h": {},
    "qwen3_next": {},
}
DENSE = ("llama", "qwen3-tied", "nemotron_h")
LAYERS = {  # keep, drop, order and silent_after, with a number of layers for 2 stages
    "deepseek-v3": ([0, 2], [1, 2], [0, 3, 1, 3, 2, 1], [1, 3]),
    "nemotron_h": ([0, 4, 6, 7], [1, 5], [2, 0, 3, 0, 4, 5, 6, 7], [1, 4]),
    "": ([0, 2], [1, 2], [2, 0, 3, 0], [0, 3]),
}
PATTERNS = {  # of hybrids
    "llama": "M*-*-M*-*-MM",
    "qwen3-tied": "*M-*-*-MM*-M",
    "qwen3-moe": "*EM*E*EM*EMM",
    "deepseek-v3": "M*M-*EM*E*EM",
    "nemotron_h": "M*-*-",
    "qwen3_next": "*E*EM*-MM*EM",
}
MAMBA = "mamba_head_dim: 8, mamba_num_groups: 2, mamba_state_dim: 12, seed: 7"
# lists of other things than layers, and of the decoder's layers alone
NOT_BY_LAYER = ("mamba_multipliers", "mlp_multipliers")
WITHOUT_MTP = (*NOT_BY_LAYER, "window_layers", "attn_blocks", "rope_layers")

TAKES = ("layers", "head", "embedding", "mtp")
AXES = ("experts", "ffn", "expert_ffn", "heads", "hidden")
EDITS = (
    *("keep", "drop", "order", "silent", "untie", "tie", "tie alone", "times", "mean heads"),
    *("mean rows", "zero rows", "copied rows", "fewer rows", "map"),
    *(f"prune {what}" for what in AXES),
    *("mtp add", "mtp drop", "upcycle", "hybrid", *(f"graft {take}" for take in TAKES)),
)
UNTIED = [family for family in FAMILIES if "tied" not in family]
REFUSED = {  # (edit, family) -> the words
    **{("untie", family): "has an output layer of its own" for family in UNTIED},
    **{("tie alone", family): "rows of the output layer differ from" for family in UNTIED},
    ("tie alone", "qwen3-tied"): "is its output layer already",
    **{
        (edit, family): "an attention without such heads in each layer"
        for edit in ("times", "mean heads")
        for family in ("deepseek-v3", "qwen3_next")
    },
    **{
        (f"prune {what}", family): "the layers of the model have none"
        for what in ("experts", "expert_ffn")
        for family in DENSE
    },
    ("prune ffn", "qwen3-moe"): "the layers of the model have none",
    ("mtp add", "nemotron_h"): "the last layer of the model is `attn`",
    **{
        (edit, family): "no layers of multi-token prediction"
        for edit in ("mtp drop", "graft mtp")
        for family in FAMILIES
        if family != "deepseek-v3"
    },
    **{
        ("upcycle", family): "is a mixture of experts already"
        for family in FAMILIES
        if family not in DENSE
    },
    ("upcycle", "nemotron_h"): "not every layer has an attention and an mlp",
    ("hybrid", "nemotron_h"): "has Mamba-2 layers already",
}
OF_HF = {  # those that no config.json of transformers describes
    **{("hybrid", family): "no class of transformers computes" for family in FAMILIES},
    ("tie", "nemotron_h"): "nemotron_h would compute with False",
}
# the source, the other checkpoint of a graft, and the target: "run" is torch_dist at tp 2, pp 2 and
# ep 2, and "hf" has its weights
CONVERSIONS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "HF to HF": ("hf", "other-hf", {}),
    "HF to Megatron": ("hf", "other", {"format": "torch_dist", "tp": 2, "pp": 2, "ep": 2}),
    "weights": ("run", "other-hf", {"no_optimizer": True, "tp": 2, "pp": 2, "ep": 2}),
    "states": ("run", "other", {"tp": 2, "pp": 1, "ep": 1, "etp": 2}),
}


class Edit(NamedTuple):
    steps: list[str]
    reference: Callable[[Tensors], Tensors]
    dims: dict[str, Any]  # those that change


class Model:
    """The checkpoints of a family: "run", "hf" with its weights, "other" and "other-hf" with other
    tensors, and "equal" whose output layer equals its embedding.
    """

    def __init__(self, family: str, work: Path) -> None:
        self.family, self.work = family, work
        self.opened = cache(lambda name: mckpt.open(self.path(name)))
        self.tensors = cache(lambda name: tensors(self.opened(name)))
        self.mamba = cache(lambda: ref.mamba(PATTERNS[family], 7, self.dims))
        self.dims = dict[str, Any]()

    def path(self, name: str) -> Path:
        return self.work / name / self.family

    def sizes(self, given: dict[str, Any]) -> dict[str, Any]:
        """Returns sizes of which a dense model has no experts'."""
        experts = {"ep", "etp"} if self.family in DENSE else set[str]()
        given = {"etp": 1, **given} if "ep" in given else given
        return {name: value for name, value in given.items() if name not in experts}


def tensors(found: Checkpoint) -> Tensors:
    """Returns the logical tensors of a checkpoint, with the states of its optimizer."""
    found = found.with_optimizer() if found.optimizer is not None else found
    return {name: found[name][:].numpy() for name in found}


@pytest.fixture(scope="module")
def models(work: Path) -> dict[str, Model]:
    """Trains all families for two steps in one launch of 4 ranks, and makes the other forms."""
    models = {family: Model(family, work) for family in FAMILIES}
    made_models.make([f for f in FAMILIES if f not in tiny.CASES], work / "made")
    cases = []
    for family, model in models.items():
        new, start = model.path("new"), model.path("start")
        if family in tiny.CASES:
            tiny.tiny_random(family, new, "bfloat16", **FAMILIES[family])
        else:
            made_models.cast(work / "made" / family, new, "bfloat16")
        mckpt.convert(new, start, format="torch_dist")
        form = optimizer_samples.FORMS["fully_reshardable"]
        sizes = model.sizes({"tp": 2, "pp": 2, "ep": 2})
        cases.append(optimizer_samples.case(family, start, work / "run", sizes, form))
    for result in judge(cases, work / "results").values():
        assert result["ok"], explain(result)
    for model in models.values():
        other, equal = model.path("other"), model.path("equal")
        mckpt.convert(model.path("run"), model.path("hf"), format="hf")
        model.dims = dict(model.opened("hf").dims)
        width = model.dims["hidden_size"]
        # the elements of the residual stream in another order
        order = [*range(7, width), *range(7)]
        mckpt.edit(model.path("run"), other, [f"prune: {{hidden: {order}}}"])
        mckpt.convert(other, model.path("other-hf"), format="hf")
        shutil.copytree(model.path("hf"), equal)
        held = load_file(equal / "model.safetensors")
        rows = next(
            t for n, t in held.items() if n.endswith(("embed_tokens.weight", "embeddings.weight"))
        )
        tiny.write_weights(equal, {n: rows if "head.weight" in n else t for n, t in held.items()})
        (equal / "mckpt.json").unlink()
    return models


def test_the_sources_have_states_that_are_not_zero(models: dict[str, Model]) -> None:
    for model in models.values():
        run, other = model.tensors("run"), model.tensors("other")
        assert {ref.split(name)[2] for name in run} == {"", "master", "exp_avg", "exp_avg_sq"}
        assert all(values.any() for values in run.values())
        weights = {name: values for name, values in run.items() if "@" not in name}
        same(model.tensors("hf"), weights)
        assert sum(other[n].tobytes() != v.tobytes() for n, v in run.items()) > len(run) / 2


def same(found: Tensors, wanted: Tensors) -> None:
    assert found.keys() == wanted.keys(), sorted(found.keys() ^ wanted.keys())[:4]
    for name, values in wanted.items():
        own = found[name]
        assert (own.shape, own.dtype) == (values.shape, values.dtype), name
        assert own.tobytes() == np.ascontiguousarray(values).tobytes(), name


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("edit", EDITS)
def test_an_edit_of_a_kind_of_model(
    edit: str, family: str, models: dict[str, Model], tmp_path: Path
) -> None:
    model, expected = models[family], dict[str, Tensors]()
    for name, (source, other, given) in CONVERSIONS.items():
        found, out = edits(model, other), tmp_path / name.replace(" ", "-")
        assert tuple(found) == EDITS
        steps, reference, changed = found[edit]
        before = model.opened(source)
        words = REFUSED.get((edit, family), "")
        words = words or (OF_HF.get((edit, family), "") if name == "HF to HF" else "")
        if words:
            with pytest.raises(MckptError, match=words):
                mckpt.edit(before, out, steps, **model.sizes(given))
            assert not out.exists()
            continue
        mckpt.edit(before, out, steps, **model.sizes(given))
        of = "run" if name == "states" else "hf"
        if of not in expected:
            expected[of] = reference(model.tensors(of))
        after = mckpt.open(out)
        same(tensors(after), expected[of])
        wanted = {n: plain(changed.get(n, value)) for n, value in before.dims.items()}
        assert {n: plain(value) for n, value in after.dims.items()} == wanted
        if name == "weights":
            assert mckpt.check(out).verdict == "sound"
        shutil.rmtree(out)


def test_each_refusal_is_that_of_an_edit_of_a_family() -> None:
    cells = {(edit, family) for edit in EDITS for family in FAMILIES}
    assert REFUSED.keys() | OF_HF.keys() <= cells
    assert len(cells - REFUSED.keys()) == 124


def plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def drawn(count: int, size: int, seed: int) -> list[int]:
    """Returns `size` of the numbers below `count`, in no order."""
    found: list[int] = np.random.RandomState(seed).permutation(count)[:size].tolist()
    return found


def edits(model: Model, other: str) -> dict[str, Edit]:
    """Returns every edit of a model. other: the name of the other checkpoint of a graft."""
    found = {**_layers_and_heads(model), **_rows(model), **_cut(model), **_more(model, other)}
    return {name: found[name] for name in EDITS}


def _layers_and_heads(model: Model) -> dict[str, Edit]:
    dims, out = model.dims, dict[str, Edit]()
    count, head, groups = dims["num_layers"], dims["head_dim"], dims["num_query_groups"]
    kept, dropped, order, after = LAYERS.get(model.family, LAYERS[""])
    silent = [n for old in range(count) for n in [old] * (1 + (old in after))]
    new = [n for n in range(1, len(silent)) if silent[n] == silent[n - 1]]
    for name, how, given, found, quiet in (
        ("keep", "keep", kept, kept, []),
        ("drop", "drop", dropped, [n for n in range(count) if n not in dropped], []),
        ("order", "order", order, order, []),
        ("silent", "silent_after", after, silent, new),
    ):
        lists = {n: v for n, v in dims.items() if isinstance(v, list) and n not in NOT_BY_LAYER}
        changed = {n: [v[old] for old in found] + v[count:] for n, v in lists.items()}
        out[name] = Edit(
            [f"layers: {{{how}: {given}}}"],
            lambda t, found=found, quiet=quiet: ref.layers(t, found, count, quiet),
            {**changed, "num_layers": len(found)},
        )
    tie = ["untie"] if dims["tied"] else [f"graft: {{from: {model.path('equal')}, take: head}}"]
    out["untie"] = Edit(["untie"], ref.untied, {"tied": False})
    out["tie"] = Edit([*tie, "tie"], ref.without_head, {"tied": True})
    out["tie alone"] = Edit(["tie"], ref.without_head, {})
    for name, given, num, reference in (
        ("times", "times: 2", groups * 2, lambda t: ref.repeated_heads(t, 2, head)),
        ("mean heads", "mean: 2", 2, lambda t: ref.mean_heads(t, groups // 2, head)),
    ):
        changed = {"num_query_groups": num, "query_groups": [num] * len(dims["query_groups"])}
        out[name] = Edit([f"kv_heads: {{{given}}}"], reference, changed)
    return out


def _rows(model: Model) -> dict[str, Edit]:
    count, path = model.dims["vocab_size"], model.path("hf").parent / f"{model.family}.json"
    mapped = [*range(8), *drawn(count, 40, 3), None, 9, 9, None]
    path.write_text(json.dumps({n: old for n, old in enumerate(mapped) if old is not None}))
    more = [*range(count), *[None] * 9]
    mean: Callable[[np.ndarray], np.ndarray] = lambda rows: rows.mean(0)  # noqa: E731
    return {
        name: Edit(
            [f"vocab: {{size: {len(numbers)}, {given}}}"],
            lambda t, numbers=numbers, new=new: ref.rows(t, numbers, new),
            {"vocab_size": len(numbers)},
        )
        for name, given, numbers, new in (
            ("mean rows", "init: mean", more, mean),
            ("zero rows", "init: zero", more, lambda rows: np.zeros_like(rows[0])),
            ("copied rows", "init: 5", more, lambda rows: rows[5]),
            ("fewer rows", "seed: 0", more[: count - 30], mean),
            ("map", f"map: {path}", mapped, mean),
        )
    }


def _cut(model: Model) -> dict[str, Edit]:
    dims, out = model.dims, dict[str, Edit]()
    every, groups, num = dims["num_experts"], dims["router_groups"], dims["num_query_groups"]
    few = every * 2 // 3 // groups
    for what, part, counted, size, lists, reference in (
        ("experts", "moe", "num_experts", few * groups, [], ref.experts),
        ("ffn", "mlp", "ffn_size", dims["ffn_size"] // 2, ["ffn_sizes"], ref.units),
        (
            "expert_ffn",
            "moe",
            "expert_ffn_size",
            dims["expert_ffn_size"] // 2,
            [],
            ref.units_of_experts,
        ),
        (
            "heads",
            "attn",
            "num_query_groups",
            num // 2,
            ["query_groups"],
            lambda t, k: ref.heads(t, k, num),
        ),
    ):
        layers = [n for n, parts in enumerate(dims["layer_parts"]) if part in parts.split()]
        if what == "heads":
            layers = [n for n in layers if not dims["linear_layers"][n]]
        kept = {n: drawn(dims[counted], size, n) for n in layers}
        if what == "experts":  # as many of each group, group after group
            at = [n * every // groups for n in range(groups)]
            kept = {n: [i + a for a in at for i in drawn(every // groups, few, n)] for n in layers}
        changed = {counted: size, **{name: [size] * len(dims[name]) for name in lists}}
        if what == "heads":
            changed["num_heads"] = dims["num_heads"] // 2
        out[f"prune {what}"] = Edit(
            [f"prune: {{{what}: {json.dumps(kept) if kept else 0}}}"],
            lambda t, kept=kept, reference=reference: reference(t, kept),
            changed,
        )
    width = dims["hidden_size"]
    stream = [*range(width // 2, width - 5), 5, 3, *range(8, 11)]
    out["prune hidden"] = Edit(
        [f"prune: {{hidden: {stream}}}"],
        lambda t: ref.hidden(t, stream, width),
        {"hidden_size": len(stream)},
    )
    return out


def _more(model: Model, other: str) -> dict[str, Edit]:
    """Returns the edits that add tensors, or take them from another model."""
    dims, out, pattern = model.dims, dict[str, Edit](), PATTERNS[model.family]
    count, mtp = dims["num_layers"], dims["mtp_layers"]
    lists = {n: v for n, v in dims.items() if isinstance(v, list) and n not in WITHOUT_MTP}
    out["mtp add"] = Edit(
        ["mtp: {add: 1}"],
        lambda t: ref.more_mtp(t, count, count + mtp, dims["norm_offset"]),
        {"mtp_layers": mtp + 1, **{n: [*v, v[count - 1]] for n, v in lists.items()}},
    )
    out["mtp drop"] = Edit(
        ["mtp: {drop: true}"],
        lambda t: {n: v for n, v in t.items() if ref.split(n)[0] < count},
        {"mtp_layers": 0, **{n: v[:count] for n, v in lists.items()}},
    )
    half = dims["ffn_size"] // 2
    changed = {"num_experts": 6, "experts_per_token": 2, "expert_ffn_size": half, "ffn_size": half}
    changed |= {"ffn_sizes": [half] * count, "moe_layers": [1] * count, "normalize_topk": True}
    out["upcycle"] = Edit(
        ["upcycle: {experts: 3, topk: 2, granularity: 2}"],
        lambda t: ref.upcycled(t, 3, 2),
        {**changed, "layer_parts": ["attn moe"] * count},
    )
    out["hybrid"] = Edit(
        [f'hybrid: {{pattern: "{pattern}", {MAMBA}}}'],
        lambda t: ref.hybrid(t, pattern, count, model.mamba()),
        ref.dims_of_hybrid(dims, pattern, NOT_BY_LAYER) if model.family != "nemotron_h" else {},
    )
    takes: dict[str, Callable[[int, str], bool]] = {
        "layers": lambda layer, rest: layer in (1, count - 1),
        "head": lambda layer, rest: rest == "lm_head.weight",
        "embedding": lambda layer, rest: rest == "embed.weight",
        "mtp": lambda layer, rest: layer >= count,
    }
    for take, wanted in takes.items():
        # Hugging Face directories have no states
        path = "other-hf" if take in ("head", "embedding") else other
        named = f"layers.1,{count - 1}" if take == "layers" else take
        renamed = {"embed.weight": "lm_head.weight"} if dims["tied"] and take == "head" else {}
        out[f"graft {take}"] = Edit(
            [f'graft: {{from: {model.path(path)}, take: "{named}"}}'],
            lambda t, path=path, wanted=wanted, renamed=renamed: ref.grafted(
                t, model.tensors(path), wanted, renamed
            ),
            {"tied": False} if renamed else {},
        )
    return out
