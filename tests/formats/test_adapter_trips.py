"""An adapter (LoRA or DoRA) becomes one of Megatron, of other sizes and formats, and comes back.
Merged into a base of any format, it gives the sums that numpy computes.

A row of TRIPS is BASE KIND MODULES > CHECKPOINT > CHECKPOINT ...: the modules are `all`, or the
ends of their names; a CHECKPOINT is a format and options of the command line. The first one may
have --layout; without it, the adapter is only merged.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import mckpt
from mckpt.values import adding
from tests.helpers import lora
from tests.helpers.commands import good
from tests.helpers.tiny import FIXTURES, TinyModel
from tests.unit import test_adapters, test_dora

QWEN3 = FIXTURES / "tiny-qwen3"
BUT = ("norm", "embed", "lm_head", "shared_head", "visual")
TP2, TP4 = "--tp 2 --pp 2", "--tp 4"

TRIPS = [
    # factors of their own for each weight of a linear
    *(
        f"tiny-qwen3 lora all > {a} --layout {layout} --tp 1 > {b} {TP2}"
        for layout in ("block", "canonical")
        for a, b in (("torch", "torch_dist"), ("torch_dist", "torch"))
    ),
    # layers that differ in their mlp, and some without an attention or an mlp
    *(
        f"llama_nemotron lora all > torch --layout {layout} {TP2} > torch_dist {TP4} --pp 1"
        for layout in ("canonical", "block")
    ),
    # some of the linears that in_proj of a gated delta net packs
    *(
        f"{base} lora {ends} > torch_dist --layout block --tp 2 > torch --tp 1"
        for base, ends in (("qwen3_5", "in_proj_a"), ("qwen3_next", "in_proj_qkvz"))
    ),
    # an output layer whose rows are padded
    *(
        f"qwen2_moe lora lm_head > {format} --layout fused --tp {tp}"
        for format in ("torch_dist", "torch")
        for tp in (1, 2)
    ),
    *(
        f"{base} dora all > torch_dist --layout {layout} --pp {pp} > torch --pp 1"
        for base, pp in (("qwen3", 2), ("qwen3_5", 1))
        for layout in ("fused", "block")
    ),
    "tiny-qwen3 dora up_proj,gate_proj > torch_dist --layout block --tp 2 > torch_dist --tp 1",
    # parts of a linear that have no adapter; the commonest LoRA adapts q and v alone
    *(
        f"tiny-qwen3 lora {ends} > {format} {TP2}"
        for ends in ("q_proj,v_proj", "up_proj", "k_proj", "lm_head")
        for format in ("torch_dist", "torch")
    ),
    *(
        f"{base} {kind} all > {format} {TP2} {'' if base == 'qwen3' else '--ep 2'}"
        for base, kind in (
            *(("qwen3", "lora"), ("qwen3-moe", "lora")),
            *(("deepseek-v3", "lora"), ("deepseek-v3", "dora")),
        )
        for format in ("torch_dist", "torch")
    ),
]


def same(one: Path, other: Path, close: bool) -> None:
    """Asserts that two merges are equal, but for the order of the sums in the lengths of DoRA."""
    if not close:
        assert not mckpt.diff(one, other)
        return
    left, right = mckpt.open(one), mckpt.open(other)
    assert set(left) == set(right)
    for name in left:
        a, b = (np.asarray(side[name].numpy(), "f8") for side in (left, right))
        assert (a != b).mean() < 1e-3 and abs(a - b).max() <= 2.0**-7 * abs(a).max(), name


@pytest.mark.parametrize("row", TRIPS, ids=str)
def test_an_adapter_comes_back(
    row: str, tiny_model: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The merge is that of numpy, also into bases and targets of Megatron and with the adapter in
    Megatron. The layouts fused and canonical give the same factors back.
    """
    monkeypatch.setattr(adding, "CHUNK", 400)  # the length of a row comes from several parts of it
    monkeypatch.setattr(adding, "BLOCK", 20)
    (name, kind, ends), *texts = (text.split() for text in row.split(" > "))
    dora = kind == "dora"
    if name == "tiny-qwen3":
        base = QWEN3
    elif (FIXTURES / "tiny" / f"{name}.json").exists():
        base = tiny_model(name)
    else:
        base = test_adapters.made(name, tmp_path / "made")
    weights = lora.tensors(base)
    modules = lora.matrices(weights, BUT if ends != "lm_head" else ("norm", "embed"))
    modules = [m for m in modules if ends == "all" or m.endswith(tuple(ends.split(",")))]
    assert modules
    adapter, merged = tmp_path / "adapter", tmp_path / "merged"
    stored = lora.factors(weights, modules)
    if "--layout fused" in row:  # one factor A for the weights of a linear
        first = {len(v[0]): v for k, v in stored.items() if k.endswith("_A.weight")}
        stored |= {k: first[len(v[0])] for k, v in stored.items() if k.endswith("_A.weight")}
    stored = lora.with_magnitudes(stored, modules) if dora else stored
    lora.save(adapter, stored, use_dora=dora)
    good("adapter", "merge", base, adapter, merged)
    if dora:
        test_dora.expect_merged(base, merged, stored, modules)
    else:
        test_adapters.expect_merged(base, merged, stored, dict.fromkeys(modules, 2.0))
    format, *options = texts[0]
    layout = options[1] if "--layout" in options else ""
    sizes = options[2:] if layout else options
    there, described = ("--format", format, *sizes), base
    if not layout or "tiny" in name or ends == "lm_head":
        described = tmp_path / "base"
        good("hf-to-megatron", base, described, *there)
        assert dora or not mckpt.diff(mckpt.open(described, adapter=adapter), merged)
        good("adapter", "merge", tmp_path / "base", adapter, tmp_path / "same", "--target-tp", 4)
        good("adapter", "merge", tmp_path / "base", adapter, tmp_path / "back", "--format", "hf")
        good("hf-to-megatron", base, tmp_path / "there", *there, "--adapter", adapter, "--merge")
        for other in ("same", "back", "there"):
            same(merged, tmp_path / other, dora)
    if not layout:
        return
    at = tmp_path / "0"
    good("adapter", "to-megatron", adapter, described, at, "--format", format, *options)
    for number, (format, *options) in enumerate([texts[0], *texts[1:]]):
        if number:
            before, at = at, tmp_path / str(number)
            good("adapter", "reshard", before, at, "--target-format", format, *options)
        for config in at.rglob("run_config.yaml"):  # which torch has none of
            assert ("peft.dora.DoRA" in config.read_text()) == dora
        peft, again = tmp_path / f"peft{number}", tmp_path / f"again{number}"
        good("adapter", "to-hf", at, peft)
        assert layout == "block" or lora.same(peft, adapter)
        good("adapter", "merge", base, at if number else peft, again, "--format", "hf")
        same(merged, again, dora)
