"""A live model is filled with the bits that a conversion and megatron-core's own load give it."""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mckpt
from mckpt import launching
from tests.helpers import tiny
from tests.helpers.judging import ask
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
    "delta",
    "vocab_size",
)
# args of pipelines whose stages do not have the same number of layers
UNEVEN: dict[str, dict[str, Any]] = {
    "uneven": {"decoder_first_pipeline_num_layers": 1},
    "uneven-layout": {"pipeline_model_parallel_layout": "Et|tttL"},
}


def sizes_of(case: str) -> list[dict[str, Any]]:
    if case in EXPERTS:
        return MOE[: 2 if case in ("qwen3-moe", "deepseek-v3") else 1]
    return DENSE if tiny.config(case)["num_hidden_layers"] % 4 == 0 else [{"tp": 2, "pp": 2}]


SLOW = [pytest.mark.slow]
OPTIONS: dict[str, Any] = {"transformer_impl": "local", "allow_inexact": ["rope_factor"]}


def live(
    source: Path, work: Path, size: dict[str, Any], *loads: tuple[Path, dict[str, Any]], **more: Any
) -> dict[str, Any]:
    """Returns the result of a live model of `source` that makes these loads."""
    given = {"checkpoint": dist(source, work), "loads": loads, "world": WORLD}
    return ask("live", **given | size | more)


def dist(source: Path, work: Path) -> Path:
    out = work / "dist" / source.name
    if not out.exists():
        mckpt.convert(source, out, **OPTIONS)
    return out


def exported(source: Path, work: Path, name: str, **keywords: Any) -> Path:
    out = work / name / source.name
    if not out.exists():
        mckpt.convert(dist(source, work), out, format="hf", **keywords)
    return out


@pytest.mark.parametrize("engine", ENGINES)
def test_an_engine_receives_the_weights_of_each_step(
    engine: str, work: Path, tiny_model: TinyModel, engines: Path
) -> None:
    wanted = mckpt.open(dist(tiny_model("qwen3-moe"), work)).hf_tensors()
    for step, factor in enumerate((1, 2)):
        folder = engines / engine / str(step)
        shutil.copy(tiny_model("qwen3-moe") / "config.json", folder)
        received = mckpt.open(folder).hf_tensors()
        assert received.keys() == wanted.keys()
        for name, tensor in wanted.items():
            assert np.array_equal(received[name].numpy(), tensor.numpy() * factor), name


def wait_for(port: int) -> None:
    """Waits until a server listens, which imports torch first."""
    for _ in range(600):
        with suppress(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port)).close()
            return
        time.sleep(0.1)
    raise TimeoutError(f"no server listens on port {port}")


@pytest.fixture(scope="module")
def engines(work: Path, tiny_model: TinyModel) -> Iterator[Path]:
    """The directory of what the servers received."""
    ports = {name: [launching.free_port(), launching.free_port()] for name in ENGINES}
    servers = []
    for name, (port, _) in ports.items():
        server, place = ROOT / "tests" / "helpers" / f"{name}_server.py", work / "received" / name
        place.mkdir(parents=True)
        servers.append(subprocess.Popen([sys.executable, str(server), str(port), str(place)]))
    source = tiny_model("qwen3-moe")
    try:
        for port, _ in ports.values():
            wait_for(port)
        live(source, work, {"tp": 2, "pp": 2}, engines=ports, like=source)
        yield work / "received"
    finally:
        for process in servers:
            process.kill()
            process.wait()


# their tensors are of the kinds that the others have
ALIKE = ("mistral", "qwen2-tied", "qwen3-moe-raw", "deepseek-v3-plain")


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=SLOW * (case in ALIKE)) for case in tiny.CASES]
)
def test_a_live_model_gets_and_gives_the_bits_of_the_file_route(
    case: str, work: Path, tiny_model: TinyModel
) -> None:
    source, other = tiny_model(case), work / "other" / case
    mckpt.convert(source, other, format="torch", **OPTIONS, **OTHER)
    exports = [[exported(source, work, "hf"), {}]]
    for size in sizes_of(case):
        loads = (source, {}), (other, {"threads": 2})
        result = live(source, work, size, *loads, exports=exports, like=source)
        assert result["differs"] == {"fresh": [], "0": [], "1": []}
        assert result["exported"] == {"0": []}


