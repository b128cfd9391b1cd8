"""Damages values, structures and bytes; each result follows from the random generator alone."""

from __future__ import annotations

import gzip
import io
import json
import os
import pickletools
import struct
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import yaml

from mckpt.containers import safe_pickle, torch_file
from mckpt.containers.safe_pickle import Record

MOST_NODES = 4000  # of a value, among which one is chosen to be changed
# values at which parsers have failed: limits of integers, text that means something elsewhere,
# other types, and marks that `spelled` replaces by text which no value has
NUMBERS = (
    *(0, 1, -1, 2, 3, 7, 16, 64, 127, 128, 255, 256, 4096, 65536, 1000003, 10**26, -(10**26)),
    *(2**15, 2**31 - 1, 2**31, 2**32, 2**53, 2**62, 2**63 - 1, 2**63, 2**64, -(2**63)),
    *(0.0, -0.0, 0.5, 1e-5, 1.5, 1e30, 1e308, float("inf"), float("-inf"), float("nan")),
)
TEXTS = (
    *("", "0", "1", " ", ".", "..", "../x", "/", "/dev/null", "a\0b", "\n", "\x1b[31m", "\u202e"),
    *("\ud800", "\U0001f600", "x" * 300, "x" * 5000, "{", "}", "{layer}", "{0}", "%s", "%n", "*"),
    *("re:(", "re:(a+)+$", "nan", "null", "true", "float32", "torch.bfloat16", "none", "1e400"),
    *("2**63", "[x for x in y]", "1/0", "layer", "--overwrite", "-", "${HOME}", "$x", "=", "a=b"),
)
MARKS = {
    "@deep-list": "[" * 3000 + "]" * 3000,
    "@deep-map": '{"a":' * 3000 + "1" + "}" * 3000,
    "@digits": "9" * 6000,
    "@float": "1e999",
    "@nan": "NaN",
}
YAML_MARKS = {
    "@deep-list": "[" * 400 + "]" * 400,
    "@deep-map": "{a: " * 400 + "1" + "}" * 400,
    "@digits": "9" * 6000,
    "@float": "!!float abc",
    "@nan": ".nan",
    "@date": "2001-99-99",
    "@time": "2001-02-03T04:05:06Z",
    "@tag": "!!python/object/apply:os.getcwd []",
    "@cycle": "&a [*a]",
    "@binary": "!!binary x",
    "@set": "!!set {a, b}",
    "@int": "!!int 0x_",
}
OTHERS = (None, True, False, [], {}, [0], [[]], {"a": 1}, {"": None}, [1, "a", None], *MARKS)


def strange(random: Random) -> Any:
    """Returns a value that does not belong where it is put."""
    return random.choice(random.choice((NUMBERS, TEXTS, OTHERS)))


# --------------------------------------------------------------------------- values and structures


def _children(value: Any) -> list[tuple[Any, Any]]:
    """Returns the parts of a dict, list, tuple or record of a pickle, with their places."""
    if isinstance(value, dict):
        return list(value.items())
    if type(value) in (list, tuple):
        return list(enumerate(value))
    if isinstance(value, Record):
        return [
            (name, getattr(value, name))
            for name in ("args", "state", "items", "entries")
            if getattr(value, name) is not None
        ]
    return []


def _put(value: Any, place: Any, new: Any) -> Any:
    """Returns a copy of a value with another part at a place."""
    if isinstance(value, Record):
        out = object.__new__(type(value))
        for name in Record.__slots__:
            setattr(out, name, getattr(value, name))
        setattr(out, place, new)
        return out
    if type(value) is tuple:
        return (*value[:place], new, *value[place + 1 :])
    out = value.copy()
    out[place] = new
    return out


def _nodes(value: Any) -> list[tuple[Any, ...]]:
    """Returns the ways to parts of a value, at most MOST_NODES."""
    out: list[tuple[Any, ...]] = [()]
    parts = [((), value)]
    for way, part in parts:
        for place, inner in _children(part):
            out.append((*way, place))
            parts.append(((*way, place), inner))
        if len(out) > MOST_NODES:
            break
    return out


def _at(value: Any, way: tuple[Any, ...]) -> Any:
    for place in way:
        value = getattr(value, place) if isinstance(value, Record) else value[place]
    return value


