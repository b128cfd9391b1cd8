"""mckpt.live with NCCL on two GPUs, compared bit for bit with the files of conversions:

    python tests/gpu/live.py WORK

It makes tiny models, converts each, and lets megatron-core load it; mckpt.live must fill the model
with the same bits, and give and save the tensors of `megatron-to-hf`. The cases are those of
tests/helpers/live_cases.py. It prints a line for each, and ends with 1 if one failed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import mckpt  # noqa: E402
from tests.helpers import tiny  # noqa: E402

WORLD = 2
PARTS = ("differs", "exported", "wrong", "after")  # of a result, with what is wrong
# with pp 2 the embedding is tied over two ranks; with tp 1 and ep 1 both ranks are replicas
CASES: tuple[tuple[str, dict[str, int]], ...] = (
    ("qwen3", {"tp": 2}),
    ("qwen3", {"tp": 1}),
    ("qwen3-tied", {"pp": 2}),
    ("llama", {"pp": 2, "vpp": 2}),
    ("qwen3-moe", {"ep": 2, "etp": 1}),
    ("mixtral", {"tp": 2}),
    ("deepseek-v3", {"ep": 2, "etp": 1}),
)
# wrapped by adapters of tests/helpers/lora_wrapper.py
WRAPPED: tuple[tuple[str, dict[str, int]], ...] = (
    ("qwen3", {"tp": 2}),
    ("llama", {"pp": 2}),
    ("qwen3-moe", {"ep": 2, "etp": 1}),
)
# what a user may do wrong, such as other keywords on one rank; and master copies
EXTRA: dict[str, dict[str, Any]] = {
    "trains": {"trains": True},
    "hands": {"hands": True},
}
# shares of the elements that change, whose deltas must make the tensors of a whole Sync
DELTAS: dict[str, dict[str, int]] = {"qwen3": {"tp": 2}, "qwen3-moe": {"ep": 2, "etp": 1}}
# updates of tests/helpers/rl_cases.py, in which a process beside the ranks opens handles of CUDA
# IPC, and by how much their tensors are multiplied
RECEIVED = {"slime": 2, "verl0": 1, "verl1": 1, "nemo_rl": 1, "skyrl": 1}


def main(work: Path) -> int:
    cases = [case_of(work, case, size) for case, size in CASES]
    for case, size in WRAPPED:
        lora = {"kind": "lora", "dim": 4, "alpha": 8}
        one = {**case_of(work, case, size), "lora": lora, "saved": str(work / "lora" / case)}
        cases.append(
            {**one, "name": f"{one['name']}-wrapped", "loads": one["loads"][:2], "saves": []}
        )
    tiny.tiny_random("qwen3", work / "other", seed=7)
    sources = [str(work / "hf" / "qwen3"), str(work / "other")]
    extra: dict[str, dict[str, Any]] = {**EXTRA, "rl": {"rl": str(work / "rl")}}
    for name, more in extra.items():
        one = {**case_of(work, "qwen3", {"tp": 2}), **more, "name": name, "saves": []}
        cases.append({**one, "loads": one["loads"][:1], "sources": sources})
    for case, size in DELTAS.items():
        one = {**case_of(work, case, size), "deltas": [0, 0.02, 0.1, 1], "times": 2, "saves": []}
        for where in ("host", "device"):
            cases.insert(0, {**one, "name": f"{case}-deltas-{where}", "where": where})
    out = work / "results"
    out.mkdir(parents=True, exist_ok=True)
    (work / "cases.json").write_text(json.dumps(cases))
    judge = str(ROOT / "tests" / "helpers" / "judge.py")
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={WORLD}", judge]
    path = f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"
    environ = {**os.environ, "PYTHONPATH": path, "JUDGE_PARENT": str(os.getpid())}
    subprocess.run([*command, str(work / "cases.json"), str(out)], env=environ, check=False)
    passed = quantised_alike() & lost(work, command, environ, cases[-2])
    for case in cases:
        path = out / f"{case['name']}.json"
        found = json.loads(path.read_text()) if path.exists() else {"ok": False, "error": "none"}
        listed = [one for part in PARTS for one in found.get(part, {}).values()]
        wrong = [text for one in listed for text in one]
        if found["ok"]:
            wrong += [text for saved in case["saves"] for text in saved_problems(case, *saved)]
            wrong += unequal(found["errors"]) if case["name"] in EXTRA else []
            wrong += received_problems(work, case["like"]) if "rl" in case else []
        passed &= found["ok"] and not wrong
        said = "; ".join(wrong[:3]) if found["ok"] else str(found["error"])
        print(case["name"], "fails: " + said if said else f"passes in {found['seconds']} s")
    return 0 if passed else 1


def quantised_alike() -> bool:
    """Quantises matrices of odd sizes by the kernel, and by torch on the CPU, to the same bits."""
    import torch

    from mckpt.formats.hf_encodings import WRITTEN
    from mckpt.live.quantising import overall_scales, quantised

    drawn, wrong = torch.Generator().manual_seed(0), []
    for kind in ("fp8", "mxfp8", "nvfp4"):
        for shape in ((1, 128, 128), (3, 130, 257), (2, 64, 96), (1, 1, 32), (2, 300, 4096)):
            values = torch.randn(shape, generator=drawn)
            values *= torch.exp(6 * torch.randn(shape, generator=drawn))  # of many sizes
            values[0, 0] = 0
            values[-1, -1, -1] = [1.0, float("nan"), float("inf")][shape[0] - 1]
            values, overall = values.bfloat16(), None
            if kind == "nvfp4":
                values = values[..., : max(shape[2] // 16, 1) * 16].contiguous()
                overall = overall_scales(values.abs().float().amax((1, 2)))[:, None]
            here = quantised(values, WRITTEN[kind], overall)
            on_device = None if overall is None else overall.cuda()
            there = [made.cpu() for made in quantised(values.cuda(), WRITTEN[kind], on_device)]
            # the codes of a matrix that is refused do not matter
            sound = here[2] == 0
            pairs = [(a[sound], b[sound]) for a, b in zip(here[:2], there[:2], strict=True)]
            pairs.append((here[2] != 0, there[2] != 0))
            if not all(a.view(torch.uint8).equal(b.view(torch.uint8)) for a, b in pairs):
                wrong.append(f"{kind} {list(shape)}")
    print("quantised", f"fails: {wrong}" if wrong else "passes")
    return not wrong


def unequal(errors: dict[str, list[str]]) -> list[str]:
    """Returns which of the errors not all ranks have."""
    return [f"{name}: {said}" for name, said in errors.items() if len(set(said)) > 1 or not said[0]]


def received_problems(work: Path, like: str) -> list[str]:
    """Returns what is wrong with the tensors that the engine beside the ranks received."""
    import torch
    from safetensors.torch import load_file

    wanted, wrong = load_file(Path(like) / "model.safetensors"), list[str]()
    for update, factor in RECEIVED.items():
        found = load_file(work / "rl" / update / "model.safetensors")
        wrong += [
            f"{update} {name}"
            for name, tensor in wanted.items()
            if name not in found or not torch.equal(found[name], tensor * factor)
        ]
        wrong += [f"{update} {name}" for name in found.keys() - wanted if "_scale" not in name]
    return wrong


def lost(work: Path, command: list[str], environ: dict[str, str], case: dict[str, Any]) -> bool:
    """Lets a rank leave while tensors are on their way. The other one must not return them, also
    where NCCL only aborts what is left of its communicator.
    """
    out = work / "lost"
    out.mkdir(parents=True, exist_ok=True)
    one = {**case, "name": "lost", "hands": False, "fault": "lost_in_call", "timeout": 20}
    one["patience"] = 140  # NCCL writes what it knows of the failure first
    (out / "cases.json").write_text(json.dumps([one]))
    environ = {**environ, "TORCH_NCCL_ASYNC_ERROR_HANDLING": "2"}
    began = time.monotonic()
    with suppress(subprocess.TimeoutExpired):
        given = [*command, str(out / "cases.json"), str(out)]
        subprocess.run(given, env=environ, check=False, timeout=150)
    path, seconds = out / "lost.json", round(time.monotonic() - began)
    found = json.loads(path.read_text()) if path.exists() else {"ok": False, "error": "none"}
    said = found["errors"][0] if found["ok"] else str(found["error"])
    passed = "the ranks of the model lost each other" in said
    print("lost", f"passes in {seconds} s" if passed else f"fails after {seconds} s: {said}")
    return passed


def case_of(work: Path, case: str, size: dict[str, int]) -> dict[str, Any]:
    """Returns a case of the judge, and converts what it needs."""
    source, converted = work / "hf" / case, work / "dist" / case
    exports = []
    if not source.exists():
        tiny.tiny_random(case, source)
        mckpt.convert(source, converted, transformer_impl="local")
    for name, made, asked in (
        ("bf16", {}, {}),
        ("bf16", {}, {"bucket_bytes": 65536, "slices": True}),
        ("bf16", {}, {"to": 1}),
        ("bf16", {}, {"to": "halves", "bucket_bytes": "1MiB"}),
        ("fp16", {"dtype": "fp16"}, {"dtype": "fp16"}),
        ("fp8", {"quantize": "fp8"}, {"quantize": "fp8"}),
        ("bf16", {}, {"flat": 512, "bucket_bytes": "1MiB"}),
        ("fp8", {"quantize": "fp8"}, {"quantize": "fp8", "flat": 256}),
        ("nvfp4", {"quantize": "nvfp4"}, {"quantize": "nvfp4", "flat": 256}),
    ):
        exported = work / name / case
        if not exported.exists():
            mckpt.convert(converted, exported, format="hf", **made)
        exports.append([str(exported), asked])
    name = f"{case}-" + "".join(f"{k}{v}" for k, v in size.items())
    saves = [
        [str(work / "saved" / f"{name}-{form}"), {"format": form, "background": True}]
        for form in ("hf", "torch_dist")
    ]
    loads = [[str(source), {}], [str(source), {"broadcast": True}], [str(converted), {}]]
    return {
        "name": name,
        "kind": "live",
        "checkpoint": str(converted),
        "like": str(source),
        "loads": loads,
        "exports": exports,
        "saves": saves,
        "world": WORLD,
        "timeout": 120,
        **size,
    }


def saved_problems(case: dict[str, Any], saved: str, options: dict[str, Any]) -> list[str]:
    if mckpt.diff(case["checkpoint"], saved):
        return [f"{saved} differs from {case['checkpoint']}"]
    return []


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