@pytest.mark.parametrize("size", [{"tp": 2, "pp": 2}, {"pp": 2, "vpp": 2}])
def test_a_whole_model_gets_and_gives_its_towers(
    size: dict[str, Any], work: Path, tiny_model: TinyModel
) -> None:
    """The tower is a module of torch under `visual`, as in the models of Megatron-Bridge and
    ms-swift; tests/judge/test_bridge_adapters.py has those of Megatron-Bridge.
    """
    source, name = tiny_model("qwen2_5_vl"), "-".join(f"{k}{v}" for k, v in size.items())
    beside, whole = work / f"beside-{name}", work / f"whole-{name}"
    mckpt.convert(source, beside, format="torch")
    mckpt.convert(source, whole, towers="bridge", tp=2)
    loads = (source, {}), (beside, {"broadcast": True}), (whole, {})
    result = live(source, work, size, *loads, like=source, whole=work / f"saved-{name}")
    assert not any(result["wrong"].values()), result["wrong"]
    assert len(result["wrong"]) == 8
    assert "norm_eps (layernorm_epsilon, norm_epsilon)" in result["refused"]


@pytest.mark.parametrize(("case", "size"), SHARED)
def test_replicas_share_the_reading_and_no_option_changes_a_value(
    case: str, size: dict[str, Any], work: Path, tiny_model: TinyModel
) -> None:
    source, small = tiny_model(case), {"broadcast": True, "max_memory": "17MiB"}
    written, hf = dist(source, work), exported(source, work, "hf")
    exports: list[list[Any]] = [
        [hf, {"bucket_bytes": 65536, "slices": True}],
        [hf, {"bucket_bytes": "1MiB", "to": 2}],
        [hf, {"bucket_bytes": "1MiB", "to": "halves"}],
        [hf, {"bucket_bytes": "2MiB", "to": "last", "slices": True}],
        [exported(source, work, "fp32", dtype="fp32"), {"dtype": "fp32"}],
        [exported(source, work, "fp16", dtype="fp16"), {"dtype": "fp16"}],
        [exported(source, work, "fp8", quantize="fp8"), {"quantize": "fp8"}],
        [exported(source, work, "fp8", quantize="fp8"), {"quantize": "fp8", "flat": 16}],
        [hf, {"bucket_bytes": "1MiB", "flat": 512}],
        [hf, {"bucket_bytes": "1MiB", "to": "halves", "flat": 1}],
    ]
    saves = [[work / "saved" / f"{case}-{name}", options] for name, options in SAVES.items()]
    loads = (source, small), (written, {"broadcast": True})
    result = live(source, work, size, *loads, exports=exports, saves=saves, like=source)
    assert result["differs"] == {"fresh": [], "0": [], "1": []}
    assert len(result["exported"]) == 10
    assert not any(result["exported"].values()), result["exported"]
    for saved, options in saves:
        assert mckpt.check(saved).exit_code == 0
        if options.get("format") != "hf":
            assert not mckpt.diff(written, saved)
            assert sorted((saved / "hf").iterdir())
            continue
        right, given = work / "right" / saved.name, {**options}
        given.pop("background", None)
        mckpt.convert(written, right, **given)
        expect_files(saved, right)


