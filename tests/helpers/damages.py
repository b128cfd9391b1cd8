"""The ways in which rows of tests/refusals.py damage a copy of a checkpoint, one function each."""

from __future__ import annotations

import os
import re
import shutil
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import mckpt as package
from mckpt.containers import safe_pickle
from mckpt.containers.dcp_metadata import read_metadata
from tests.helpers import lora, tiny
from tests.helpers.commands import (
    PT,
    Pt,
    edit_json,
    emit,
    good,
    hostile_pickle,
    mckpt,
    restate,
    save_hostile,
    save_pt,
    shard,
    tree,
    write_shard,
)

Damage = Callable[[Path], Any]
Tensors, Items = dict[str, Any], dict[Any, Any]
Change = Callable[[Tensors, Items], Any]

ONE, INDEX, CONFIG = "model.safetensors", "model.safetensors.index.json", "config.json"
NORM, DOWN = "model.norm.weight", "model.layers.1.mlp.down_proj.weight"
FC2 = "decoder.layers.0.mlp.linear_fc2.weight"
DIST_FC2 = "decoder.layers.mlp.linear_fc2.weight"
LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a2146\nsize 12345\n"


def copy_of(source: Path, to: Path, damage: Damage | None = None) -> Path:
    """Copies a checkpoint and damages the copy, which is returned."""
    shutil.copytree(source, to)
    if damage:
        damage(to)
    return to


# ---- files


def all_of(*damages: Damage) -> Damage:
    return lambda src: [damage(src) for damage in damages]


def holds(name: str, content: bytes | str = b"x") -> Damage:
    """Writes a file, and the directories above it."""

    def damage(src: Path) -> None:
        (src / name).parent.mkdir(parents=True, exist_ok=True)
        (src / name).write_bytes(content if isinstance(content, bytes) else content.encode())

    return damage


def raw(change: Callable[[bytes], bytes], name: str = ONE) -> Damage:
    return lambda src: (src / name).write_bytes(change((src / name).read_bytes()))


def link(name: str, to: str) -> Damage:
    return lambda src: ((src / name).unlink(missing_ok=True), (src / name).symlink_to(to))


def gone(*names: str) -> Damage:
    def damage(src: Path) -> None:
        for path in (src / name for name in names):
            shutil.rmtree(path) if path.is_dir() else path.unlink()

    return damage


def folder(name: str) -> Damage:
    """Puts a directory in the place of a file."""
    return lambda src: ((src / name).unlink(missing_ok=True), (src / name).mkdir())


def copied(old: str, new: str) -> Damage:
    return lambda src: (
        shutil.copytree(src / old, src / new)
        if (src / old).is_dir()
        else shutil.copy(src / old, src / new)
    )


Command = tuple[object, ...]
WEIGHTS: Command = ("megatron-to-hf",)
CHUNK = re.compile(r"[\d.]+")
BOTH: tuple[Command, ...] = (WEIGHTS, ("reshard", "--dtype", "bf16"))  # the optimizer too


