"""YAML with the file and line of each key, and the merge of files that extend each other."""

from __future__ import annotations

import functools
import io
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mckpt.errors import MappingError

if TYPE_CHECKING:
    import yaml


class Node(dict):
    """A YAML mapping that knows the file and line of each key."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: dict[Any, str] = {}


def _construct(loader: yaml.SafeLoader, node: yaml.MappingNode) -> Node:
    out = Node()
    for key_node, value_node in node.value:
        key = loader.construct_object(key_node, deep=True)
        line = f"{key_node.start_mark.name}:{key_node.start_mark.line + 1}"
        if not isinstance(key, (str, bool, int)):
            raise MappingError(f"{line}: the key {key!r} must be a name")
        if key in out:
            raise MappingError(
                f"{line}: {key!r} stands here twice (first in line"
                f" {out.lines[key].rsplit(':', 1)[1]})"
            )
        out[key] = loader.construct_object(value_node, deep=True)
        out.lines[key] = line
    return out


@functools.cache
def _loader() -> type[yaml.SafeLoader]:
    import yaml  # 30 ms, and inspecting reads no mapping

    # libyaml, where it is there, parses six times as fast
    fast: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

    class Loader(fast):
        pass

    Loader.add_constructor("tag:yaml.org,2002:map", _construct)
    return Loader


def parse(path: Path) -> tuple[Node, str]:
    """Returns the file's root node and its digest."""
    import yaml

    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as e:
        raise MappingError(f"{path}: cannot be read: {e}") from None
    try:
        stream = io.StringIO(text)
        stream.name = path.name  # for messages
        node = _loader()(stream).get_single_data()
    except (yaml.YAMLError, RecursionError) as e:
        raise MappingError(f"{path}: not valid YAML: {e}") from None
    if not isinstance(node, Node):
        raise MappingError(
            f"{path}: a mapping file holds keys and values, not {type(node).__name__}"
        )
    return node, digest_of(text)


def digest_of(text: str) -> str:
    """Returns the digest of a mapping file's text, as manifests record it."""
    import hashlib  # loads OpenSSL in 10 ms, and an inspection needs none of it

    return hashlib.sha256(text.encode()).hexdigest()[:16]


def merge(base: Node, over: Node) -> Node:
    """Returns `base` with the entries of `over`. A null removes a key; lists of names (inert) are
    joined.
    """
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
