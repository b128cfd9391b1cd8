"""Parses YAML from an untrusted source, keeps the file and line of each key, and merges files that
extend each other.
"""

from __future__ import annotations

import functools
import io
import os
import re
import sys
from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec import msgpack

from mckpt.errors import MappingError
from mckpt.version import __version__

if TYPE_CHECKING:
    import yaml

_PACKAGE = Path(__file__).parent.parent
# a wheel has them inside
FOLDER = _PACKAGE / "mappings" if (_PACKAGE / "mappings").is_dir() else _PACKAGE.parent / "mappings"
# Of a file that is read; ten times the longest one in mappings/. It also limits the nodes of a tree
# in which each alias is replaced by its anchor: a text without aliases cannot have more.
MAX_BYTES = 1 << 20
BRACES = re.compile(r"\{([^{}]*,[^{}]*)\}")  # {q,k,v}
_TEXT = "tag:yaml.org,2002:str"
MAX_DIGITS = 100  # of a whole number; Python prints no number of more than 4,300


class Node(dict):
    """A YAML mapping that knows the file and line of each key."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: dict[Any, str] = {}


def _construct(loader: yaml.SafeLoader, node: yaml.MappingNode) -> Node:
    out = Node()
    for key_node, value_node in node.value:
        key = _value(loader, key_node)
        line = f"{key_node.start_mark.name}:{key_node.start_mark.line + 1}"
        if not isinstance(key, (str, bool, int)):
            raise MappingError(f"{line}: the key {key!r} must be a name")
        if key in out:
            raise MappingError(
                f"{line}: {key!r} stands here twice (first in line"
                f" {out.lines[key].rsplit(':', 1)[1]})"
            )
        out[key] = _value(loader, value_node)
        out.lines[key] = line
    return out


def _value(loader: yaml.SafeLoader, node: yaml.Node) -> Any:
    """Returns the value of a node. Most are texts, for which the loader takes ten times as long."""
    if node.tag == _TEXT and isinstance(node.value, str):
        return node.value
    return loader.construct_object(node, deep=True)


@functools.cache
def _loaders() -> tuple[type[yaml.SafeLoader], type[yaml.SafeLoader]]:
    import yaml  # 30 ms, and inspecting reads no mapping

    # libyaml, where it is there, parses six times as fast
    fast: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

    class Plain(fast):
        """Reads the values that JSON has; a date is a text."""

        yaml_implicit_resolvers = {
            first: [(tag, form) for tag, form in forms if not tag.endswith(":timestamp")]
            for first, forms in fast.yaml_implicit_resolvers.items()
        }

    def construct_int(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> int:
        if len(node.value) > MAX_DIGITS:
            raise ValueError(f"a number of {len(node.value):,} digits")
        return int(loader.construct_yaml_int(node))

    class Lined(Plain):
        """Gives each key its line."""

    Plain.add_constructor("tag:yaml.org,2002:int", construct_int)
    Lined.add_constructor("tag:yaml.org,2002:map", _construct)
    return Plain, Lined


def parse(path: Path) -> tuple[Node, str]:
    """Returns the file's root node and its digest."""
    try:
        if (size := path.stat().st_size) > MAX_BYTES:
            raise MappingError(f"{path}: has {size:,} bytes, and a mapping at most {MAX_BYTES:,}")
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as e:
        raise MappingError(f"{path}: cannot be read: {e}") from None
    digest = digest_of(text)
    try:
        node = _loaded(path, text, digest)
    except ValueError as e:
        raise MappingError(f"{path}: not valid YAML: {e}") from None
    if not isinstance(node, Node):
        raise MappingError(
            f"{path}: a mapping file holds keys and values, not {type(node).__name__}"
        )
    return node, digest


@functools.lru_cache(maxsize=64)  # files
def _loaded(path: Path, text: str, digest: str) -> Any:
    """Returns the root node of a file, which several dialects may extend; `merge` copies it.

    Of a file that comes with mckpt, it keeps the parsed form where Python keeps compiled modules:
    without it, importing yaml and parsing take a tenth of the time of a dry run.
    """
    if not path.is_relative_to(FOLDER):
        return load(text, path.name)
    cache = path.parent / "__pycache__" / f"{path.stem}.parsed"
    key = f"{__version__} {digest}"
    with suppress(OSError, ValueError):  # absent or damaged
        known, packed = msgpack.decode(cache.read_bytes())
        if known == key:
            return _unpacked(packed)
    node = load(text, path.name)
    if not sys.dont_write_bytecode:
        with suppress(OSError):  # such as that of a directory that the user may not write
            cache.parent.mkdir(exist_ok=True)
            new = cache.with_suffix(f".{os.getpid()}")
            new.write_bytes(msgpack.encode((key, _packed(node))))
            new.replace(cache)
    return node