def of_each_file(
    source: Path,
    out: Path,
    *,
    like: Path | None = None,
    commands: Sequence[Command] = (WEIGHTS,),
    checksums: bool = True,
) -> set[str]:
    """Renames, cuts and changes one file after the other. Each command must end with an error, or
    write what it writes of the whole checkpoint. If a changed byte becomes a changed value, `check`
    must name the file.

    like: the directory of --like, whose config.json is damaged too. checksums: the files with
    tensors have checksums of their data; JSON and text have none.

    Returns the paths of the files that no command needs. Of directories beside each other that have
    files of the same names, as a universal checkpoint of DeepSpeed has, the first two are damaged.
    """
    more = ("--like", like) if like else ()
    beside = [like / CONFIG] if like else []
    for number, (name, *options) in enumerate(commands):
        good(name, source, out / f"whole{number}", *more, *options)
    errors, unread = 0, set[str]()
    for path in _some([*sorted(source.rglob("*")), *beside]):
        content, effects = path.read_bytes(), 0
        cuts = [content[: len(content) // 2], content[:-1]]
        for at in (len(content) * part // 9 for part in (2, 5, 8)):
            cuts.append(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
        for kind, damaged in enumerate([None, *cuts]):
            path.unlink()
            if damaged is None:
                Path(f"{path}.old").write_bytes(content)
            else:
                path.write_bytes(damaged)
            for number, (name, *options) in enumerate(commands):
                said = mckpt(name, source, out / "made", *more, *options)
                assert "Traceback" not in said.err, said
                wrong = not said.code and _differ(out / f"whole{number}", out / "made")
                assert not wrong or kind > 2, (path, kind, name, said.err)
                if wrong and checksums and path.suffix not in (".json", ".txt"):
                    found = mckpt("check", source, *more)
                    assert found.code == 3 and path.name in found.out, (path, kind, found)
                shutil.rmtree(out / "made", ignore_errors=True)
                errors += bool(said.code)
                effects += bool(said.code) or wrong
            Path(f"{path}.old").unlink(missing_ok=True)
            path.write_bytes(content)
        if not effects:
            unread.add(os.path.relpath(path, source))
    assert errors >= 2, "no damage of the index was found"
    return unread


def _some(paths: Iterable[Path]) -> Iterator[Path]:
    """Yields the files among `paths`, of one name at most two in directories beside each other. The
    names of chunks, such as 0.3.0, differ in their numbers alone.
    """
    seen = Counter[tuple[Path, str]]()
    for path in filter(Path.is_file, paths):
        name = re.sub(r"\d+", "0", path.name) if CHUNK.fullmatch(path.name) else path.name
        seen[alike := (path.parent.parent, name)] += 1
        if seen[alike] <= 2:
            yield path


def _differ(whole: Path, made: Path) -> bool:
    """Returns whether two checkpoints of one format have other tensors or states, sizes of the
    model, settings of the optimizer, schedules or iterations.
    """
    ours, theirs = ({n: b for n, b in tree(p).items() if "mckpt" not in n} for p in (whole, made))
    if ours == theirs:
        return False
    return bool(package.diff(whole, made)) or _facts(whole) != _facts(made)


def _facts(path: Path) -> object:
    own = package.open(path)
    fields = own.files.common.fields if own.files.common else {}
    kept = [fields.get(name) for name in ("iteration", "opt_param_scheduler", "lr_scheduler")]
    return own.dims, kept, own.optimizer and own.optimizer.groups


# ---- directories of Hugging Face


def header(change: Callable[[dict[str, Any]], Any]) -> Damage:
    """Changes the header of the only .safetensors file, or replaces it."""

    def damage(src: Path) -> None:
        head, data = shard(src / ONE)
        changed = change(head)
        write_shard(src / ONE, head if changed is None else changed, data)

    return damage


def entry(**fields: Any) -> Damage:
    return header(lambda head: head[NORM].update(fields))


def moved(by: int) -> Damage:
    return header(
        lambda head: head[NORM].update(data_offsets=[n + by for n in head[NORM]["data_offsets"]])
    )


def whole(head: Any, data: bytes = b"") -> Damage:
    return lambda src: write_shard(src / ONE, head, data)


def index(change: Callable[[dict[str, Any]], Any]) -> Damage:
    return lambda src: edit_json(src / INDEX, lambda found: change(found["weight_map"]))


def shard_name(number: int) -> str:
    return f"model-{number:05d}-of-00006.safetensors"


def arrays(change: Callable[[dict[str, Any]], Any], case: str = "qwen3") -> Damage:
    """Changes the tensors of a tiny model of one file."""

    def damage(src: Path) -> None:
        found = tiny.tensors(tiny.config(case))
        change(found)
        tiny.write_weights(src, found)

    return damage


def integers(head: dict[str, Any]) -> None:
    for key in head:
        if "down_proj" in key:
            head[key]["dtype"] = "I16"


def config(*lost: str, **fields: Any) -> Damage:
    """Removes keys of config.json, and sets others."""

    def change(found: dict[str, Any]) -> None:
        for key in lost:
            del found[key]
        found |= fields

    return lambda src: edit_json(src / CONFIG, change)


def write_bin(
    directory: Path, found: dict[str, Any], view: Any = None, name: str = "pytorch_model.bin"
) -> Path:
    """Writes a .bin file and its config.json without torch; returns the directory. `view(key,
    array)` returns (elements of a storage, offset, strides), or None for a dense tensor.
    """
    directory.mkdir(exist_ok=True)
    value, data = OrderedDict(), {}
    for i, (key, array) in enumerate(found.items()):
        placed = view(key, array) if view else None
        store, offset, strides = placed or (array, 0, safe_pickle.contiguous(array.shape))
        data[str(i)] = np.ascontiguousarray(store).tobytes()
        held = safe_pickle.tensor("bfloat16", (store.size,), str(i)).args[0]
        rebuild = safe_pickle.glob("torch._utils", "_rebuild_tensor_v2")
        value[key] = rebuild(held, offset, array.shape, strides, False, OrderedDict())
    save_pt(directory / name, value, data)
    tiny.write_json(directory / CONFIG, tiny.config("qwen3"))
    return directory


# ---- checkpoints of Megatron


def ranks(change: Callable[[Pt], Any], only: str = "*") -> Damage:
    """Changes the files of the ranks of a `torch` checkpoint."""

    def damage(src: Path) -> None:
        for path in sorted((src / "release").glob(f"mp_rank_{only}/{PT}")):
            pt = Pt(path)
            change(pt)
            pt.save()

    return damage


def tensor(key: str, dtype: str, shape: tuple[int, ...], nbytes: int) -> Damage:
    """Replaces a tensor of the rank 01_000."""
    return ranks(
        lambda pt: pt.value["model"].update({key: pt.put(dtype, shape, bytes(nbytes))}), "01_000"
    )


def args_of(**fields: Any) -> Damage:
    return ranks(lambda pt: pt.value["args"].state.update(fields))


ALONE = gone("hf", "release/mckpt.json")  # the files that repeat the content of the args


def file_of(rank: str, change: Callable[[bytes], bytes]) -> Damage:
    return raw(change, f"release/mp_rank_{rank}/{PT}")


def hostile(name: str) -> Damage:
    """Writes a pickle that would make the file `mark` beside the source, if it were run."""

    def damage(src: Path) -> None:
        path, mark = src / "release" / name, src.parent / "mark"
        if name == ".metadata":
            path.write_bytes(hostile_pickle(mark))
        else:
            save_hostile(path, mark)

    return damage


def metadata(change: Change) -> Damage:
    """Changes the tensors and the items of a .metadata."""

    def damage(src: Path) -> None:
        path = next(src.rglob(".metadata"))
        found = read_metadata(path)
        tensors: Tensors = dict.fromkeys(found.objects)
        tensors |= {key: (*held[:2], [*held[2]]) for key, held in found.tensors.items()}
        items = dict(found.items)
        change(tensors, items)
        made = emit(tensors, [(k, o, *item) for (k, o), item in items.items()])
        # torch writes the length of a short key as one byte, by which mckpt knows some formats
        short = re.compile(rb"X(.)\0\0\0(?=model\.)", re.DOTALL)
        path.write_bytes(short.sub(lambda found: b"\x8c" + found[1], made))
        restate(path)

    return damage


def hole(tensors: Tensors, items: Items) -> None:
    offsets, _ = tensors[DIST_FC2][2].pop()
    items.pop((DIST_FC2, offsets))


def key_extra(tensors: Tensors, items: Items, old: str = DIST_FC2, new: str = "foo.weight") -> None:
    tensors[new] = tensors[old]
    items |= {(new, at): place for (key, at), place in items.items() if key == old}


def without(*lost: str) -> Change:
    """Returns a change that takes tensors and objects away."""

    def change(tensors: Tensors, items: Items) -> None:
        for held, keys in ((tensors, lost), (items, [at for at in items if at[0] in lost])):
            for key in keys:
                held.pop(key, None)

    return change


def exchanged(*names: str) -> Change:
    """Returns a change that exchanges the names of two tensors."""
    other = dict(zip(names, reversed(names), strict=True))

    def change(tensors: Tensors, items: Items) -> None:
        tensors |= {other[key]: tensors[key] for key in names}
        moved = {at: items.pop(at) for at in [*items] if at[0] in other}
        items |= {(other[key], at): place for (key, at), place in moved.items()}

    return change


def elsewhere(name: str) -> Damage:
    return metadata(lambda _, items: items.update({k: (name, *i[1:]) for k, i in items.items()}))


def item(change: Callable[[Items], Any]) -> Damage:
    return metadata(lambda _, items: items.update({(DIST_FC2, (0, 0, 0)): change(items)}))


# ---- adapters


def adapter(
    *modules: str, change: Any = None, dora: bool = False, base: str = "tiny-qwen3", **config: Any
) -> Damage:
    """Writes an adapter with random factors for the modules whose names end with these words, or
    for 7 of all. `change` gets the factors and the weights of the base, and edits the factors.
    """

    def damage(src: Path) -> None:
        weights = lora.tensors(tiny.FIXTURES / base)
        all_modules = lora.matrices(weights, () if modules else ("norm", "embed", "lm_head"))
        names = [m for m in all_modules if m.endswith(modules)] if modules else all_modules[:7]
        stored = lora.factors(weights, names)
        if dora:
            lora.with_magnitudes(stored, names)
        if change is not None:
            stored = change(stored, weights) or stored
        lora.save(src, stored, **({"use_dora": True} if dora else {}) | config)

    return damage
