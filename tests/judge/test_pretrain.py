"""examples/live/pretrain.py fills the model of Megatron-LM's own set-up with the bits that its own
load of a conversion gives.
"""

from __future__ import annotations

import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest

# megatron-core has Megatron-LM's trainer from 0.19 on
if not (find_spec("megatron.core") and find_spec("megatron.training")):
    pytest.skip("megatron.training is not installed", allow_module_level=True)

import mckpt
from tests.helpers.judging import launch
from tests.helpers.tiny import TinyModel

pytestmark = pytest.mark.judge

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = str(ROOT / "tests" / "helpers" / "pretrain_on_cpu.py")
# of the run; the last flag wins over those of the model's launch line
RUN = (
    "--tensor-model-parallel-size 2 --micro-batch-size 1 --global-batch-size 1 --train-iters 1"
    " --lr 1e-4 --distributed-backend gloo --mock-data --save-interval 1"
    " --tokenizer-type NullTokenizer --no-bias-swiglu-fusion --no-masked-softmax-fusion"
    " --no-load-optim --no-load-rng"
)


def run(out: Path, converted: Path, *program: str, more: tuple[str, ...] = ()) -> list[bytes]:
    """Runs a program on two ranks, and returns the bytes of what each wrote."""
    out.mkdir()
    line = f'. {converted}/megatron_args.sh; printf "%s\\n" "${{MEGATRON_ARGS[@]}}"'
    found = subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=True)
    line = [*program, *found.stdout.splitlines(), *RUN.split(), "--save", str(out), *more]
    log = launch("pretraining", [{"program": line}], 2, out, 300)
    written = [out / f"{rank}.pt" for rank in range(2)]
    assert all(path.exists() for path in written), log
    return [path.read_bytes() for path in written]


def test_a_run_begins_with_the_weights_of_the_source(work: Path, tiny_model: TinyModel) -> None:
    source, converted = tiny_model("qwen3"), work / "converted"
    mckpt.convert(source, converted, transformer_impl="local")
    release = converted / "release"
    example = str(ROOT / "examples" / "live" / "pretrain.py")
    filled = run(work / "filled", release, example, PROGRAM, str(source))
    loaded = run(work / "loaded", release, PROGRAM, more=("--load", str(converted)))
    assert filled == loaded