def _changed(value: Any, way: tuple[Any, ...], change: Callable[[Any], Any]) -> Any:
    """Returns a value whose part at the end of a way is changed."""
    if not way:
        return change(value)
    place, *rest = way
    inner = getattr(value, place) if isinstance(value, Record) else value[place]
    return _put(value, place, _changed(inner, tuple(rest), change))


def _change(random: Random, whole: Any, nodes: list[tuple[Any, ...]]) -> Callable[[Any], Any]:
    """Returns one way to damage a part."""

    def number(value: Any) -> Any:
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            return strange(random)
        return random.choice((value + 1, value - 1, -value, value * 2, 0, random.choice(NUMBERS)))

    def text(value: Any) -> Any:
        if not isinstance(value, str) or not value:
            return strange(random)
        at = random.randrange(len(value))
        extra = random.choice(TEXTS)
        return random.choice(
            (value[:at] + extra + value[at:], value[:at], extra + value, value * 2)
        )

    def fewer(value: Any) -> Any:
        if isinstance(value, dict) and value:
            gone = random.choice(list(value))
            return {k: v for k, v in value.items() if k != gone}
        if type(value) in (list, tuple) and value:
            at = random.randrange(len(value))
            return value[:at] + value[at + 1 :]
        return strange(random)

    def more(value: Any) -> Any:
        other = random.choice((strange(random), _at(whole, random.choice(nodes))))
        if isinstance(value, dict):
            key = random.choice((*TEXTS[:20], *map(str, list(value)[:20])))
            return {**value, key: other}
        if type(value) in (list, tuple):
            at = random.randrange(len(value) + 1)
            return value[:at] + type(value)([other]) + value[at:]
        return [value]

    def renamed(value: Any) -> Any:
        if not isinstance(value, dict) or not value:
            return strange(random)
        old, new = random.choice(list(value)), strange(random)
        if not isinstance(new, (str, int)):
            new = str(new)
        new = text(old) if isinstance(old, str) and random.random() < 0.6 else new
        return {new if k == old and new.__hash__ else k: v for k, v in value.items()}

    def other(value: Any) -> Any:
        return _at(whole, random.choice(nodes))

    def retyped(value: Any) -> Any:
        return random.choice(([value], {"a": value}, str(value), None, [value] * 3, (value,)))

    return random.choice(
        (lambda value: strange(random), number, number, text, fewer, more, renamed, other, retyped)
    )


def value(random: Random, whole: Any) -> Any:
    """Returns a copy of a value of which one to three parts are changed."""
    for _ in range(random.choice((1, 1, 1, 2, 3))):
        nodes = _nodes(whole)
        whole = _changed(whole, random.choice(nodes), _change(random, whole, nodes))
    return whole


def spelled(text: str, marks: dict[str, str], quote: str) -> str:
    """Replaces each mark, with the quotes around it, by the text for which it stands."""
    for mark, meant in marks.items():
        text = text.replace(f"{quote}{mark}{quote}", meant)
    return text


# ------------------------------------------------------------------------------------------- bytes


def raw(random: Random, data: bytes) -> bytes:
    """Returns bytes that are flipped, cut, lengthened, moved or replaced."""
    out = bytearray(data)
    for _ in range(random.choice((1, 1, 2, 4, 16))):
        at = random.randrange(len(out) + 1)
        length = min(random.choice((1, 1, 2, 4, 8, 30, 300)), len(out) - at)
        match random.randrange(7):
            case 0 if at < len(out):
                out[at] ^= 1 << random.randrange(8)
            case 1:
                out[at : at + length] = random.randbytes(length)
            case 2:
                del out[at : at + length]
            case 3:
                to = random.randrange(len(out) + 1)
                out[to:to] = out[at : at + length]
            case 4:
                number = random.choice([n for n in NUMBERS if isinstance(n, int)])
                code = random.choice(("<I", "<Q", ">I", "<H"))
                width = struct.calcsize(code)
                out[at : at + width] = struct.pack(code, number % (1 << 8 * width))
            case 5 if random.random() < 0.3:
                del out[at:]
            case 6:
                out[at:at] = random.choice(TEXTS).encode("utf-8", "surrogatepass")
    return bytes(out)


def as_json(random: Random, data: bytes) -> bytes:
    """Returns JSON of which values are changed."""
    return spelled(json.dumps(value(random, json.loads(data))), MARKS, '"').encode()


