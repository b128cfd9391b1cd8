"""Mapping files -> checked rules and dims. The only reader of `mappings/`.

A *family* (mappings/hf) and a *dialect* (mappings/megatron) are the same kind of file: stored keys on the left, packed logical tensors
on the right, and under `dims` the hyperparameters. Both are read once and never mutated. Every error names file and line.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import io
import math
import re
from collections import ChainMap
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from mckpt.dtypes import TABLE
from mckpt.errors import MappingError, UsageError
from mckpt.expression import Expression, ExpressionError
from mckpt.lazy import numpy as np
from mckpt.packing import PACKINGS, TP_KINDS

if TYPE_CHECKING:
    import yaml

_HERE = Path(__file__).parent
FOLDER = _HERE / "mappings" if (_HERE / "mappings").is_dir() else _HERE.parent / "mappings"  # a wheel has them inside
Dims = dict[str, Any]
Scope = Mapping[str, Any]  # dims, choices and what is derived of them
_TYPES: dict[str, Any] = {"int": int, "float": (int, float), "bool": bool, "str": str, "list": (list, tuple)}
_INDEX = re.compile(r"\{(\w+)\}")
_VERSION = re.compile(r"(\d{1,3})\.(\d{1,3})(?:[.+-]\w+)*")
_BRACES = re.compile(r"\{([^{}]*,[^{}]*)\}")


# ---------------------------------------------------------------------------------------------------------------- YAML with lines


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
            raise MappingError(f"{line}: {key!r} stands here twice (first in line {out.lines[key].rsplit(':', 1)[1]})")
        out[key] = loader.construct_object(value_node, deep=True)
        out.lines[key] = line
    return out


@functools.cache
def _loader() -> type[yaml.SafeLoader]:
    import yaml  # 30 ms, and inspecting reads no mapping

    fast: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # libyaml, where it is there, parses six times as fast

    class Loader(fast):
        pass

    Loader.add_constructor("tag:yaml.org,2002:map", _construct)
    return Loader


def _parse(path: Path) -> tuple[Node, str]:
    """The file's root node and its digest."""
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
        raise MappingError(f"{path}: no YAML: {e}") from None
    if not isinstance(node, Node):
        raise MappingError(f"{path}: a mapping file holds keys and values, not {type(node).__name__}")
    return node, digest_of(text)


def digest_of(text: str) -> str:
    """The digest of a mapping file's text, as manifests record it."""
    import hashlib  # loads OpenSSL in 10 ms, and an inspection needs none of it

    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _merge(base: Node, over: Node) -> Node:
    """`over` on top of `base`; null takes a key away; lists of names (inert) are joined."""
    out = Node()
    for key in [*base, *(k for k in over if k not in base)]:
        a, b = base.get(key), over.get(key)
        if key in over and b is None and key in base:
            continue
        if isinstance(a, Node) and isinstance(b, Node) and not {"of", "key", "const", "read"} & (a.keys() | b.keys()):
            out[key] = _merge(a, b)
        elif isinstance(a, list) and isinstance(b, list) and key == "inert":
            out[key] = a + b
        else:
            out[key] = b if key in over else a
        out.lines[key] = over.lines[key] if key in over else base.lines[key]
    return out


# ---------------------------------------------------------------------------------------------------------------- the hub


class LogicalDim(NamedTuple):
    type: str
    optional: bool
    neutral: Expression | None
    about: str
    low: float  # values outside the bounds can only be damage
    high: float


class LogicalTensor(NamedTuple):
    shape: tuple[Expression, ...]
    about: str


class Hub(NamedTuple):
    """logical.yaml: every dim and every logical tensor."""

    dims: dict[str, LogicalDim]
    tensors: dict[str, LogicalTensor]
    digest: str

    def shape(self, name: str, dims: Mapping[str, Any]) -> tuple[int, ...]:
        """Shape of a logical tensor (by template), in elements."""
        return tuple(e(dims) for e in self.tensors[name].shape)

    def check(self, name: str, value: Any) -> Any:
        """The value of a dim if it is one; ValueError says why not."""
        dim = self.dims[name]
        if value is None and dim.optional:
            return None
        wanted = _TYPES[dim.type]
        if not isinstance(value, wanted) or (isinstance(value, bool) and dim.type in ("int", "float")):
            raise ValueError(f"{name} is {value!r}, and must be of type {dim.type}")
        if dim.type in ("int", "float") and not dim.low <= value <= dim.high:
            raise ValueError(f"{name} is {value}, and must be from {dim.low} to {dim.high}")
        return value


