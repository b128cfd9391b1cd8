"""A family or a dialect after all checks: its rules for tensors and its dims.

A *family* (mappings/hf) and a *dialect* (mappings/megatron) are the same kind of file: stored keys
on the left, packed logical tensors on the right, and under `dims` the hyperparameters. Both are
read once and never changed. Every error names file and line.
"""

from __future__ import annotations

import contextlib
import copy
from collections import ChainMap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from mckpt.errors import MappingError, UsageError
from mckpt.lazy import numpy as np
from mckpt.lazy import pattern
from mckpt.mapping.expression import Expression, ExpressionError
from mckpt.mapping.forms import (
    ABSENT,
    OUTER,
    LazyScope,
    NameForm,
    equal,
    lookup,
    major_minor,
    part,
    put,
    view,
    whole,
)
from mckpt.mapping.registration import Registration
from mckpt.mapping.rule import Bound, Rule
from mckpt.mapping.schema import SHAPE, TOWER, schema
from mckpt.mapping.towers import Tower

Dims = dict[str, Any]
NO_MTP = "of multi-token prediction, which --no-mtp leaves out"
UNREAD = "no layer computes with it, and the other checkpoint does not have it"
Scope = Mapping[str, Any]  # dims, choices, and values derived from them


def without_mtp(dims: Mapping[str, Any]) -> Dims:
    """Returns the dims of a model without its layers of multi-token prediction."""
    count, by_layer = dims["num_layers"], {"num_layers", "moe_layers"}
    lists = {
        name: dims[name][:count]
        for name, dim in schema().dims.items()
        # the neutral value of a list with an entry for each layer depends on their number
        if dim.type == "list" and dim.neutral and by_layer.intersection(dim.neutral.names)
    }
    return {**dims, **lists, "mtp_layers": 0}


CONFIG_KEY = pattern(r"\bconfig\.(\w+)")  # in an expression
LONG = 400  # characters of a value that an error shows


class Dim(Struct, frozen=True):
    """The keys of one dim in a config, and how its value is read and written.

    A read takes the first of `keys` that is present, and applies `values` and `read`; without any
    of the keys it takes `default`.
    """

    keys: tuple[str, ...]
    default: Expression | None
    values: dict[Any, Any] | None
    has_const: bool
    const: Any
    read: Expression | None
    write: Expression | None
    when: Expression | None  # if it is false, the dim is neutral and is not written
    write_when: Expression | None
    free: bool  # True: the model does not depend on the value
    tensor: str | None  # a rule's key; without its tensor, the dim of a checkpoint is neutral
    unstored: Any  # or has this value, if the config has none of the keys
    where: str


class Condition(NamedTuple):
    """An entry of `refuse` or `inexact`: a condition, and why a model under it is refused, or is
    computed differently by the stock program.
    """

    when: Expression  # of the config in `refuse`, of the dims in `inexact`
    why: str
    loads: bool = True  # False: the program cannot even load the model