def as_yaml(random: Random, data: bytes) -> bytes:
    """Returns YAML of which values or lines are changed."""
    if random.random() < 0.6:  # which is much faster than parsing it
        lines = data.decode().split("\n")
        for _ in range(random.choice((1, 1, 2, 3))):
            at = random.randrange(len(lines))
            line = lines[at]
            match random.randrange(6):
                case 0:
                    del lines[at : at + random.choice((1, 1, 3))]
                case 1:
                    lines.insert(random.randrange(len(lines) + 1), line)
                case 2:
                    other = random.choice((strange(random), *YAML_MARKS.values()))
                    lines[at] = f"{line.partition(':')[0]}: {other}"
                case 3:
                    lines[at] = " " * random.randrange(8) + line.lstrip()
                case 4:
                    lines[at] = str(_change(random, line, [()])(line))
                case 5:
                    lines[at] = line.replace(":", ": " + random.choice((*YAML_MARKS.values(), "x")))
            lines = lines or [""]
        return "\n".join(lines).encode("utf-8", "surrogatepass")
    changed = value(random, yaml.load(data, _Tags))
    if random.random() < 0.3:
        nodes = _nodes(changed)
        mark = random.choice(tuple(YAML_MARKS))
        changed = _changed(changed, random.choice(nodes), lambda value: mark)
    return spelled(yaml.dump(changed, width=1000), YAML_MARKS, "'").encode("utf-8", "surrogatepass")


class _Tags(yaml.SafeLoader):
    """Reads tags of Python objects as plain values, as they are written by Megatron-Bridge."""


_Tags.add_multi_constructor(
    "",
    lambda loader, suffix, node: (
        loader.construct_mapping(node, deep=True)
        if isinstance(node, yaml.MappingNode)
        else loader.construct_sequence(node, deep=True)
        if isinstance(node, yaml.SequenceNode)
        else node.value
    ),
)


def opcodes(random: Random, data: bytes) -> bytes:
    """Returns a pickle of which whole opcodes are removed, repeated, moved or given other
    arguments.
    """
    starts = [at for _, _, at in pickletools.genops(io.BytesIO(data)) if at is not None]
    pieces = [data[a:b] for a, b in zip(starts, [*starts[1:], len(data)], strict=True)]
    numbers = [n for n in NUMBERS if isinstance(n, int)]
    for _ in range(random.choice((1, 1, 2, 4))):
        at = random.randrange(len(pieces))
        length = random.choice((1, 1, 1, 2, 5, 20))
        match random.randrange(6):
            case 0 if len(pieces) > length:
                del pieces[at : at + length]
            case 1:
                to = random.randrange(len(pieces) + 1)
                pieces[to:to] = pieces[at : at + length]
            case 2:
                pieces[at] = random.choice(pieces)
            case 3:
                pieces[at] = safe_pickle.dumps(random.choice(numbers))[2:-1]
            case 4:
                text = random.choice(TEXTS).encode("utf-8", "surrogatepass")
                pieces[at] = b"X" + struct.pack("<I", len(text)) + text
            case 5:
                pieces[at] = random.choice(
                    (b"N", b"\x88", b")", b"]", b"}", b"(", b"t", b"0", b"2", b"R", b"b", b"s")
                )
    return b"".join(pieces)


def as_torch(random: Random, data: bytes) -> bytes:
    """Returns a file of torch.save with another value or another pickle, around which the container
    is right.
    """
    fd = os.memfd_create("fuzz")
    try:
        os.write(fd, data)
        held, ranges = torch_file.read(fd, "fuzz")
        storages = {key: os.pread(fd, n, at) for key, (at, n) in ranges.items()}
        records = torch_file.records(fd, "fuzz")
        at, n, _ = records["data.pkl"]
        pickled = os.pread(fd, n, at)
    finally:
        os.close(fd)
    if random.random() < 0.6:
        pickled = safe_pickle.emitted(value(random, held)).done()
    else:
        pickled = random.choice((opcodes, raw))(random, pickled)
    sizes = {key: len(one) for key, one in storages.items()}
    return whole(torch_file.TorchFile("archive", pickled, sizes, storages))


def whole(made: torch_file.TorchFile) -> bytes:
    """Returns the bytes of a file of torch.save whose storages are all known."""
    out = bytearray(made.size)
    for at, piece in made.fixed():
        out[at : at + len(piece)] = piece
    return bytes(out)


