"""A user's program: it uses the whole Python API, and `mypy --strict` must accept it."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping

import numpy as np
from typing_extensions import assert_type

import mckpt


def show(now: mckpt.Progress) -> None:
    print(now.nbytes, now.total_bytes, now.files, now.total_files, now.complete)


def plans(src: str, dst: str) -> int:
    plan = mckpt.plan(src, dst, format="torch", tp=2, pp=2, dtype="bf16", overwrite=True)
    assert_type(plan, mckpt.Plan)
    print(plan.summary(), plan.json()["copies"], plan.digest, plan.nbytes)
    for copy in plan.copies():
        assert_type(copy.shape, tuple[int, int])
        print(copy.tensor, copy.source, copy.source_offset, copy.target_strides)
    return len(plan.run(max_memory="64MiB", threads=2, progress=show))


def moves(src: str, dst: str) -> None:
    cancel = threading.Event()
    mckpt.convert(src, dst, format="hf", max_shard_size="2GB", progress=show, cancel=cancel)
    mckpt.reshard(src, dst, parallel=mckpt.Parallel(tp=2), engine="local")
    if mckpt.repair(src, dst) is None:
        print("nothing to repair")
    if mckpt.diff(src, dst, atol=1e-3) or mckpt.check(src).damaged:
        raise SystemExit(1)
    verdict = mckpt.verify(src, dst)
    assert_type(verdict, mckpt.Verdict)
    print(mckpt.push(dst, "org/name", dry_run=True))


def reads(path: str) -> np.ndarray:
    ckpt = mckpt.open(path, family="qwen3", settings={"mtp_layers": 0})
    assert_type(ckpt, mckpt.Checkpoint)
    names: Mapping[str, object] = ckpt.tensors()
    for name, tensor in ckpt.items():
        assert_type(tensor.shape, tuple[int, ...])
        print(name, tensor.dtype, tensor.nbytes, len(tensor), tensor[:2].numpy(), tensor.torch())
    print(len(names), ckpt.hf_config()["architectures"], ckpt.format, ckpt.dims["num_layers"])
    return np.asarray(ckpt.hf_tensors()["model.norm.weight"][1:3])


def streams(src: str, dst: str) -> None:
    ckpt = mckpt.open(src)

    def tensors() -> Iterator[tuple[str, np.ndarray]]:
        for name, tensor in ckpt.hf_tensors().items():
            yield name, tensor.numpy()

    mckpt.write(dst, ckpt.hf_config(), tensors(), format="torch_dist", tp=2, threads=1)
    mckpt.write(dst, "config", ckpt.hf_tensors().items(), dtypes={"*.bias": "float32"})


def fails(path: str) -> str | None:
    try:
        mckpt.open(path)
    except mckpt.errors.MckptError as error:
        print(error.exit_code, error.where, error.problems)
        return error.cure
    return None


def wrong(src: str, dst: str) -> None:
    mckpt.plan(src, dst, nonsense=1)  # type: ignore[call-arg]
    mckpt.plan(src, dst, format="gguf")  # type: ignore[arg-type]
    mckpt.convert(src, dst, tp="2")  # type: ignore[arg-type]
    mckpt.write(dst, {}, [], resume=True)  # type: ignore[call-arg]