class MappingFile(Struct, frozen=True):
    """A family or a dialect, after all checks."""

    name: str
    path: Path
    digest: str
    models: str  # of a family: the models as their makers name them, and how they are special
    special: str
    architectures: tuple[str, ...]
    canonical: bool
    dialect: str  # set in a family: the dialect of its Megatron checkpoints
    default: bool  # set in a dialect: used if neither the user nor the family names one
    requires: Expression | None  # condition on the dims, for a family chosen without the user
    # the oldest and the newest megatron-core that the file writes for; empty in a family
    megatron: tuple[str, ...]
    choices: dict[str, tuple[str, ...]]
    trainer: str  # of a dialect: Megatron's program that trains its checkpoints
    # how many layers the decoder has as the keys number them; None: num_layers
    numbering: Expression | None
    stage_sizes: Expression | None  # layers of each pipeline stage, if the args have them
    # choice -> its value, from `megatron`, the version that will load the checkpoint
    by_version: dict[str, Expression]
    # further names that its expressions use, after dims and choices, and their default values
    given: dict[str, Any]
    derive: dict[str, Expression]
    dims: dict[str, Dim]
    also: dict[str, Expression]
    follow: dict[str, Expression]  # keys that an edit restates in a config that has them
    flags: dict[str, Any]  # arg -> its flag, for facts of the model
    run_flags: dict[str, Any]  # arg -> its flag, for settings of the run
    by_args: dict[str, Expression]  # choice -> its value, from the args
    expect: dict[str, tuple[Any, ...]]  # config key -> values that the mapping supports
    # arg -> its value in a newer Megatron, from the args of an older one
    upgrade: dict[str, Expression]
    values: dict[str, tuple[Any, ...]]  # arg -> values that change nothing; others may
    refused: dict[str, Condition]  # config key -> when its value is refused
    # dim -> when and why the stock program computes a result that contradicts the config
    warned: dict[str, Condition]
    inert: frozenset[str]
    ignore: dict[str, str]  # stored keys that the model does not need -> reason
    drop: dict[str, str]  # a family's: stored keys of weights that are not converted -> reason
    rules: tuple[Rule, ...]
    objects: tuple[Rule, ...]
    # the paths in config.json at which the text model's keys may be
    inside: tuple[str, ...] = ()
    # by name, of a model that contains a text model; the first one is the one to write
    forms: Mapping[str, NameForm] = {}
    notes: tuple[str, ...] = ()  # facts about every model of the family that a plan states
    placeholders: tuple[str, ...] = ()  # config keys of tokens that stand for no text
    # config keys that describe the carried tensors; of several in one item, a config has one
    needs: tuple[tuple[str, ...], ...] = ()
    specs: tuple[str, ...] = ()  # of a dialect: names in run_config.yaml that only it has
    nested: tuple[str, ...] = ()  # of a dialect: prefixes of keys that are dicts of their own
    # of a family: parts of the names of published files, and what transformers 5 has in their place
    memory: Mapping[str, str] = {}
    # of a family: values of config.json with which transformers computes the published model
    verify: Mapping[str, Any] = {}
    registration: Registration = Registration()  # the order of the parameters of a dialect
    head: str = ""  # its name in heads.yaml, where that describes the model
    # of a family: trainer -> how it stores the towers beside the text model
    towers: Mapping[str, Tower] = {}
    # of the dialect of a whole model: its towers, and the shapes of their tensors by logical name
    whole: Tower | None = None
    tower: Mapping[str, tuple[int, ...]] = {}

    # ---- versions of megatron-core

    def version(self, text: str | None = None) -> list[int]:
        """Returns [major, minor] of a version such as "0.16" or "0.19.2". Without `text` it returns
        the newest version of the file.

        Raises UsageError for text that is not a version, and for versions older or newer than the
        file supports.
        """
        oldest, newest = map(major_minor, self.megatron)
        try:
            found = newest if text is None else major_minor(text)
        except ValueError:
            raise UsageError(
                f"--megatron-version {text!r}: write a version of megatron-core such as"
                f" {self.megatron[1]} or {self.megatron[1]}.2"
            ) from None
        if not oldest <= found <= newest:
            raise UsageError(
                f"--megatron-version {text}: {self.path.name} writes for megatron-core"
                f" {self.megatron[0]} to {self.megatron[1]}"
            )
        return found

    def choices_for(self, megatron: list[int]) -> dict[str, Any]:
        """Returns the values of the choices that depend on the version of megatron-core."""
        return {name: e({"megatron": megatron}) for name, e in self.by_version.items()}

    @property
    def has_args(self) -> bool:
        """Returns whether the checkpoints of this dialect have Megatron's args; without them,
        run_config.yaml describes the model.
        """
        return bool(self.flags)

    # ---- tensors

    def form(self, scope: Mapping[str, Any]) -> NameForm:
        """Returns the form that the choice `form` in a scope names; the first one without it."""
        return (
            self.forms[scope.get("form", next(iter(self.forms)))]
            if self.forms
            else NameForm({}, ())
        )

    def stored_as(self, key: str) -> set[str]:
        """Returns the stored keys that a key of the rules may have, one for each form."""
        return {form.rename(key) for form in self.forms.values()} or {key}

    def form_of(self, keys: Iterable[str], likely: object = None) -> str | None:
        """Returns the name of a form that has exactly these carried tensors: `likely` if it is one,
        else the first one, or None.
        """
        known = list(keys)
        fit = [name for name, form in self.forms.items() if form.is_of(known)]
        return str(likely) if likely in fit else next(iter(fit), None)

    def scope(self, dims: Mapping[str, Any], **chosen: Any) -> dict[str, Any]:
        """Returns the names that a `when` can use, and their values: dims, choices, derived values
        and others that are given (pp).
        """
        first: dict[str, Any] = {"form": next(iter(self.forms))} if self.forms else {}
        first |= {TOWER: self.tower} if self.tower else {}
        scope = {**dims, **first, **chosen}
        for name, expression in self.derive.items():
            scope[name] = expression(scope)
        return scope

    def bind(self, scope: Mapping[str, Any], rules: Iterable[Rule] | None = None) -> list[Bound]:
        """Returns the rules that apply in this scope, each with its layers and experts."""
        out = []
        decoder, encoder = range(scope["num_layers"]), range(scope["encoder_layers"])
        mtp = range(len(decoder), len(decoder) + scope["mtp_layers"])
        found: dict[tuple[object, ...], list[int]] = {}  # many rules hold for the same layers
        number_of: dict[tuple[str, int], int] = {}  # and have the same numbers
        form, here = self.form(scope), dict(scope)
        sizes, kinds = schema().sizes(scope), schema().kinds(scope)

        def at(expression: Expression, layer: int) -> Any:
            here["layer"] = layer  # a copy for each layer would take longer than most expressions
            return expression(here)

        def holding(when: Expression, layers: list[int]) -> list[int]:
            if "layer" in when.names:
                return [layer for layer in layers if at(when, layer)]
            return layers if when(scope) else []

        for rule in self.rules if rules is None else rules:
            rule = rule._replace(key=form.rename(rule.key)) if form.names else rule
            layers_of = mtp if rule.mtp else encoder if rule.encoder else decoder
            every = layers_of if "layer" in rule.indices else range(1)
            layers, which = list(every), tuple[object, ...]((every,))
            for when in rule.when:
                if not layers:
                    break
                which = (*which, when.text)
                if which not in found:
                    try:
                        found[which] = holding(when, layers)
                    except ExpressionError as e:
                        raise MappingError(f"{rule.where}: {rule.key}: {e}") from None
                layers = found[which]
            if layers:
                experts = np.arange(scope["num_experts"] if "expert" in rule.indices else 1)
                numbers = layers
                if rule.number is not None:
                    text = rule.number.text
                    for layer in layers:
                        if (text, layer) not in number_of:
                            number_of[text, layer] = at(rule.number, layer)
                    numbers = [number_of[text, layer] for layer in layers]
                where = np.array(layers, "i4"), experts.astype("i4"), np.array(numbers, "i4")
                bound = Bound(rule, *where, len(decoder))
                out += _of_one_shape(bound, sizes, kinds) if kinds else [bound]
        return _stacks(out, len(decoder))

    def without_mtp(self, dims: Mapping[str, Any]) -> MappingFile:
        """Returns this file as it reads a model without its layers of multi-token prediction, whose
        stored tensors are ignored.

        dims: those of the model with these layers.
        """
        first = dims["num_layers"]
        keys = {
            rule.key.replace("{layer}", str(layer)): NO_MTP
            for rule in self.rules
            for layer in range(first, first + dims["mtp_layers"])
            if rule.mtp
        }
        return replace(self, ignore={**self.ignore, **keys})

    @property
    def has_unread(self) -> bool:
        """Returns whether it has tensors with which no layer computes."""
        return any(rule.absent is not None for rule in self.rules)

    def without_unread(self) -> MappingFile:
        """Returns this file as it reads a model without the tensors with `absent`: they are ignored
        where they are stored.
        """
        unread = {rule.key: UNREAD for rule in self.rules if rule.absent is not None}
        rules = tuple(rule for rule in self.rules if rule.absent is None)
        return replace(self, rules=rules, ignore={**self.ignore, **unread})

    def num_numbers(self, dims: Mapping[str, Any]) -> int:
        """Returns how many layers the decoder has, as this file numbers them."""
        return int(dims["num_layers"] if self.numbering is None else self.numbering(dims))

    def choices_in(self, args: Mapping[str, Any]) -> dict[str, Any]:
        try:
            config = dict(self.upgraded(args))
            found = {name: e({"config": config}) for name, e in self.by_args.items()}
        except ExpressionError as e:
            raise MappingError(f"args: {e}") from None
        return {name: value for name, value in found.items() if value is not None}

    def upgraded(self, args: Mapping[str, Any]) -> Mapping[str, Any]:
        """Returns args with those of an older Megatron under the names of a newer one."""
        if not (self.upgrade and args):
            return args
        return {**args, **{name: e({"config": args}) for name, e in self.upgrade.items()}}

    @property
    def outdated(self) -> set[str]:
        """Returns the args that `upgraded` reads, and that no dim does."""
        read = {name for e in self.upgrade.values() for name in CONFIG_KEY.findall(e.text)}
        return read - {key for dim in self.dims.values() for key in dim.keys}

    @property
    def vocabulary(self) -> Rule:
        """Returns the rule of the embedding, whose rows are padded."""
        return next(
            rule
            for rule in self.rules
            if rule.tp == "vocab" and rule.stage == "first" and not rule.alias
        )

    # ---- dims

    def read(
        self,
        config: Mapping[str, Any],
        known: Mapping[str, Any] | None = None,
        source: str = "config.json",
        override: Mapping[str, Any] | None = None,
        known_from: str = "the given dims",
    ) -> Dims:
        """Returns all dims of a model, read from its config.

        known: dims for which the config may have no value; where it has one, the two must agree.
        override: dims that the user gives; they win. source, known_from: the names of the config
        and of the origin of `known` in messages.

        MappingError lists every dim that is missing or of a wrong type, and every value that this
        file does not support.
        """
        known, override = dict(known or {}), dict(override or {})
        try:
            config = self.upgraded(view(config, self.inside))
        except ExpressionError as e:
            raise MappingError(f"{source}: {e}") from None
        dims: Dims = {}
        problems: list[str] = []
        pending: list[str] = []

        def resolve(name: str) -> Any:
            if name not in schema().dims or name in pending:
                raise KeyError(name)
            pending.append(name)
            try:
                dims[name] = scope[name] = schema().check(
                    name, self._read_dim(name, config, known, override, scope, known_from)
                )
            except (ExpressionError, ValueError, TypeError) as e:
                problems.append(f"{source}: {e}")
                raise ExpressionError(f"{name} could not be read") from None
            finally:
                pending.pop()
            return dims[name]

        scope = LazyScope(resolve, config=config)
        if config:
            from mckpt.mapping import lists

            kind = "config" if self.architectures else "args"
            if wrong := list(lists.problems(kind, config, scope)):
                raise MappingError.of(
                    f"{source} is damaged, or of a model that {self.path.name} does not know:",
                    wrong,
                )
        if refused := list(self._refusals(config, source)):
            raise MappingError.of(
                f"{source} describes a model that {self.path.name} does not know:", refused
            )
        for name in schema().dims:
            with contextlib.suppress(ExpressionError):  # it is in `problems`
                _ = scope[name]
        problems = [p for p in problems if "could not be read" not in p] or problems
        for key, values in self.expect.items():
            try:
                found = lookup(config, key)
            except ValueError as e:
                problems.append(f"{source}: {e}")
                continue
            if found is None or found in values:
                continue
            # a list of several of them
            if not (
                isinstance(found, (list, tuple)) and found and all(one in values for one in found)
            ):
                supported = ", ".join(map(repr, values)) or "unset"
                problems.append(
                    f"{source}: {key} is {found!r}, and {self.path.name} supports only {supported}"
                )
        if problems:
            raise MappingError.of(
                f"{source}: the mapping {self.path.name} cannot read this model:",
                dict.fromkeys(problems),
            )
        return dims

    def _refusals(self, config: Mapping[str, Any], source: str) -> Iterator[str]:
        for key, entry in self.refused.items():
            try:
                if entry.when({"config": config}):
                    value = repr(lookup(config, key))
                    value = value if len(value) <= LONG else f"{value[:LONG]} ..."
                    yield f"{source}: {key} is {value}: {entry.why}"
            except ExpressionError as e:
                yield f"{source}: {e}"

    def _read_dim(
        self,
        name: str,
        config: Mapping[str, Any],
        known: Mapping[str, Any],
        override: Mapping[str, Any],
        scope: LazyScope,
        known_from: str,
    ) -> Any:
        if name in override:
            return override[name]
        spec, dim = self.dims.get(name), schema().dims[name]
        if spec is None and name in known:  # this file has no key for the dim
            return known[name]
        if spec is None or (spec.when is not None and not spec.when(scope)):
            if dim.neutral is None:
                raise ValueError(f"{self.path.name} does not set {name}")
            return dim.neutral(scope)
        stated = [(k, v) for k in spec.keys if (v := lookup(config, k)) is not None]
        key, raw = stated[0] if stated else ("default", None)
        # two keys may name the same value differently
        meant = [v if spec.values is None else _mapped(spec.values, v) for _, v in stated]
        if any(not equal(meant[0], one) for one in meant[1:]):
            raise ValueError(
                f"{name} has several values: {', '.join(f'{k} {v!r}' for k, v in stated)}"
            )
        if raw is None and spec.keys:
            # null means None for an optional dim; an absent key means unknown
            null = dim.optional and any(lookup(config, k, ABSENT) is None for k in spec.keys)
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
            raise ValueError(
                f"{key} is {raw!r}; {self.path.name} supports {', '.join(map(repr, spec.values))}"
            )
        if spec.read is not None:
            value = spec.read(ChainMap({"value": value}, scope))
        if isinstance(value, float) and dim.type == "int" and value.is_integer():
            value = int(value)
        if value is None and name in known:  # the config has no value
            return known[name]
        if name in known and not spec.free and not equal(known[name], value):
            raise ValueError(f"{name} is {value!r} by {key}, but {known[name]!r} by {known_from}")
        return value

    def write(
        self, dims: Mapping[str, Any], given: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """Returns the config that expresses these dims. `given` has values for the names under the
        file's `given`.
        """
        return self._written(dims, given, self.also)

    def _written(
        self,
        dims: Mapping[str, Any],
        given: Mapping[str, Any] | None,
        also: Mapping[str, Expression],
    ) -> dict[str, Any]:
        config: dict[str, Any] = {}
        scope = {**self.given, **dims, **(given or {})}
        for name, spec in self.dims.items():
            if not spec.keys or any(
                e is not None and not e(scope) for e in (spec.when, spec.write_when)
            ):
                continue
            value = dims[name]
            if spec.values is not None:
                value = next((k for k, v in spec.values.items() if v == value), value)
            try:
                value = value if spec.write is None else spec.write(scope)
            except ExpressionError as e:
                raise MappingError(f"{spec.where}: {name}: {e}") from None
            put(config, spec.keys[0], list(value) if isinstance(value, tuple) else value)
        for key, expression in also.items():
            try:
                put(config, key, expression(scope))
            except ExpressionError as e:
                raise MappingError(f"{self.path.name}: also: {key}: {e}") from None
        return whole(config, self.inside)

    def keys_with(self, name: str) -> list[str]:
        """Returns the keys of a config whose written values depend on a name of `given`."""
        out = [key for key, e in self.also.items() if name in e.names]
        return out + [d.keys[0] for d in self.dims.values() if d.write and name in d.write.names]

    def keys_of(self, name: str, config: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the keys of a config that determine a dim, and their values."""
        keys = self.dims[name].keys if name in self.dims else ()
        return {k: v for k in keys if (v := self.lookup(config, k)) is not None}

    def lookup(self, config: Mapping[str, Any], key: str) -> Any:
        """Returns the value of a key of the text model in a config; None without it.

        Raises MappingError if a part of the config is not an object.
        """
        try:
            return lookup(view(config, self.inside), key)
        except ValueError as e:
            raise MappingError(f"config.json: {e}") from None

    def restate(
        self, config: Mapping[str, Any], dims: Mapping[str, Any], changed: Iterable[str]
    ) -> dict[str, Any]:
        """Returns a copy of the config with the values of the `changed` dims from `dims`, under
        every key that has them now. A dim that such a model does not have stays as it is.
        """
        out: dict[str, Any] = copy.deepcopy(dict(config))
        always = {name: replace(spec, write_when=None) for name, spec in self.dims.items()}
        written = replace(self, dims=always).write(dims)
        for name in changed:
            keys = self.dims[name].keys if name in self.dims else ()
            value = lookup(view(written, self.inside), keys[0], ABSENT) if keys else ABSENT
            for path in list(self.keys_of(name, config)) or list(keys[:1]):
                if value is not ABSENT:
                    self._set(out, path, value)
        return out

    def _set(self, config: dict[str, Any], path: str, value: Any) -> None:
        *outer, last = path.removeprefix(OUTER).split(".")
        inner: Any = config if path.startswith(OUTER) else part(config, self.inside)
        for step in outer:
            inner = inner.setdefault(step, {})
        inner[last] = value

    def followed(
        self,
        config: Mapping[str, Any],
        before: Mapping[str, Any],
        after: Mapping[str, Any],
        layers: Sequence[int] | None,
    ) -> dict[str, Any]:
        """Returns a copy of the config of a model that an edit has changed, in which those of its
        keys that `following` returns are for the new dims, and so are lists with an item for each
        layer. A key that the config lacks is added if it would mean another model without it.

        layers: the old number of each layer; None: they are of several models.
        """
        from mckpt.mapping import lists

        out: dict[str, Any] = copy.deepcopy(dict(config))
        for key in lists.by_layer():
            items = self.lookup(config, key)
            if isinstance(items, list) and len(items) == before["num_layers"]:
                if layers is not None:
                    self._set(out, key, [items[number] for number in layers])
                elif items == items[:1] * len(items):
                    self._set(out, key, items[:1] * after["num_layers"])
        new = self.following(before, after)
        absent = {key for key in new if self.lookup(config, key) is None}
        for key in new.keys() - absent:
            self._set(out, key, new[key])
        absent -= self.follow.keys()
        if absent and not self._means(out, before, after):
            for key in absent:
                self._set(out, key, new[key])
        return out

    def _means(
        self, config: Mapping[str, Any], before: Mapping[str, Any], after: Mapping[str, Any]
    ) -> bool:
        """Returns whether a config has the dims `after` once the changed ones are restated."""
        changed = [name for name in before if not equal(before[name], after[name])]
        restated = self.restate(config, after, self.to_restate(config, after, changed))
        try:
            again = self.read(restated, {"vocab_size": after["vocab_size"]})
        except MappingError:
            return False
        return all(equal(again[name], after[name]) for name in changed)

    def following(self, before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the keys that no dim has, such as `layer_types` in some families, or that are
        computed of several dims, whose value is another for the dims `after`, and this value.
        """
        also = {**self.also, **self.follow}
        old, new = (self._written(dims, None, also) for dims in (before, after))
        keys = [*also, *(dim.keys[0] for dim in self.dims.values() if dim.keys and dim.write)]
        return {k: v for k in keys if (v := self.lookup(new, k)) != self.lookup(old, k)}

    def adopted(
        self,
        config: Mapping[str, Any],
        before: MappingFile,
        dims: Mapping[str, Any],
        changed: Iterable[str],
    ) -> dict[str, Any]:
        """Returns the config.json of a model of this family, which an edit has made of a model of
        another one by changing some dims.

        Keys that only the family before knows are left out, and so is code beside the weights.
        """
        lost = before.known_keys() - self.known_keys() | {"auto_map"}
        out = {key: value for key, value in config.items() if key not in lost}
        out["architectures"] = [self.architectures[0]]
        written = self.write(dims)
        for key in self.also:
            self._set(out, key, self.lookup(written, key))
        out = self.restate(out, dims, changed)
        try:
            again = self.read(out, {"vocab_size": dims["vocab_size"]})
        except MappingError:  # it lacks keys, or the family before knows more values of one
            read = {key.partition(".")[0] for dim in self.dims.values() for key in dim.keys}
            return {**{key: value for key, value in out.items() if key not in read}, **written}
        return self.restate(out, dims, [n for n in dims if not equal(again[n], dims[n])])

    def to_restate(
        self, config: Mapping[str, Any], dims: Mapping[str, Any], changed: Iterable[str]
    ) -> list[str]:
        """Returns those of the `changed` dims that `restate` needs: whose keys the config has, and
        those that would be others without it. A dim whose value in the config or whose default
        depends on a changed one is needed too where it would be another now: the width of a head,
        or that of shared experts, which some configs count in experts.
        """
        found = set(changed)
        stated = [name for name in changed if self.keys_of(name, config)]
        others = {name: dim for name, dim in self.dims.items() if dim.keys and name not in found}
        read = [name for name, dim in others.items() if dim.read and dim.read.names & found]
        implied = [
            name
            for name, dim in others.items()
            if dim.default and dim.default.names & found and name not in read
        ]
        known = {"vocab_size": dims["vocab_size"]}
        try:
            again = self.read(self.restate(config, dims, stated), known)
        except MappingError:
            new = (name for name in implied if not self.keys_of(name, config))
            return [*changed, *read, *new]
        return stated + [
            name
            for name in (*changed, *read, *implied)
            if name not in stated and not equal(again.get(name), dims[name])
        ]

    def stored(self, dims: Mapping[str, Any]) -> list[tuple[Any, ...]]:
        """Returns the facts about these dims that the tensors of a model show: each rule's key, its
        layers, its experts and its members' names and shapes.
        """
        scope = self.scope(dims)
        return [
            (
                b.rule.key,
                b.layers.tolist(),
                len(b.experts),
                [(name, schema().shape(name, scope)) for name in b.rule.of],
            )
            for b in self.bind(scope)
        ]

    def inexact(
        self, dims: Mapping[str, Any], given: Mapping[str, Any] | None = None
    ) -> dict[str, str]:
        """Returns the dims whose values this file cannot express, and the value that a reader of
        the written config would get instead.

        `given` are further names; `megatron` among them is the version of megatron-core,
        the newest if it is left out.
        """
        newest = {"megatron": self.version()} if self.megatron else {}
        given = {**self.given, **newest, **(given or {})}
        try:
            again = self.read(self.write(dims, given), {"vocab_size": dims["vocab_size"]})
        except MappingError as e:
            return {"config": f"{e}"}
        out = {
            name: f"{name} is {dims[name]!r}, and {self.name} would compute with {again[name]!r}"
            for name in dims
            if not equal(dims[name], again[name])
            and not (name in self.dims and self.dims[name].free)
        }
        if "mtp_layers" in out and not again["mtp_layers"]:
            out["mtp_layers"] += ". --no-mtp leaves out the layers of multi-token prediction"
            plain = without_mtp(dims)  # the lists of layers differ with their number
            same = [n for n in out if n != "mtp_layers" and equal(plain[n], again[n])]
            out = {name: why for name, why in out.items() if name not in same}
        return {**out, **self.warnings({**dims, **given})}

    def warnings(self, scope: Mapping[str, Any], loads: bool | None = None) -> dict[str, str]:
        """Returns dim -> reason, for each dim that the file can express and that the stock program
        computes differently.

        scope: the dims, `megatron` and `transformer_impl` of the program, and `tp`, `pp` and
        `format` of the checkpoint. If one of these five is unknown, the entries that depend on it
        are left out. loads: True or False selects the entries of models that the program can or
        cannot load; None selects all.
        """
        out = {}
        for name, entry in self.warned.items():
            if (
                (loads is None or entry.loads == loads)
                and {"megatron", "transformer_impl", "tp", "pp", "format"} & set(entry.when.names)
                <= set(scope)
                and entry.when(scope)
            ):
                version = ".".join(map(str, scope.get("megatron", ())))
                versioned = "megatron" in entry.when.names
                which = f" (written for megatron-core {version})" if versioned else ""
                out[name] = f"{name} is {scope[name]!r}{which}: {entry.why}"
        return out

    def known_keys(self) -> set[str]:
        """Returns the keys of a config that a dim reads, that are written, or that are listed
        under `expect` or as inert.
        """
        return {k for d in self.dims.values() for k in d.keys} | {
            *self.also,
            *self.follow,
            *self.expect,
            *self.inert,
        }

    def unknown(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the keys of a config, including keys inside an object, that no dim reads and that
        are not listed under `expect` or as inert, and their values.

        Keys without a value are left out.
        """
        read = self.known_keys()
        config = part(config, self.inside)
        objects = {k.split(".")[0] for k in read if "." in k}
        inner = {
            f"{k}.{i}": v
            for k in objects
            if isinstance(config.get(k), Mapping)
            for i, v in config[k].items()
        }
        flat = {**{k: v for k, v in config.items() if k not in objects}, **inner}
        return {k: v for k, v in flat.items() if k not in read and v not in (None, False, [], {})}


def _mapped(values: Mapping[Any, Any], value: Any) -> Any:
    """Returns what a value of a config stands for, or the value itself if the file has none."""
    return value if isinstance(value, (list, dict)) else values.get(value, value)


def _stacks(bound: list[Bound], num_layers: int) -> list[Bound]:
    """Returns the rules, each with the layers that its stored tensor holds where these are not all:
    those for which a rule has the key.
    """
    held: dict[str, set[int]] = {}
    for b in bound:
        if "layer" in b.rule.stacked() and not b.rule.encoder:
            held.setdefault(b.rule.key, set()).update(b.layers.tolist())
    some = {key: tuple(sorted(layers)) for key, layers in held.items() if len(layers) < num_layers}
    return [b._replace(stack=some.get(b.rule.key, ())) if some else b for b in bound]


def _of_one_shape(
    b: Bound, sizes: list[tuple[int, ...]], kinds: list[tuple[int, ...]]
) -> list[Bound]:
    """Returns a rule of tensors that do not have the same shape in all layers once for each shape.

    sizes: of each layer, as `Schema.sizes` returns them. kinds: those that there are, as
        `Schema.kinds` does.
    """
    rule = b.rule
    if rule.encoder or not any(map(schema().differs, rule.of)):
        return [b]
    out = []
    for number, kind in enumerate(kinds, 1):
        those = np.array([sizes[layer] == kind for layer in b.layers.tolist()])
        if those.any():
            # q has the same shape in all layers, and is packed with k and v
            of = tuple(n + number * SHAPE if schema().differs(n) else n for n in rule.of)
            out.append(
                Bound(
                    rule._replace(of=of), b.layers[those], b.experts, b.numbers[those], b.num_layers
                )
            )
    return out