@functools.cache
def hub() -> Hub:
    node, digest = _parse(FOLDER / "logical.yaml")
    dims = {
        k: LogicalDim(
            v["type"],
            v.get("optional", False),
            Expression(v["neutral"]) if "neutral" in v else None,
            v["about"],
            v.get("min", 0),
            v.get("max", math.inf),
        )
        for k, v in node["dims"].items()
    }
    tensors = {k: LogicalTensor(tuple(Expression(e) for e in v["shape"]), v["about"]) for k, v in node["tensors"].items()}
    return Hub(dims, tensors, digest)


# ---------------------------------------------------------------------------------------------------------------- rules


class Rule(NamedTuple):
    """One stored key template and the logical tensors packed in it. An object rule has no members."""

    key: str
    of: tuple[str, ...]
    pack: str
    tp: str  # column, row, vocab or replicated
    stage: str | None  # first or last: the pipeline stage of a tensor that is in no layer
    when: Expression | None
    alias: bool  # a further copy of a tensor that another rule stores
    written: bool  # False: an alias that is looked at where it is there, and not made
    dtype: str | None  # what it is always stored in
    mtp: bool  # its layers are those of multi-token prediction, which are numbered behind the decoder's; a key can count them from 0 as {mtp}
    indices: tuple[str, ...]  # of "layer", "expert": those that its tensors or its key have
    where: str

    @property
    def shared(self) -> bool:
        """Whether several keys are copies of one tensor: they name a layer, and it does not."""
        return "layer" in self.indices and bool(self.of) and "{layer}" not in self.of[0]

    def stacked(self) -> tuple[str, ...]:
        """Indices that are leading axes of the stored tensor, because the key does not name them."""
        return tuple(i for i in self.indices if f"{{{i}}}" not in self.key and not (i == "layer" and self.mtp))


class Bound(NamedTuple):
    """A rule that applies to one model, and where: the layers (or [0]) and experts (or [0]) it has."""

    rule: Rule
    layers: np.ndarray
    experts: np.ndarray
    num_layers: int  # of the decoder

    def key(self, layer: int, expert: int = 0) -> str:
        """The key of one of its tensors."""
        return self.rule.key.format(layer=layer, expert=expert, mtp=layer - self.num_layers)

    def keys(self) -> list[str]:
        """All keys that name layer and expert, layer by layer."""
        experts = list(map(str, self.experts.tolist()))
        out: list[str] = []
        for layer in self.layers.tolist():
            key = self.rule.key.replace("{expert}", "\0").format(layer=layer, mtp=layer - self.num_layers)
            out += [key.replace("\0", expert) for expert in experts]
        return out

    def instances(self) -> tuple[np.ndarray, np.ndarray]:
        """(layer, expert) of what each of `keys` holds."""
        return np.repeat(self.layers * (not self.rule.shared), len(self.experts)), np.tile(self.experts, len(self.layers))


class Dim(NamedTuple):
    """How one dim lies in a config. Read: the first of `keys` that is there, through `values` and `read`; else `default`."""

    keys: tuple[str, ...]
    default: Expression | None
    values: dict[Any, Any] | None
    has_const: bool
    const: Any
    read: Expression | None
    write: Expression | None
    when: Expression | None  # else the dim is neutral, and nothing is written
    write_when: Expression | None
    free: bool  # any value does: nothing in the model depends on it
    where: str


class Warned(NamedTuple):
    """An entry of `inexact`."""

    when: Expression
    why: str
    loads: bool  # False: the program cannot even load the model