def as_safetensors(random: Random, data: bytes) -> bytes:
    """Returns a safetensors file with another header, of which the length is right."""
    length = int.from_bytes(data[:8], "little")
    text = as_json(random, data[8 : 8 + length])
    return len(text).to_bytes(8, "little") + text + data[8 + length :]


def as_tar(random: Random, data: bytes) -> bytes:
    """Returns an archive with other members, or one whose members have other names, kinds, sizes or
    contents. The checksums of their headers are right.
    """
    packed = data[:2] == b"\x1f\x8b"
    with tarfile.open(fileobj=io.BytesIO(gzip.decompress(data) if packed else data)) as tar:
        members = [(one, tar.extractfile(one).read() if one.isreg() else b"") for one in tar]
    kinds = (tarfile.REGTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.DIRTYPE, tarfile.CHRTYPE)
    kinds += (tarfile.FIFOTYPE, tarfile.GNUTYPE_SPARSE, tarfile.CONTTYPE, b"x", b"g", b"L", b"?")
    for _ in range(random.choice((1, 1, 2, 4))):
        # the members at the top are few
        few = [i for i, (one, _) in enumerate(members) if one.name.count("/") < 2]
        at = random.choice(few or range(len(members))) if random.random() < 0.5 else 0
        at = at or random.randrange(len(members))
        one, content = members[at]
        match random.randrange(7):
            case 0 if len(members) > 1:
                del members[at]
            case 1:
                members.insert(random.randrange(len(members) + 1), members[at])
            case 2:
                name = random.choice([text for text in TEXTS if "\ud800" not in text])
                name = random.choice((name, one.name + name, f"./{name}", f"{one.name}/{name}"))
                members[at] = one.replace(name=name), content
            case 3:
                changed = one.replace()
                changed.type, changed.linkname = (
                    random.choice(kinds),
                    random.choice(("", "a", "..")),
                )
                members[at] = changed, content
            case 4:
                changed = one.replace()
                changed.size = random.choice(
                    [n for n in NUMBERS if isinstance(n, int) and n < 2**70]
                )
                members[at] = changed, content
            case _:
                content = structured(Path(one.name))(random, content)
                changed = one.replace()
                changed.size = len(content)
                members[at] = changed, content
    out = bytearray()
    form = random.choice((tarfile.GNU_FORMAT, tarfile.PAX_FORMAT))
    for one, content in members:
        out += one.tobuf(form, "utf-8", "surrogateescape")
        out += content + bytes(-len(content) % tarfile.BLOCKSIZE)
    out += bytes(2 * tarfile.BLOCKSIZE)
    return gzip.compress(out, 1) if packed else bytes(out)


def nothing_else(random: Random, data: bytes) -> bytes:
    """Returns a file without a structure with other bytes or another length."""
    length = random.choice((0, 1, len(data) // 2, len(data) - 1, len(data) + 1, len(data) * 2))
    return (data * 2)[:length] if random.random() < 0.5 else raw(random, data)


def structured(path: Path) -> Callable[[Random, bytes], bytes]:
    """Returns the function that damages what a file consists of."""
    match path.suffix or path.name:
        case ".json" | ".zarray":
            return as_json
        case ".yaml":
            return as_yaml
        case ".safetensors":
            return as_safetensors
        case ".pt":
            return as_torch
        case ".metadata":
            return opcodes
        case ".nemo":
            return as_tar
    return nothing_else


def file(random: Random, path: Path) -> Iterator[tuple[Path, bytes | None]]:
    """Yields what is to be written in place of a file, and None for a file that is to be removed.

    A value that the file's syntax cannot spell becomes damaged bytes.
    """
    data = path.read_bytes()
    chance = random.random()
    if chance < 0.02:
        yield path, None
        return
    if chance < 0.04:  # a second file with a strange name
        name = random.choice([t for t in TEXTS if t.strip(".") and not set(t) & {*"/\0\ud800"}])
        named = path.with_name(random.choice((name, path.stem + name + path.suffix))[:200])
        if not named.exists():
            yield named, data
            return
    if chance < 0.25:
        yield path, raw(random, data)
        return
    try:
        yield path, structured(path)(random, data)
    except Exception:
        yield path, raw(random, data)