# of a model whose ranks hold whole blocks of most matrices
WIDE = {
    **{"hidden_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 64},
    **{"num_key_value_heads": 2, "intermediate_size": 512},
}


@pytest.mark.parametrize(
    ("case", "size"), [("qwen3", {"tp": 2}), ("qwen3-moe", {"tp": 2, "ep": 2, "etp": 1})]
)
def test_ranks_quantise_the_blocks_that_they_hold(
    case: str, size: dict[str, Any], work: Path
) -> None:
    """The file route quantises whole matrices. A rank sends codes of its part of each, but for k
    and v, whose blocks lie on two ranks.
    """
    experts = {"moe_intermediate_size": 128} if case in EXPERTS else {}
    source = tiny.tiny_random(case, work / f"wide-{case}", **WIDE, **experts)
    exports: list[list[Any]] = []
    for form in ("fp8", "mxfp8", "nvfp4"):
        right = exported(source, work, form, quantize=form)
        for how in ({}, {"flat": 16}, {"to": 2, "slices": True}, {"bucket_bytes": "1MiB"}):
            exports.append([right, {"quantize": form, **how}])
    result = live(source, work, size, (source, {}), exports=exports, like=source)
    assert len(result["exported"]) == 12
    assert not any(result["exported"].values()), result["exported"]


def expect_files(saved: Path, right: Path) -> None:
    """Fails unless two directories have the same files."""
    files = sorted(path.name for path in right.iterdir())
    assert files == sorted(path.name for path in saved.iterdir())
    for file in files:
        if file != "mckpt.json":  # it describes the source
            assert (saved / file).read_bytes() == (right / file).read_bytes(), file


@pytest.mark.parametrize(
    ("case", "size", "options"),
    [
        ("qwen3", {"tp": 2}, {}),
        ("qwen3-moe", {"ep": 2, "etp": 1}, {}),
        ("qwen3", {"tp": 2}, {"distributed_optimizer": False}),
    ],
)
def test_master_copies_follow_the_parameters(
    case: str, size: dict[str, Any], options: dict[str, Any], work: Path, tiny_model: TinyModel
) -> None:
    source = tiny_model(case)
    loads = [(source, {}), (source, {"broadcast": True})][: 1 if options else 2]
    more = {"options": options} if options else {}
    result = live(source, work, size, *loads, trains=True, **more)
    assert result["masters"]
    assert not any(result["differs"].values()), result["differs"]
    assert "0 after a step" in result["differs"]
    assert all("would put the old weights back" in said for said in result["errors"]["load"])


@pytest.fixture(scope="module")
def hands(work: Path, tiny_model: TinyModel) -> dict[str, Any]:
    source = tiny_model("qwen3")
    other = tiny.tiny_random("qwen3", work / "same-shapes", seed=7)
    given = {"like": source, "sources": [source, other], "timeout": 20}
    return live(source, work, {"tp": 2}, (source, {}), hands=True, **given)


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
        ("call goes on", "another call of this Sync has begun before this one has come to its end"),
        *[(f"full {i}", "no space left\nThis is the error of rank 1.") for i in (0, 1)],
    ],
)
def test_what_is_wrong_on_one_rank_is_an_error_on_all(
    name: str, said: str, hands: dict[str, Any]
) -> None:
    errors = hands["errors"][name]
    assert said in errors[0]
    assert len(set(errors)) == 1


def test_moved_weights_snapshots_and_other_threads_give_the_right_values(
    hands: dict[str, Any],
) -> None:
    assert len(hands["wrong"]) == 9
    assert not any(hands["wrong"].values()), hands["wrong"]


@pytest.mark.parametrize("name", UNEVEN)
def test_a_saved_model_has_the_stages_of_the_live_one(
    name: str, work: Path, tiny_model: TinyModel
) -> None:
    source, saved = tiny_model("qwen3"), work / "saved" / name
    live(source, work, {"pp": 2}, args=UNEVEN[name], like=source, saves=[[saved, {}]])
    assert mckpt.open(saved).opened.parallel().split(4) == [1, 3]


def test_quantised_weights_and_padding_are_filled(work: Path, tiny_model: TinyModel) -> None:
    """The last rank's rows of the vocabulary are padding: 131 tokens have 256 rows."""
    quantised, padded = work / "quantised", tiny_model("llama")
    mckpt.convert(tiny_model("qwen3"), quantised, format="hf", quantize="fp8")
    for source, size in ((quantised, {"tp": 2, "pp": 2}), (padded, {"tp": 4})):
        result = live(source, work, size, (source, {}))
        assert result["differs"] == {"fresh": [], "0": []}


