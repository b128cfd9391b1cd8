"""A live model is filled with the bits that a conversion and megatron-core's own load give it."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mckpt
from mckpt import launching
from tests.helpers import made_models, tiny
from tests.helpers.judging import explain, judge
from tests.helpers.tiny import TinyModel
from tests.judge import test_family_models as family_models

pytestmark = [pytest.mark.judge, pytest.mark.newest]

ROOT = Path(__file__).resolve().parents[2]
WORLD = 4
# the sizes of the live model; in a world of 4 some of them have replicas
DENSE: list[dict[str, Any]] = [{"tp": 2, "pp": 2, "vpp": 2}]
MOE: list[dict[str, Any]] = [{"tp": 2, "pp": 2}, {"tp": 2, "ep": 2, "etp": 1}]
# of a source of the format torch, which are not those of the live model
OTHER = {"tp": 4, "pp": 2}
EXPERTS = ("mixtral", "qwen3-moe", "qwen3-moe-raw", "deepseek-v3", "deepseek-v3-plain")
# a launch at other sizes, in which four or two ranks hold the same weights and share the reading
SHARED: list[tuple[str, dict[str, Any]]] = [("qwen3", {"tp": 2}), ("qwen3-moe", {"ep": 2})]
# the keywords of saves, by a name
SAVES: dict[str, dict[str, Any]] = {
    "hf": {"format": "hf"},
    "hf-fp32": {"format": "hf", "dtype": "fp32", "background": True, "max_shard_size": 100_000},
    "dist": {},
    "torch": {"format": "torch", "tp": 2, "pp": 2, "background": True, "checksum": "sha256"},
}
ENGINES = ("sglang", "vllm")
# of Sync, as UNLIKE in tests/helpers/live_cases.py
KEYWORDS = (
    "bucket_bytes",
    "slices",
    "dtype",
    "quantize",
    "to",
    "adapter",
    "snapshot",
    "allow_overflow",
    "vocab_size",
)
# args of pipelines whose stages do not have the same number of layers
UNEVEN: dict[str, dict[str, Any]] = {
    "uneven": {"decoder_first_pipeline_num_layers": 1},
    "uneven-layout": {"pipeline_model_parallel_layout": "Et|tttL"},
}
FAULTS = (
    "extra_parameter",
    "hidden_parameter",
    "renamed_parameter",
    "other_settings",
    "failing_read",
    "lost_rank",
    "lost_in_call",
)


def sizes_of(case: str) -> list[dict[str, Any]]:
    if case in EXPERTS:
        return MOE
    return DENSE if tiny.config(case)["num_hidden_layers"] % 4 == 0 else [{"tp": 2, "pp": 2}]


def name_of(case: str, size: dict[str, Any]) -> str:
    return f"{case}-" + "".join(f"{k}{v}" for k, v in size.items())


@pytest.fixture(scope="module")
def filled(work: Path, tiny_model: TinyModel) -> dict[str, dict[str, Any]]:
    """The results of every case, all from one launch."""
    cases: list[dict[str, Any]] = []
    options: dict[str, Any] = {"transformer_impl": "local", "allow_inexact": ["rope_factor"]}

    def add(name: str, source: Path, size: dict[str, Any], *loads: Any, **more: Any) -> None:
        converted = work / "dist" / source.name
        if not converted.exists():
            mckpt.convert(source, converted, **options)
        given = [[str(place), keywords] for place, keywords in loads]
        cases.append(
            {"name": name, "kind": "live", "checkpoint": str(converted), "loads": given}
            | {"world": WORLD, **size, **more}
        )

    def export(case: str, name: str, **keywords: Any) -> Path:
        out = work / name / case
        if not out.exists():
            mckpt.convert(work / "dist" / case, out, format="hf", **keywords)
        return out

    for case in tiny.CASES:
        source, other = tiny_model(case), work / "other" / case
        mckpt.convert(source, other, format="torch", **options, **OTHER)
        for size in sizes_of(case):
            loads = (source, {}), (other, {"threads": 2})
            add(name_of(case, size), source, size, *loads)
            cases[-1]["exports"] = [[str(export(case, "hf")), {}]]
            cases[-1]["like"] = str(source)
    for case, size in SHARED:
        source, small = tiny_model(case), {"broadcast": True, "max_memory": "17MiB"}
        loads = (source, small), (work / "dist" / case, {"broadcast": True})
        add(f"shared-{case}", source, size, *loads)
        hf = str(export(case, "hf"))
        cases[-1]["like"] = str(source)
        cases[-1]["exports"] = [
            [hf, {"bucket_bytes": 65536, "slices": True}],
            [hf, {"bucket_bytes": "1MiB", "to": 2}],
            [hf, {"bucket_bytes": "1MiB", "to": "halves"}],
            [hf, {"bucket_bytes": "2MiB", "to": "last", "slices": True}],
            [str(export(case, "fp32", dtype="fp32")), {"dtype": "fp32"}],
            [str(export(case, "fp16", dtype="fp16")), {"dtype": "fp16"}],
            [str(export(case, "fp8", quantize="fp8")), {"quantize": "fp8"}],
        ]
        cases[-1]["saves"] = [
            [str(work / "saved" / f"{case}-{name}"), options] for name, options in SAVES.items()
        ]
    for case, size in (("qwen3", {"tp": 2}), ("qwen3-moe", {"ep": 2, "etp": 1})):
        loads = (tiny_model(case), {}), (tiny_model(case), {"broadcast": True})
        add(f"trains-{case}", tiny_model(case), size, *loads, trains=True)
    add("trains-whole", tiny_model("qwen3"), {"tp": 2}, (tiny_model("qwen3"), {}), trains=True)
    cases[-1]["options"] = {"distributed_optimizer": False}
    other = tiny.tiny_random("qwen3", work / "same-shapes", seed=7)
    add("hands", tiny_model("qwen3"), {"tp": 2}, (tiny_model("qwen3"), {}), hands=True)
    cases[-1] |= {"like": str(tiny_model("qwen3")), "timeout": 20}
    cases[-1]["sources"] = [str(tiny_model("qwen3")), str(other)]
    for name, split in UNEVEN.items():
        add(name, tiny_model("qwen3"), {"pp": 2}, args=split, like=str(tiny_model("qwen3")))
        cases[-1]["saves"] = [[str(work / "saved" / name), {}]]
    # the last rank's rows of the vocabulary are padding: 131 tokens have 256 rows
    add("padding", tiny_model("llama"), {"tp": 4}, (tiny_model("llama"), {}))
    engines = {name: [launching.free_port(), launching.free_port()] for name in ENGINES}
    add("engines", tiny_model("qwen3-moe"), {"tp": 2, "pp": 2}, engines=engines)
    cases[-1]["like"] = str(tiny_model("qwen3-moe"))
    quantised = work / "quantised"
    mckpt.convert(tiny_model("qwen3"), quantised, format="hf", quantize="fp8")
    add("quantised", quantised, {"tp": 2, "pp": 2}, (quantised, {}))
    for fault in FAULTS:
        source = tiny_model("qwen3")
        add(fault, source, {"tp": 2, "pp": 2}, (source, {}), fault=fault, timeout=20)
    other = tiny_model("qwen2")
    add("other", tiny_model("qwen3"), {"tp": 2}, (other, {}), fault="failing_read")
    servers = []
    for name, ports in engines.items():
        server, received = (
            ROOT / "tests" / "helpers" / f"{name}_server.py",
            work / "received" / name,
        )
        received.mkdir(parents=True)
        servers.append(
            subprocess.Popen([sys.executable, str(server), str(ports[0]), str(received)])
        )
    try:
        return judge(cases, WORLD, work / "live", timeout=900)
    finally:
        for process in servers:
            process.kill()
            process.wait()


@pytest.mark.parametrize("engine", ENGINES)
def test_an_engine_receives_the_weights_of_each_step(
    engine: str, work: Path, tiny_model: TinyModel, filled: dict[str, dict[str, Any]]
) -> None:
    assert filled["engines"]["ok"], explain(filled["engines"])
    wanted = mckpt.open(work / "dist" / "qwen3-moe").hf_tensors()
    for step, factor in enumerate((1, 2)):
        folder = work / "received" / engine / str(step)
        shutil.copy(tiny_model("qwen3-moe") / "config.json", folder)
        received = mckpt.open(folder).hf_tensors()
        assert received.keys() == wanted.keys()
        for name, tensor in wanted.items():
            assert np.array_equal(received[name].numpy(), tensor.numpy() * factor), name


@pytest.mark.parametrize("case", tiny.CASES)
def test_a_live_model_gets_the_bits_of_the_file_route(
    case: str, filled: dict[str, dict[str, Any]]
) -> None:
    for size in sizes_of(case):
        result = filled[name_of(case, size)]
        assert result["ok"], explain(result)
        assert result["differs"] == {"fresh": [], "0": [], "1": []}


@pytest.mark.parametrize("case", tiny.CASES)
def test_a_live_model_gives_the_tensors_of_the_file_route(
    case: str, filled: dict[str, dict[str, Any]]
) -> None:
    for size in sizes_of(case):
        result = filled[name_of(case, size)]
        assert result["ok"], explain(result)
        assert result["exported"] == {"0": []}


@pytest.mark.parametrize("case", [case for case, _ in SHARED])
def test_buckets_receivers_and_dtypes_change_no_value(
    case: str, filled: dict[str, dict[str, Any]]
) -> None:
    result = filled[f"shared-{case}"]
    assert result["ok"], explain(result)
    assert len(result["exported"]) == 7
    assert not any(result["exported"].values()), result["exported"]


@pytest.mark.parametrize("case", [case for case, _ in SHARED])
def test_a_saved_model_is_that_of_the_file_route(
    case: str, work: Path, filled: dict[str, dict[str, Any]]
) -> None:
    result = filled[f"shared-{case}"]
    assert result["ok"], explain(result)
    for name, options in SAVES.items():
        saved = work / "saved" / f"{case}-{name}"
        assert mckpt.check(saved).exit_code == 0
        if options.get("format") != "hf":
            assert not mckpt.diff(work / "dist" / case, saved)
            assert sorted((saved / "hf").iterdir())
            continue
        right, given = work / "right" / f"{case}-{name}", {**options}
        given.pop("background", None)
        mckpt.convert(work / "dist" / case, right, **given)
        files = sorted(path.name for path in right.iterdir())
        assert files == sorted(path.name for path in saved.iterdir())
        for file in files:
            if file != "mckpt.json":  # it describes the source
                assert (saved / file).read_bytes() == (right / file).read_bytes(), file


@pytest.mark.parametrize("case", [case for case, _ in SHARED])
def test_replicas_share_the_reading(case: str, filled: dict[str, dict[str, Any]]) -> None:
    result = filled[f"shared-{case}"]
    assert result["ok"], explain(result)
    assert result["differs"] == {"fresh": [], "0": [], "1": []}


@pytest.mark.parametrize("case", ["qwen3", "qwen3-moe", "whole"])
def test_master_copies_follow_the_parameters(case: str, filled: dict[str, dict[str, Any]]) -> None:
    result = filled[f"trains-{case}"]
    assert result["ok"], explain(result)
    assert result["masters"]
    assert not any(result["differs"].values()), result["differs"]
    assert "0 after a step" in result["differs"]
    assert all("would put the old weights back" in said for said in result["errors"]["load"])


@pytest.mark.parametrize(
    ("name", "said"),
    [
        *((f"Sync {name}", f"  - {name}: ") for name in KEYWORDS),
        ("Sync receivers", "  - the plan, which `like`, `args` and `to` decide: "),
        ("load broadcast", "  - broadcast: True on rank 0, False on rank 1, 2, 3"),
        ("load threads", "threads is -1, and must be a whole number"),
        ("load source", "  - source: "),
        ("save dst", "  - dst: "),
        ("no chunks", "model_chunks is empty; each rank gives the list of its own chunks"),
        ("a chunk", "model_chunks is a GPTModel; give the list of chunks"),
        ("functions", "  - function: 'describe' on rank 0, 'load' on rank 1, 2, 3"),
        ("dtype", "linear_qkv.weight: was bfloat16 [384, 48] when the live model was described"),
        ("shape", "and is bfloat16 [383, 48] now; make the Sync again"),
        ("module", "modules of the live model were added, removed or replaced"),
        ("aborted", "the ranks of the model lost each other"),
        ("released", "linear_qkv.weight: its elements are not in memory"),
        ("released load", "linear_qkv.weight: its elements are not in memory"),
        ("released save", "linear_qkv.weight: its elements are not in memory"),
    ],
)
def test_what_is_wrong_on_one_rank_is_an_error_on_all(
    name: str, said: str, filled: dict[str, dict[str, Any]]
) -> None:
    result = filled["hands"]
    assert result["ok"], explain(result)
    errors = result["errors"][name]
    assert said in errors[0]
    assert len(set(errors)) == 1


def test_moved_weights_snapshots_and_other_threads_give_the_right_values(
    filled: dict[str, dict[str, Any]],
) -> None:
    result = filled["hands"]
    assert result["ok"], explain(result)
    assert len(result["wrong"]) == 4
    assert not any(result["wrong"].values()), result["wrong"]


@pytest.mark.parametrize("name", UNEVEN)
def test_a_saved_model_has_the_stages_of_the_live_one(
    name: str, work: Path, filled: dict[str, dict[str, Any]]
) -> None:
    assert filled[name]["ok"], explain(filled[name])
    saved = mckpt.open(work / "saved" / name).opened.parallel()
    assert saved.split(4) == [1, 3]


@pytest.mark.parametrize("case", ["quantised", "padding"])
def test_quantised_weights_and_padding_are_filled(
    case: str, filled: dict[str, dict[str, Any]]
) -> None:
    result = filled[case]
    assert result["ok"], explain(result)
    assert result["differs"] == {"fresh": [], "0": []}


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("extra_parameter", "decoder.extra: sharded_state_dict() of the model names 0 of its 12"),
        (
            "hidden_parameter",
            "linear_proj.weight: sharded_state_dict() of the model names 0 of its",
        ),
        ("renamed_parameter", "self_attention.linear_out.weight [4, "),
        (
            "other_settings",
            "norm_eps (layernorm_epsilon, norm_epsilon): 3e-05 in the live model, 0.009 in",
        ),
        ("other_settings", "rope_theta (rotary_base): 77.0 in the live model, 80000.0 in"),
        ("failing_read", "the disk of one rank is broken\nThis is the error of rank 1."),
        ("other", "q_layernorm.weight"),
    ],
)
def test_all_ranks_raise_the_error_of_one(
    fault: str, said: str, filled: dict[str, dict[str, Any]]
) -> None:
    result = filled[fault]
    assert result["ok"], explain(result)
    assert said in result["errors"][0]
    assert len(set(result["errors"])) == 1


@pytest.mark.parametrize("fault", ["lost_rank", "lost_in_call"])
def test_ranks_that_lost_another_one_raise_an_error(
    fault: str, filled: dict[str, dict[str, Any]]
) -> None:
    result = filled[fault]
    assert result["ok"], explain(result)
    errors = result["errors"]
    assert errors.pop(1) == ""
    assert all("a rank has ended or does not answer" in error for error in errors)


# models of transformers, with latent attention, sinks and stacked experts, gated delta nets,
# Mamba-2, shared experts, shifted norms, fused projections, layers of several kinds, and an encoder
MECHANISMS = (
    "deepseek_v2",
    "gpt_oss",
    "qwen3_next",
    "nemotron_h",
    "bamba",
    "qwen2_moe",
    "gemma_silu",
    "phi3",
    "granitemoehybrid",
    "megatron_bert",
    "llama_nemotron",
)


@pytest.fixture(scope="module")
def families(work: Path) -> dict[str, dict[str, Any]]:
    """The results of every case of MECHANISMS in each dialect: "CASE-DIALECT"."""
    cases: dict[bool, list[dict[str, Any]]] = {False: [], True: []}
    made_models.make(MECHANISMS, work / "made")
    for case in MECHANISMS:
        for dialect in family_models.dialects(case):
            te, hybrid = (case, dialect) in family_models.WITH_TE, dialect == "hybrid"
            impl = "transformer_engine" if te else "local"
            size = family_models.sizes_of(case, dialect)
            options: dict[str, Any] = {} if hybrid else {"transformer_impl": impl}
            source, out = work / "made" / case, work / dialect / case
            form = "torch" if hybrid else "torch_dist"
            mckpt.convert(source, out, format=form, dialect=dialect, **size, **options)
            mckpt.convert(out, work / "exported" / dialect / case, format="hf")
            cases[te].append(
                {
                    "name": f"{case}-{dialect}",
                    "kind": "live",
                    "checkpoint": str(out),
                    "loads": [[str(source), {}]],
                    "like": str(source),
                    "exports": [[str(work / "exported" / dialect / case), {"once": True}]],
                    "args": {"dialect": dialect},
                    "impl": impl,
                    "world": WORLD,
                    **size,
                }
            )
    found = judge(cases[False], WORLD, work / "families", timeout=900)
    return found | judge(cases[True], WORLD, work / "families-te", fake_te=True, timeout=900)


@pytest.mark.parametrize("case", MECHANISMS)
def test_models_of_other_mechanisms(case: str, families: dict[str, dict[str, Any]]) -> None:
    names = family_models.dialects(case)
    if not names:
        pytest.skip(f"this megatron-core cannot compute {case}")
    for dialect in names:
        result = families[f"{case}-{dialect}"]
        assert result["ok"], explain(result)
        assert result["differs"] == {"fresh": [], "0": []}
        assert result["exported"] == {"0": []}
