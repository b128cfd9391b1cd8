"""The dialect of a whole multimodal model: that of its text model, with the towers beside it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from msgspec.structs import replace

from mckpt.errors import MappingError, SourceError
from mckpt.mapping.expression import Expression
from mckpt.mapping.file import MappingFile
from mckpt.mapping.forms import lookup
from mckpt.mapping.nodes import FOLDER, digest_of, parse
from mckpt.mapping.rule import Rule
from mckpt.mapping.schema import CARRIED
from mckpt.mapping.towers import NUMBER, Shapes, Tower, TowerTensor, stacked

SIGN = "+"  # in the name of a whole dialect, before the name of the trainer
LAYERS = "tower_layers"  # a choice: how torch_dist has the layers of a tower


def whole_dialect(
    dialect: MappingFile, tower: Tower, shapes: Shapes, config: Mapping[str, Any]
) -> MappingFile:
    """Returns the dialect of a whole model whose text model has the dialect `dialect`.

    shapes: those of the tower's tensors, by their keys in Hugging Face files. config: config.json
    of the whole model, or what is known of it.

    Raises MappingError for tensors that the trainer's model does not have, and SourceError for
    towers that miss some.
    """
    rules, unknown = list[Rule](), list[str]()
    stacks: dict[TowerTensor, dict[int, str]] = {}
    for stored in shapes:
        entry = tower.entry_for(stored)
        named = entry.key_of(stored) if entry else None
        if entry is None or named is None:
            unknown.append(f"{stored} {list(shapes[stored])}")
            continue
        key, number = named
        native = NUMBER in entry.key
        when = f"not dist or {LAYERS} == 'per_layer'" if native else ""
        rules.append(_rule(key, [stored], entry, config, when))
        if native:
            stacks.setdefault(entry, {})[number] = stored
    if unknown:
        raise MappingError.of(
            f"the model of {tower.trainer} has no place for tensors of the towers:", unknown
        )
    depths: dict[str, int] = {}
    for entry, layers in stacks.items():
        start = entry.key.partition(NUMBER)[0]
        depths[start] = max(depths.get(start, 0), 1 + max(layers))
    missing = [
        entry.stored.replace(NUMBER, str(n))
        for entry, layers in stacks.items()
        for n in range(depths[entry.key.partition(NUMBER)[0]])
        if n not in layers
    ]
    if missing:
        raise SourceError.of(
            "the towers miss tensors that other layers of them have:",
            missing,
            "Copy the whole checkpoint again.",
        )
    for entry, layers in stacks.items():
        members = [layers[n] for n in sorted(layers)]
        when = f"dist and {LAYERS} == 'stacked'"
        rules.append(_rule(stacked(entry.key), members, entry, config, when, len(members)))
    start = tower.text
    signs = [tower.text, *(f"{name} {shape}" for name, shape in shapes.items())]
    return replace(
        dialect,
        name=f"{dialect.name}{SIGN}{tower.trainer}",
        digest=digest_of(dialect.digest + repr(signs)),
        default=False,
        flags={},
        run_flags={},
        choices={**dialect.choices, LAYERS: ("stacked", "per_layer")},
        rules=(*(rule._replace(key=start + rule.key) for rule in dialect.rules), *rules),
        objects=(
            *(rule._replace(key=start + rule.key) for rule in dialect.objects),
            *_objects(tower.objects, depths),
        ),
        tower={_logical(name): tuple(shape) for name, shape in shapes.items()},
        whole=tower,
    )


def tower_rule(stored: str) -> Rule:
    """Returns the rule of a tower's tensor with this key in Hugging Face files."""
    return _rule(stored, [stored], TowerTensor(stored, stored), {}, "")


def text_dialect(dialect: MappingFile) -> str:
    """Returns the name of the dialect of a model, or of the text model of a whole one."""
    return dialect.name.partition(SIGN)[0]


def dialect_of_whole(
    towers: Iterable[Tower],
    stored: Shapes,
    tp: int,
    config: Mapping[str, Any],
    dialect_of: Callable[[list[str]], MappingFile],
    some: bool = False,
) -> MappingFile | None:
    """Returns the dialect of a Megatron checkpoint of a whole model; None for any other.

    towers: those that it may have, the most likely first. stored: the shapes of its tensors by key;
    of one rank of `tp`, or whole. dialect_of: finds the dialect of the text model by its keys.
    some: it has some of the tensors, as those that an adapter changes.

    Raises the errors of `whole_dialect`.
    """
    likely = [t for t in towers if any(key.startswith(f"{t.text}decoder.") for key in stored)]
    if some:
        likely = [t for t in likely if t.text] or [t for t in towers if any(t.fit(stored))]
    tower = max(likely, key=lambda t: t.fit(stored), default=None)
    # without a tower's tensors it is such as one of Megatron's own old names
    if tower is None or not (some or any(tower.fit(stored))):
        return None
    text = [key.removeprefix(tower.text) for key in stored if key.startswith(tower.text)]
    return whole_dialect(dialect_of(text), tower, tower.shapes(stored, tp), config)


def of_whole_model(file: MappingFile) -> MappingFile:
    """Returns a file that reads run_config.yaml, for that of a whole model."""
    more, digest = parse(FOLDER / "whole.yaml")
    expect = {key: (*file.expect.get(key, ()), *values) for key, values in more["expect"].items()}
    return replace(
        file,
        digest=digest_of(file.digest + digest),
        expect={**file.expect, **expect},
        inert=file.inert.union(*more["inert"]),
    )


def _rule(
    key: str,
    stored: list[str],
    entry: TowerTensor,
    config: Mapping[str, Any],
    when: str,
    stack: int = 0,
) -> Rule:
    heads = None
    if entry.heads is not None:
        heads = lookup(config, entry.heads)
        if not isinstance(heads, int) or heads < 1:
            raise MappingError(
                f"{key} is packed by heads, and {entry.heads} of config.json is {heads!r}: give"
                " --like HF_DIR, the directory of the whole model"
            )
    return Rule(
        key,
        tuple(map(_logical, stored)),
        "concat" if stack and entry.pack == "one" else entry.pack,
        entry.tp,
        "first",
        (Expression(when),) if when else (),
        alias=False,
        written=True,
        dtype=None,
        mtp=False,
        indices=(),
        where=entry.stored,
        transposed=entry.transposed,
        heads=None if heads is None else Expression(str(heads)),
        stack=stack,
    )


def _objects(keys: Iterable[str], depths: Mapping[str, int]) -> Iterator[Rule]:
    """Yields the rules of the objects beside a tower's tensors, which are in the index of a
    checkpoint with the number of layers.
    """
    plain = TowerTensor("", "")
    for key in keys:
        start = key.partition(NUMBER)[0]
        if NUMBER not in key:
            yield _rule(key, [], plain, {}, "te or dist")
        elif depth := depths.get(start, 0):
            yield _rule(stacked(key), [], plain, {}, f"dist and {LAYERS} == 'stacked'", depth)
            for n in range(depth):
                one = key.replace(NUMBER, str(n))
                yield _rule(one, [], plain, {}, f"te and not dist or {LAYERS} == 'per_layer'")


def _logical(stored: str) -> str:
    """Returns the name of the logical tensor that a tower has under a stored key."""
    return CARRIED + stored.replace("{", "{{").replace("}", "}}")