def _packed(value: Any) -> Any:
    """Returns a value that has the line of each key beside the key's value."""
    if isinstance(value, Node):
        return {key: (value.lines[key], _packed(inner)) for key, inner in value.items()}
    return list(map(_packed, value)) if isinstance(value, list) else value


def _unpacked(packed: Any) -> Any:
    if isinstance(packed, dict):
        node = Node()
        for key, (line, inner) in packed.items():
            node[key], node.lines[key] = _unpacked(inner), line
        return node
    return list(map(_unpacked, packed)) if isinstance(packed, list) else packed


def load(text: str, name: str = "") -> Any:
    """Returns the value of a YAML text. Raises ValueError for a text that is not YAML, and for one
    that describes far more than its length: aliases of aliases, numbers of thousands of digits.

    name: the name of its file, which the lines of keys begin with. Without it, objects are plain
    dicts, not `Node`.
    """
    stream = io.StringIO(text)
    stream.name = name or "line"  # for messages
    plain, lined = _loaders()
    try:
        loader = (lined if name else plain)(stream)
        root = loader.get_single_node()
        if root is None:
            return None
        if "&" in text:  # else it has no anchors
            _refuse_aliases(root)
        return loader.construct_document(root)
    except MappingError:
        raise
    except Exception as e:  # a tag and a text that do not fit end in any of a dozen errors
        raise ValueError(" ".join(str(e).split()) or type(e).__name__) from None


def _refuse_aliases(root: yaml.Node) -> None:
    """Raises ValueError if a tree is too large once each alias is replaced by its anchor."""
    left, seen = [root], 0
    while left:
        found = left.pop().value
        if isinstance(found, list):  # of nodes, or of pairs of nodes
            for child in found:
                left += child if isinstance(child, tuple) else (child,)
        seen += 1
        if seen + len(left) > MAX_BYTES:
            raise ValueError(f"its aliases stand for more than {MAX_BYTES:,} values")


def digest_of(text: str) -> str:
    """Returns the digest of a mapping file's text, as manifests record it."""
    import hashlib  # loads OpenSSL in 10 ms, and an inspection needs none of it

    return hashlib.sha256(text.encode()).hexdigest()[:16]


def plain(value: Any) -> Any:
    """Returns the same value without lines."""
    if isinstance(value, dict):
        return {k: plain(v) for k, v in value.items()}
    return [plain(v) for v in value] if isinstance(value, list) else value


def merge(base: Node, over: Node) -> Node:
    """Returns `base` with the entries of `over`. A null removes a key; lists of names (inert) are
    joined. A key such as x.{a,b} stands for x.a and x.b, where the other node has one of these.
    """
    group = {one: key for key in base if key not in over for one, _ in _parts(key)}
    new = (key for key in over if key not in base)
    if mixed := {key for key in new if any(p in base or p in group for p, _ in _parts(key))}:
        over = _apart(over, mixed)
    if mixed := {group[key] for key in over if key in group}:
        base = _apart(base, mixed)
    out = Node()
    for key in [*base, *(k for k in over if k not in base)]:
        a, b = base.get(key), over.get(key)
        if key in over and b is None and key in base:
            continue
        if (
            isinstance(a, Node)
            and isinstance(b, Node)
            and not {"of", "key", "const", "read"} & (a.keys() | b.keys())
        ):
            out[key] = merge(a, b)
        elif isinstance(a, list) and isinstance(b, list) and key == "inert":
            out[key] = a + b
        else:
            out[key] = b if key in over else a
        out.lines[key] = over.lines[key] if key in over else base.lines[key]
    return out


def _apart(node: Node, keys: Collection[str]) -> Node:
    """Returns a node with an entry for each of the words of these keys."""
    out = Node()
    for key, value in node.items():
        for one, own in _parts(key, value) if key in keys else [(key, value)]:
            out[one], out.lines[one] = own, node.lines[key]
    return out


def _parts(key: Any, value: Any = None) -> Iterator[tuple[str, Any]]:
    """Yields the key and the value for each of the words in a key such as x.{a,b}."""
    found = BRACES.search(key) if isinstance(key, str) and "," in key else None
    words = found[1].split(",") if found else []
    for number, word in enumerate(words):
        assert found is not None
        yield key[: found.start()] + word + key[found.end() :], _picked(value, number, len(words))


def _picked(value: Any, number: int, count: int) -> Any:
    """Returns a value with one of the words in place of each {a,b} that has `count` of them."""
    if isinstance(value, str):
        return BRACES.sub(
            lambda m: m[1].split(",")[number] if m[1].count(",") + 1 == count else m[0], value
        )
    if isinstance(value, Node):
        out = Node()
        for key, inner in value.items():
            out[key], out.lines[key] = _picked(inner, number, count), value.lines[key]
        return out
    return [_picked(one, number, count) for one in value] if isinstance(value, list) else value