@pytest.mark.parametrize(
    ("fault", "texts"),
    [
        ("extra_parameter", ["decoder.extra: sharded_state_dict() of the model names 0 of its 12"]),
        (
            "hidden_parameter",
            ["linear_proj.weight: sharded_state_dict() of the model names 0 of its"],
        ),
        ("renamed_parameter", ["self_attention.linear_out.weight [4, "]),
        (
            "other_settings",
            [
                "norm_eps (layernorm_epsilon, norm_epsilon): 3e-05 in the live model, 0.009 in",
                "rope_theta (rotary_base): 77.0 in the live model, 80000.0 in",
            ],
        ),
        ("failing_read", ["the disk of one rank is broken\nThis is the error of rank 1."]),
    ],
)
def test_all_ranks_raise_the_error_of_one(
    fault: str, texts: list[str], work: Path, tiny_model: TinyModel
) -> None:
    source = tiny_model("qwen3")
    expect_error(
        live(source, work, {"tp": 2, "pp": 2}, (source, {}), fault=fault, timeout=20), texts
    )


def test_all_ranks_refuse_another_model(work: Path, tiny_model: TinyModel) -> None:
    loads = (tiny_model("qwen2"), {})
    result = live(tiny_model("qwen3"), work, {"tp": 2}, loads, fault="failing_read")
    expect_error(result, ["q_layernorm.weight"])


def expect_error(result: dict[str, Any], texts: list[str]) -> None:
    assert all(said in result["errors"][0] for said in texts)
    assert len(set(result["errors"])) == 1


@pytest.mark.parametrize(
    ("case", "size", "options"),
    [("qwen3", {"tp": 2, "pp": 2, "vpp": 2}, {}), ("llama", {"tp": 4}, {"to": 0})],
)
def test_a_rank_without_memory_is_one_error_on_all(
    case: str, size: dict[str, Any], options: dict[str, Any], work: Path, tiny_model: TinyModel
) -> None:
    source, more = tiny_model(case), {"memory": True, "options": options, "patience": 300}
    more |= {} if options else {"saved": work / "saved-without-memory"}
    found = live(source, work, size, like=source, **more)["memory"]
    alone = []
    for name, (errors, seconds, held, wrong, then) in found.items():
        assert "MemoryError: no memory is left" in errors[1], (name, errors)
        assert len({*errors} - {""}) == 1 and len({*errors[::2], errors[3]}) == 1, (name, errors)
        alone += [name] * (errors[0] == "")
        assert seconds < 10, (name, seconds)
        assert held <= 0, f"{name}: a rank holds {held:,} bytes"
        assert not wrong, (name, wrong)
        if name.startswith("device: empty"):  # memory is free where a rank asks again
            assert all(held < 0 for held in then), (name, then)
    # no rank waits for another one behind the last bucket of a call that does not look at values
    assert len(alone) <= 2 and all(name.startswith(("whole", "snapshot")) for name in alone), alone
    assert len(found) > 50


@pytest.mark.parametrize("fault", ["lost_rank", "lost_in_call"])
def test_ranks_that_lost_another_one_raise_an_error(
    fault: str, work: Path, tiny_model: TinyModel
) -> None:
    source = tiny_model("qwen3")
    result = live(source, work, {"tp": 2, "pp": 2}, (source, {}), fault=fault, timeout=10)
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


@pytest.mark.parametrize("case", MECHANISMS)
def test_models_of_other_mechanisms(case: str, work: Path, tiny_model: TinyModel) -> None:
    names, source = family_models.dialects(case), tiny_model(case, "float32")
    if not names:
        pytest.skip(f"this megatron-core cannot compute {case}")
    for dialect in names if case in ("deepseek_v2", "gpt_oss", "phi3") else names[:1]:
        te, hybrid = (case, dialect) in family_models.WITH_TE, dialect == "hybrid"
        impl = "transformer_engine" if te else "local"
        size = family_models.sizes_of(case, dialect)
        options: dict[str, Any] = {} if hybrid else {"transformer_impl": impl}
        out, back = work / dialect / case, work / "exported" / dialect / case
        form = "torch" if hybrid else "torch_dist"
        mckpt.convert(source, out, format=form, dialect=dialect, **size, **options)
        mckpt.convert(out, back, format="hf")
        given = {"checkpoint": out, "loads": [[source, {}]], "like": source, "impl": impl}
        given |= {"exports": [[back, {"once": True}]], "args": {"dialect": dialect}}
        result = ask("live", te=te, **{"world": WORLD, **given, **size})
        assert result["differs"] == {"fresh": [], "0": []}
        assert result["exported"] == {"0": []}