class MappingFile(NamedTuple):
    """A family or a dialect, checked."""

    name: str
    path: Path
    digest: str
    architectures: tuple[str, ...]
    canonical: bool
    requires: Expression | None  # what must hold of the dims for the family to be chosen unasked
    megatron: tuple[str, ...]  # the oldest and the newest megatron-core that the file writes for; empty in a family
    choices: dict[str, tuple[str, ...]]
    by_version: dict[str, Expression]  # choice -> its value, from `megatron`, the version that will load the checkpoint
    derive: dict[str, Expression]
    dims: dict[str, Dim]
    also: dict[str, Expression]
    flags: dict[str, Any]  # arg -> how a launch line says it: facts of the model
    run_flags: dict[str, Any]  # the same, settings of the run
    said: dict[str, Expression]  # choice -> what the args say of it
    expect: dict[str, tuple[Any, ...]]  # config key -> values that the mapping stands for
    warned: dict[str, Warned]  # dim -> when and why the stock program computes something else than the config says
    inert: frozenset[str]
    ignore: dict[str, str]  # stored keys that are not read, and why: of a family weights, of a dialect what is no weight
    computed: dict[str, str]  # stored keys that a model computes from its config, so that nothing is lost without them
    rules: tuple[Rule, ...]
    objects: tuple[Rule, ...]

    # ---- versions of megatron-core

    def version(self, text: str | None = None) -> list[int]:
        """Returns [major, minor] of a version such as "0.16" or "0.19.2"; of the newest known one without `text`.

        Raises UsageError for text that is not a version, and for versions older or newer than the file knows.
        """
        oldest, newest = map(_major_minor, self.megatron)
        try:
            found = newest if text is None else _major_minor(text)
        except ValueError:
            raise UsageError(
                f"--megatron-version {text!r}: write a version of megatron-core such as {self.megatron[1]} or {self.megatron[1]}.2"
            ) from None
        if not oldest <= found <= newest:
            raise UsageError(
                f"--megatron-version {text}: {self.path.name} writes for megatron-core {self.megatron[0]} to {self.megatron[1]}"
            )
        return found

    def choices_for(self, megatron: list[int]) -> dict[str, Any]:
        """Returns the choices that depend on the version of megatron-core, as `megatron` makes them."""
        return {name: e({"megatron": megatron}) for name, e in self.by_version.items()}

    # ---- tensors

    def scope(self, dims: Mapping[str, Any], **chosen: Any) -> dict[str, Any]:
        """What a `when` can name: dims, choices, what is derived of them, and anything else that is given (pp)."""
        scope = {**dims, **chosen}
        for name, expression in self.derive.items():
            scope[name] = expression(scope)
        return scope

    def bind(self, scope: Mapping[str, Any], rules: Iterable[Rule] | None = None) -> list[Bound]:
        """The rules that apply in this scope, each with its layers and experts."""
        out = []
        decoder = range(scope["num_layers"])
        mtp = range(len(decoder), len(decoder) + scope["mtp_layers"])
        found: dict[tuple[range, str | None], list[int]] = {}  # many rules hold for the same layers
        for rule in self.rules if rules is None else rules:
            every = (mtp if rule.mtp else decoder) if "layer" in rule.indices else range(1)
            which = every, rule.when.text if rule.when else None
            if which not in found:
                try:
                    if rule.when is None or "layer" not in rule.when.names:
                        found[which] = list(every) if rule.when is None or (every and rule.when(scope)) else []
                    else:
                        found[which] = [i for i in every if rule.when({**scope, "layer": i})]
                except ExpressionError as e:
                    raise MappingError(f"{rule.where}: {rule.key}: {e}") from None
            if layers := found[which]:
                experts = np.arange(scope["num_experts"] if "expert" in rule.indices else 1)
                out.append(Bound(rule, np.array(layers, "i4"), experts.astype("i4"), len(decoder)))
        return out

    def say_choices(self, args: Mapping[str, Any]) -> dict[str, Any]:
        """What args say of the choices; a choice of which they say nothing is left out."""
        return {name: value for name, e in self.said.items() if (value := e({"config": dict(args)})) is not None}

    @property
    def vocabulary(self) -> Rule:
        """The rule of the embedding, whose rows are padded."""
        return next(rule for rule in self.rules if rule.tp == "vocab" and rule.stage == "first" and not rule.alias)

    # ---- dims

    def read(self, config: Mapping[str, Any], known: Mapping[str, Any] | None = None, source: str = "config.json",
             override: Mapping[str, Any] | None = None) -> Dims:  # fmt: skip
        """All dims of a model, from its config; `known` ones fill what the config does not say and must agree with what it does;
        `override` ones are the user's own word, and win.

        MappingError lists everything that is missing, of a wrong type, or outside what this file knows.
        """
        known, override = dict(known or {}), dict(override or {})
        dims: Dims = {}
        problems: list[str] = []
        pending: list[str] = []

        def resolve(name: str) -> Any:
            if name not in hub().dims or name in pending:
                raise KeyError(name)
            pending.append(name)
            try:
                dims[name] = scope[name] = hub().check(name, self._read_dim(name, config, known, override, scope))
            except (ExpressionError, ValueError, TypeError) as e:
                problems.append(f"{source}: {e}")
                raise ExpressionError(f"{name} could not be read") from None
            finally:
                pending.pop()
            return dims[name]

        scope = _Lazy(resolve, config=config)
        for name in hub().dims:
            with contextlib.suppress(ExpressionError):  # it is in `problems`
                _ = scope[name]
        problems = [p for p in problems if "could not be read" not in p] or problems
        for key, values in self.expect.items():
            if (found := lookup(config, key)) is None or found in values:
                continue
            if not (isinstance(found, (list, tuple)) and found and all(one in values for one in found)):  # a list of several of them
                said = ", ".join(map(repr, values)) or "unset"
                problems.append(f"{source}: {key} is {found!r}, and {self.path.name} knows only {said}")
        if problems:
            raise MappingError.of(f"{source} does not describe a model that {self.path.name} knows:", dict.fromkeys(problems))
        return dims

    def _read_dim(self, name: str, config: Mapping[str, Any], known: Mapping[str, Any], override: Mapping[str, Any], scope: _Lazy) -> Any:
        if name in override:
            return override[name]
        spec, dim = self.dims.get(name), hub().dims[name]
        if spec is None and name in known:  # beyond what this file can say
            return known[name]
        if spec is None or (spec.when is not None and not spec.when(scope)):
            if dim.neutral is None:
                raise ValueError(f"{self.path.name} says nothing of {name}")
            return dim.neutral(scope)
        said = [(k, v) for k in spec.keys if (v := lookup(config, k)) is not None]
        key, raw = said[0] if said else ("default", None)
        if any(not equal(raw, v) for _, v in said):
            raise ValueError(f"says two things of {name}: {', '.join(f'{k} {v!r}' for k, v in said)}")
        if raw is None and spec.keys:
            null = dim.optional and any(lookup(config, k, _ABSENT) is None for k in spec.keys)  # null says none, absence says nothing
            if name in known and not null:
                return known[name]
            if spec.default is None:
                raise ValueError(f"{' or '.join(spec.keys)} is missing ({dim.about})")
            raw = None if null else spec.default(scope)
        if spec.has_const:
            value = spec.const
        elif spec.values is None:
            value = raw
        elif raw in spec.values:
            value = spec.values[raw]
        else:
            raise ValueError(f"{key} is {raw!r}; {self.path.name} knows {', '.join(map(repr, spec.values))}")
        if spec.read is not None:
            value = spec.read(ChainMap({"value": value}, scope))
        if isinstance(value, float) and dim.type == "int" and value.is_integer():
            value = int(value)
        if value is None and name in known:  # silence
            return known[name]
        if name in known and not spec.free and not equal(known[name], value):
            raise ValueError(f"{name} is {value!r} by {key}, but {known[name]!r} was given")
        return value

    def write(self, dims: Mapping[str, Any], given: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """The config that says these dims."""
        config: dict[str, Any] = {}
        for name, spec in self.dims.items():
            scope = {**dims, **(given or {})}
            if not spec.keys or any(e is not None and not e(scope) for e in (spec.when, spec.write_when)):
                continue
            value = dims[name]
            if spec.values is not None:
                value = next((k for k, v in spec.values.items() if v == value), value)
            try:
                value = value if spec.write is None else spec.write(scope)
            except ExpressionError as e:
                raise MappingError(f"{spec.where}: {name}: {e}") from None
            path = spec.keys[0].split(".")
            inner = config
            for part in path[:-1]:
                inner = inner.setdefault(part, {})
            inner[path[-1]] = list(value) if isinstance(value, tuple) else value
        for key, expression in self.also.items():
            try:
                config[key] = expression({**dims, **(given or {})})
            except ExpressionError as e:
                raise MappingError(f"{self.path.name}: also: {key}: {e}") from None
        return config

    def said_of(self, name: str, config: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the keys of a config that say something of a dim, and their values."""
        keys = self.dims[name].keys if name in self.dims else ()
        return {k: v for k in keys if (v := lookup(config, k)) is not None}

    def restate(self, config: Mapping[str, Any], dims: Mapping[str, Any], changed: Iterable[str]) -> dict[str, Any]:
        """Returns the config with the `changed` dims as `dims` has them, under every key by which the config says them now."""
        out: dict[str, Any] = copy.deepcopy(dict(config))
        written = self.write(dims)
        for name in changed:
            keys = self.dims[name].keys if name in self.dims else ()
            for path in list(self.said_of(name, config)) or list(keys[:1]):
                *outer, last = path.split(".")
                inner = out
                for part in outer:
                    inner = inner.setdefault(part, {})
                inner[last] = lookup(written, keys[0])
        return out

    def stored(self, dims: Mapping[str, Any]) -> list[tuple[Any, ...]]:
        """Returns what the tensors of a model with these dims show of it: each rule's key, its layers, its experts and its members' shapes."""
        scope = self.scope(dims)
        return [(b.rule.key, b.layers.tolist(), len(b.experts), [hub().shape(name, scope) for name in b.rule.of]) for b in self.bind(scope)]

    def inexact(self, dims: Mapping[str, Any], given: Mapping[str, Any] | None = None) -> dict[str, str]:
        """What of these dims this file cannot say: dim -> what a reader of the written config would take it for.

        `given` are names beside the dims; `megatron` among them is the version of megatron-core, the newest if it is left out.
        """
        given = {**({"megatron": self.version()} if self.megatron else {}), **(given or {})}
        try:
            again = self.read(self.write(dims, given), {"vocab_size": dims["vocab_size"]})
        except MappingError as e:
            return {"config": str(e)}
        out = {
            name: f"{name} is {dims[name]!r}, and {self.name} would compute with {again[name]!r}"
            for name in dims
            if not equal(dims[name], again[name]) and not (name in self.dims and self.dims[name].free)
        }
        return {**out, **self.warnings({**dims, **given})}

    def warnings(self, scope: Mapping[str, Any], loads: bool | None = None) -> dict[str, str]:
        """Returns dim -> why, for each dim that the file can say and that the stock program computes differently.

        scope: the dims, and `megatron` and `transformer_impl` of the program. Where `megatron` is not known, because a checkpoint does not name the
        version that trained it, the entries that depend on it are left out.
        loads: True or False selects the entries of models that the program can or cannot load; None selects all.
        """
        out = {}
        for name, entry in self.warned.items():
            versioned = "megatron" in entry.when.names
            if (loads is None or entry.loads == loads) and (not versioned or "megatron" in scope) and entry.when(scope):
                which = f" (written for megatron-core {'.'.join(map(str, scope['megatron']))})" if versioned else ""
                out[name] = f"{name} is {scope[name]!r}{which}: {entry.why}"
        return out

    def unknown(self, config: Mapping[str, Any]) -> list[str]:
        """Keys of a config, those inside an object too, that no dim reads and that are not listed under `expect` or as inert.

        Keys that say nothing are left out.
        """
        read = {k for d in self.dims.values() for k in d.keys} | set(self.also) | self.expect.keys() | self.inert
        objects = {k.split(".")[0] for k in read if "." in k}
        inner = {f"{k}.{i}": v for k in objects if isinstance(config.get(k), Mapping) for i, v in config[k].items()}
        said = {**{k: v for k, v in config.items() if k not in objects}, **inner}
        return [k for k, v in said.items() if k not in read and v not in (None, False, [], {})]


class _Lazy(dict):
    """A scope that asks `resolve` for what it lacks."""

    def __init__(self, resolve: Callable[[str], Any], **known: Any) -> None:
        super().__init__(known)
        self.resolve = resolve

    def __missing__(self, name: str) -> Any:
        return self.resolve(name)


_ABSENT = object()


def lookup(config: Mapping[str, Any], path: str, absent: Any = None) -> Any:
    """config["a"]["b"] for "a.b"; `absent` where it has no such key. ValueError if "a" holds no object."""
    value: Any = config
    for part in path.split("."):
        if value is None:
            return absent
        if not isinstance(value, Mapping):
            raise ValueError(f"{path.rpartition('.')[0]} is {value!r}, and must be an object")
        if part not in value:
            return absent
        value = value[part]
    return value


def equal(a: Any, b: Any) -> bool:
    """Compares two values of a dim; a list equals a tuple of the same items."""
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return list(a) == list(b)
    return bool(a == b)


# ---------------------------------------------------------------------------------------------------------------- reading a file


def _major_minor(text: str) -> list[int]:
    """Returns [0, 19] for "0.19" and for "0.19.2". Raises ValueError if the text is not a version."""
    found = _VERSION.fullmatch(text)
    if found is None:
        raise ValueError(f"{text!r} is not a version such as 0.19")
    return [int(found[1]), int(found[2])]


_TOP: dict[str, type] = {
    "architectures": list,
    "extends": str,
    "canonical": bool,
    "requires": str,
    "megatron": list,
    "choices": Node,
    "by_version": Node,
    "derive": Node,
    "dims": Node,
    "also": Node,
    "flags": Node,
    "run_flags": Node,
    "said": Node,
    "expect": Node,
    "inexact": Node,
    "inert": list,
    "ignore": Node,
    "computed": Node,
    "tensors": Node,
    "blocks": Node,
    "objects": Node,
}
_INNER: dict[str, type] = {"blocks": Node, "inexact": Node, "expect": list, "choices": list}  # what each key of a section holds
_KINDS: dict[type, str] = {Node: "keys and values", list: "a list", str: "text", bool: "true or false"}
_RULE = ("of", "pack", "tp", "stage", "when", "alias", "dtype", "mtp", "expert")
_DIM = ("key", "default", "values", "const", "read", "write", "when", "write_when", "free")


def folder(kind: str) -> Path:
    """Where the files of a kind lie: "hf" or "megatron"."""
    return FOLDER / kind


@functools.cache
def names(kind: str) -> tuple[str, ...]:
    """Names of the families ("hf") or dialects ("megatron") that come with mckpt."""
    return tuple(sorted(p.stem for p in folder(kind).glob("*.yaml")))


@functools.cache
def load(kind: str, name: str) -> MappingFile:
    """The family or dialect of that name, or the user's own file if it ends in .yaml."""
    path = Path(name) if name.endswith((".yaml", ".yml")) else folder(kind) / f"{name}.yaml"
    if not path.is_file():
        raise MappingError(f"no mapping {name!r}; known: {', '.join(names(kind))}, or the path of a .yaml file")
    root, digest = _inherit(path, kind, ())
    return _checked(path, root, digest)


def family_of(architecture: str) -> str:
    """The family that names an architecture of transformers. Only files that have the name in their text are parsed."""
    for name in names("hf"):
        if architecture in (folder("hf") / f"{name}.yaml").read_text(encoding="utf-8") and architecture in load("hf", name).architectures:
            return name
    known = sorted(a for n in names("hf") for a in load("hf", n).architectures)
    raise MappingError(
        f"no family has the architecture {architecture}; known: {', '.join(known)}.\n"
        "If its tensors are those of a known family, write a file `my.yaml` such as\n"
        f"    architectures: [{architecture}]\n    extends: llama\n"
        "override what differs (`mckpt mappings show llama` prints all of it), test it with `mckpt mappings check my.yaml`, "
        "and give it as `--mapping my.yaml`."
    )


def _inherit(path: Path, kind: str, above: tuple[Path, ...]) -> tuple[Node, str]:
    node, digest = _parse(path)
    for key in node:
        if key not in _TOP:
            raise MappingError(f"{node.lines[key]}: {key!r} is no section of a mapping file; known: {', '.join(_TOP)}")
        _shaped(node, key, _TOP[key])
        for inner in (node[key] or ()) if key in _INNER else ():
            _shaped(node[key], inner, _INNER[key])
    if "extends" not in node:
        return node, digest
    base = path.parent / f"{node['extends']}.yaml"
    if not base.is_file():
        base = folder(kind) / f"{node['extends']}.yaml"
    if not base.is_file() or base in above:
        raise MappingError(
            f"{node.lines['extends']}: there is no mapping {node['extends']!r} to extend" + " (it extends itself)" * (base in above)
        )
    root, base_digest = _inherit(base, kind, (*above, path))
    root.pop("architectures", None)
    return _merge(root, node), digest_of(base_digest + digest)


def to_keep(name: str) -> str:
    """The text of a family file that needs no other file of the user's: files that it extends are merged in, but not one that mckpt has."""
    path = Path(name)
    node, _ = _parse(path)
    if "extends" not in node or not (path.parent / f"{node['extends']}.yaml").is_file():
        return path.read_text(encoding="utf-8")
    import yaml

    root, _ = _inherit(path, "hf", ())
    root.pop("extends", None)
    merged = yaml.safe_dump(_plain(root), sort_keys=False, allow_unicode=True, width=140)
    return f"# {path.name}, merged by mckpt with the files that it extends.\n{merged}"


def _plain(value: Any) -> Any:
    """The same without lines."""
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    return [_plain(v) for v in value] if isinstance(value, list) else value


def misfits(source: str, here: set[str], target: str, there: set[str], dims: Mapping[str, Any]) -> list[str]:
    """Returns a line for each logical tensor (by template) that only one of two mappings has for a model with these dims."""

    def said(name: str) -> str:
        return f"{name} {list(hub().shape(name, dims))} ({hub().tensors[name].about})"

    lacking = [f"{said(n)}: {target} needs it, and {source} has no rule for it" for n in sorted(there - here)]
    return lacking + [f"{said(n)}: {source} has it, and {target} has no place for it" for n in sorted(here - there)]


def _shaped(node: Node, key: Any, wanted: type) -> None:
    """MappingError unless the key holds what it should, or null."""
    if node[key] is not None and not isinstance(node[key], wanted):
        raise MappingError(f"{node.lines[key]}: {key} holds {_KINDS[wanted]}, not {node[key]!r}")


def _checked(path: Path, root: Node, digest: str) -> MappingFile:
    problems: list[str] = []

    def expression(text: Any, where: str) -> Expression | None:
        if text is None:
            return None
        try:
            return Expression(text)
        except ExpressionError as e:
            problems.append(f"{where}: {e}")
            return None

    def expressions(section: str) -> dict[str, Expression]:
        node = root.get(section) or Node()
        return {k: e for k, v in node.items() if (e := expression(v, node.lines[k])) is not None}

    dims = {}
    for name, spec in (root.get("dims") or Node()).items():
        where = root["dims"].lines[name]
        if name not in hub().dims:
            problems.append(f"{where}: logical.yaml has no dim {name!r}")
            continue
        spec = {"key": spec} if isinstance(spec, str) else spec
        if not isinstance(spec, dict) or spec.keys() - set(_DIM):
            problems.append(f"{where}: {name} may say {', '.join(_DIM)}, not {spec!r}")
            continue
        keys = spec.get("key", [])
        of = {k: expression(spec.get(k), where) for k in ("default", "read", "write", "when", "write_when")}
        dims[name] = Dim(
            (keys,) if isinstance(keys, str) else tuple(keys), of["default"], spec.get("values"), "const" in spec, spec.get("const"), of["read"],
            of["write"], of["when"], of["write_when"], spec.get("free", False), where,
        )  # fmt: skip
        if not keys and "const" not in spec and of["read"] is None:
            problems.append(f"{where}: {name} has no key, no const and no read")
    rules = list(_rules(root, "tensors", expression, problems))
    objects = list(_rules(root, "objects", expression, problems))
    warned: dict[str, Warned] = {}
    inexact = root.get("inexact") or Node()
    for name, value in inexact.items():
        if not isinstance(value, dict) or {"when", "why"} - value.keys() or value.keys() - {"when", "why", "loads"}:
            problems.append(f"{inexact.lines[name]}: {name} wants `when` and `why`, and may say `loads: false`")
        elif (when := expression(value["when"], inexact.lines[name])) is not None:
            warned[name] = Warned(when, value["why"], value.get("loads", True))
    found = MappingFile(
        path.stem, path, digest, tuple(root.get("architectures", ())), bool(root.get("canonical", False)),
        expression(root.get("requires"), path.name),
        tuple(map(str, root.get("megatron") or ())), {k: tuple(v) for k, v in (root.get("choices") or {}).items()}, expressions("by_version"),
        expressions("derive"), dims, expressions("also"), root.get("flags") or {},
        root.get("run_flags") or {}, expressions("said"),
        {k: tuple(v) for k, v in (root.get("expect") or {}).items()},
        warned,
        frozenset(k for one in root.get("inert") or () for k in ([one] if isinstance(one, str) else one)), dict(root.get("ignore") or {}),
        dict(root.get("computed") or {}), tuple(rules), tuple(objects),
    )  # fmt: skip
    if problems:
        raise MappingError.of(f"{path}: not a mapping:", list(dict.fromkeys(problems)))  # a block is read for tensors and for objects
    return found


def _rules(root: Node, section: str, expression: Callable[[Any, str], Expression | None], problems: list[str]) -> Iterator[Rule]:
    """The rules of the top level and of each block, braces expanded, prefixes put on both sides.

    A block that says `mtp` has its rules a second time, for the layers of multi-token prediction: `mtp` is their prefix, or the prefix as `key`
    with an `instead` of its own.
    """
    scopes: list[tuple[Node, str, str, tuple[str, Expression | None] | None, bool]] = [(root.get(section) or Node(), "", "", None, False)]
    for prefix, block in (root.get("blocks") or Node()).items():
        block = block or Node()
        mtp = block.get("mtp")
        if isinstance(mtp, dict) and not isinstance(mtp.get("key"), str):
            problems.append(f"{root['blocks'].lines[prefix]}: `mtp` of {prefix} needs a prefix, or `key` with the prefix")
            mtp = None
        mtp = {"key": mtp} if isinstance(mtp, str) else mtp
        for start, other, again in [(prefix, block.get("instead"), False), *([(mtp["key"], mtp.get("instead"), True)] if mtp else [])]:
            where = root["blocks"].lines[prefix]
            if other is not None and (not isinstance(other, dict) or {"key", "when"} - other.keys()):
                problems.append(f"{where}: `instead` of {start} wants `key` and `when`")
                other = None
            instead = (other["key"], expression(other["when"], where)) if other else None
            scopes.append((block.get(section) or Node(), start, block.get("is", ""), instead, again))
    for node, prefix, logical, instead, again in scopes:
        for key, value in node.items():
            where = node.lines[key]
            for spec in value if isinstance(value, list) else [value]:
                try:
                    expanded = list(_expand(key, spec))
                except ValueError as e:
                    problems.append(f"{where}: {prefix + key}: {e}")
                    continue
                for stored, one in expanded:
                    if again and one.get("mtp"):
                        continue
                    if again or "{mtp}" in prefix:
                        one = {**one, "mtp": True}
                    try:
                        rule = _rule(prefix + stored, one, logical, where, expression)
                    except (ValueError, TypeError) as e:
                        problems.append(f"{where}: {prefix + stored}: {e}")
                        continue
                    if instead is None:
                        yield rule
                        continue
                    other_prefix, condition = instead
                    if condition is None:  # it is among the problems
                        continue
                    both = f"({condition.text})" + (f" and ({rule.when.text})" if rule.when else "")
                    neither = f"not ({condition.text})" + (f" and ({rule.when.text})" if rule.when else "")
                    yield rule._replace(when=Expression(neither))
                    yield rule._replace(key=other_prefix + stored, when=Expression(both))


def _expand(key: str, spec: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """`{q,k,v}` in the key, in `of` and in `when`: one rule for each."""
    spec = {"of": spec} if isinstance(spec, str) else {} if spec is None else spec
    if not isinstance(spec, dict):
        raise ValueError(f"wants a tensor, or {', '.join(_RULE)}, not {spec!r}")
    of = spec.get("of", [])
    of = [of] if isinstance(of, str) else of
    if not isinstance(of, list) or not all(isinstance(o, str) for o in of):
        raise ValueError(f"`of` names tensors, not {of!r}")
    found = _BRACES.search(key)
    words = found[1].split(",") if found else []
    for inside in _BRACES.findall(" ".join([*of, str(spec.get("when", ""))])):
        if len(inside.split(",")) != len(words):
            raise ValueError(f"{{{inside}}} has {len(inside.split(','))} words, and the key has {len(words)}")
    if not found:
        yield key, {**spec, "of": of}
        return
    for i, word in enumerate(words):

        def pick(text: str, i: int = i) -> str:
            return _BRACES.sub(lambda m: m[1].split(",")[i], text)

        when = {"when": pick(str(spec["when"]))} if "when" in spec else {}
        yield key[: found.start()] + word + key[found.end() :], {**spec, "of": [pick(o) for o in of], **when}


def _rule(key: str, spec: Mapping[str, Any], prefix: str, where: str, expression: Callable[[Any, str], Expression | None]) -> Rule:
    if spec.keys() - set(_RULE):
        raise ValueError(f"a rule may say {', '.join(_RULE)}, not {', '.join(sorted(spec.keys() - set(_RULE)))}")
    of = tuple(o[1:] if o.startswith("/") else prefix + o for o in spec["of"])  # /embed.weight is none of the block's
    for name in of:
        if name not in hub().tensors:
            raise ValueError(f"logical.yaml has no tensor {name!r}")
    mtp, alias = bool(spec.get("mtp")), spec.get("alias", False)
    if alias not in (False, True, "read"):
        raise ValueError(f"alias is true, or `read` for one that is not written, not {alias!r}")
    asked = {"layer": mtp or (not of and "{layer}" in prefix), "expert": bool(spec.get("expert"))}
    indices = tuple(i for i in ("layer", "expert") if asked[i] or any(f"{{{i}}}" in n for n in of or (key,)))
    for index in _INDEX.findall(key):
        if index not in (*indices, *(["mtp"] if mtp else [])):
            raise ValueError(f"{{{index}}} is not an index of {', '.join(of) or 'an object'}")
    if any(set(_INDEX.findall(n)) != set(_INDEX.findall(of[0])) for n in of):
        raise ValueError("its tensors do not have the same indices")
    pack = spec.get("pack", "one")
    if pack not in PACKINGS:
        raise ValueError(f"no packing {pack!r}; known: {', '.join(PACKINGS)}")
    if pack == "one" and len(of) > 1:
        raise ValueError("several tensors need a `pack`")
    tp = spec.get("tp", "replicated")
    if tp not in TP_KINDS:
        raise ValueError(f"no tp kind {tp!r}; known: {', '.join(TP_KINDS)}")
    when, dtype = expression(spec.get("when"), where), spec.get("dtype")
    if dtype not in (None, *TABLE):
        raise ValueError(f"no dtype {dtype!r}; known: {', '.join(TABLE)}")
    return Rule(key, of, pack, tp, spec.get("stage"), when, bool(alias), alias != "read", dtype, mtp, indices, where)


def parse_setting(text: str) -> tuple[str, Any]:
    """`name=value` of --set -> (dim, value)."""
    import yaml

    name, equals, value = text.partition("=")
    if not equals or name not in hub().dims:
        raise UsageError(f"--set {text!r}: say NAME=VALUE with one of {', '.join(hub().dims)}")
    try:
        return name, hub().check(name, yaml.safe_load(value))
    except (ValueError, yaml.YAMLError) as e:
        raise UsageError(f"--set {text!r}: {e}") from None


def key_pattern(key: str) -> re.Pattern[str]:
    """What a key template can look like once its indices are filled."""
    return re.compile(_INDEX.sub(r"\\d+", re.escape(key).replace(r"\{", "{").replace(r"\}", "}")))
