"""The methods of merges: their names, parameters and formulas, and the checkpoint that one makes.

Names, parameters and their defaults are those of mergekit 0.1.5. values/mixing.py computes the
elements. A parameter is one number for all tensors, or a list of numbers that are spread over the
layers; tensors outside of the layers have the first one.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from mckpt.checkpoint.checkpoint import Checkpoint
from mckpt.editing.averaging import Averaging, Matrix, Origin, Place, average, coefficients
from mckpt.editing.pieces import refuse_changed
from mckpt.errors import UsageError
from mckpt.options import AverageOptions
from mckpt.storage.manifest import Facts
from mckpt.values import mixing
from mckpt.values.adding import FACTORS
from mckpt.values.element import MIX
from mckpt.values.mixing import Mix, Part, Share

Setting = float | Sequence[float]
EACH = ("weight", "density", "gamma")  # the parameters of which each model has its own


@dataclass(frozen=True)
class Method:
    """A row of the table."""

    contract: str  # the formula, for the plan
    needs_base: bool | None  # None: may have one
    models: tuple[int, int]  # the least and the most, without the base
    parameters: Mapping[str, float]  # and their defaults
    formula: str = "given"  # of values/mixing.py
    kept: int = mixing.ALL
    elects: bool = False


_MANY = 1 << 16
_WEIGHTED = {"weight": 1.0, "normalize": 0.0}
_MASKED = {**_WEIGHTED, "density": 1.0, "lambda": 1.0}
_DRAWN = {**_MASKED, "rescale": 1.0, "seed": 0.0}
_SUM = "base + lambda * (sum of w_i * {}), divided by the sum of the {}weights if normalize is true"
_SIGNED = ", over the models whose term has the sign of the sum of all"
_KEPT = "m_i * (x_i - base){}; m_i keeps {}"
_BY_SIZE = "the part density of the elements that changed most"
_BETWEEN = f"{_BY_SIZE} behind the part gamma, the largest changes"
_CHANCE = "elements at random with the chance density, which divides them if rescale is true"

METHODS: Mapping[str, Method] = {
    "linear": Method(
        "sum of w_i * x_i, divided by the sum of the weights if normalize is true",
        False,
        (1, _MANY),
        {"weight": 1.0, "normalize": 1.0},
    ),
    "task_arithmetic": Method(
        _SUM.format("(x_i - base)", ""), True, (1, _MANY), {**_WEIGHTED, "lambda": 1.0}
    ),
    "slerp": Method(
        "(sin((1 - t) a) * x_0 + sin(t a) * x_1) / sin(a), a being the angle of the two tensors;"
        " (1 - t) * x_0 + t * x_1 if |cos(a)| > 0.9995",
        False,
        (2, 2),
        {"t": math.nan},
        "slerp",
    ),
    "nuslerp": Method(
        "base + (sin((1 - t) a) * d_0 + sin(t a) * d_1) / sin(a), a being the angle of the changes"
        " d_i = x_i - base, or of the tensors without a base, and t = w_1 / (w_0 + w_1)",
        None,
        (2, 2),
        {"weight": 1.0},
        "nuslerp",
    ),
    "multislerp": Method(
        "base + the weighted mean of the changes d_i = x_i - base, or of the tensors without a"
        " base, on the sphere, by its tangent at their mean direction",
        None,
        (2, _MANY),
        {"weight": 1.0, "normalize": 1.0},
        "multislerp",
    ),
    "karcher": Method(
        "the Karcher mean of the tensors' directions, times the mean of their lengths",
        False,
        (2, _MANY),
        {},
        "karcher",
    ),
    "model_stock": Method(
        "base + t * (mean of x_i - base), t = n c / (1 + (n - 1) c), c being the mean of the"
        " cosines between the n changes",
        True,
        (2, _MANY),
        {},
        "model_stock",
    ),
    "ties": Method(
        _SUM.format(_KEPT.format(_SIGNED, _BY_SIZE), "same "),
        True,
        (1, _MANY),
        {**_MASKED, "normalize": 1.0},
        "masked",
        mixing.LARGEST,
        True,
    ),
    "dare_linear": Method(
        _SUM.format(_KEPT.format("", _CHANCE), ""),
        True,
        (1, _MANY),
        _DRAWN,
        "masked",
        mixing.DRAWN,
    ),
    "dare_ties": Method(
        _SUM.format(_KEPT.format(_SIGNED, _CHANCE), "same "),
        True,
        (1, _MANY),
        _DRAWN,
        "masked",
        mixing.DRAWN,
        True,
    ),
    "breadcrumbs": Method(
        _SUM.format(_KEPT.format("", _BETWEEN), ""),
        True,
        (1, _MANY),
        {**_MASKED, "gamma": 0.01},
        "masked",
        mixing.BETWEEN,
    ),
    "breadcrumbs_ties": Method(
        _SUM.format(_KEPT.format(_SIGNED, _BETWEEN), "same "),
        True,
        (1, _MANY),
        {**_MASKED, "gamma": 0.01},
        "masked",
        mixing.BETWEEN,
        True,
    ),
}
EXACT = ("linear", "task_arithmetic")  # have the arithmetic of mergekit
# what is wrong with a value, by parameter
_WRONG = {
    "density": ("in (0, 1]", lambda x: 0 < x <= 1),
    "gamma": ("in [0, 1)", lambda x: 0 <= x < 1),
    "seed": ("a whole number from 0 on", lambda x: 0 <= x < 1 << 53 and x == int(x)),
    "normalize": ("true or false", lambda x: x in (0, 1)),
    "rescale": ("true or false", lambda x: x in (0, 1)),
}


@dataclass(frozen=True)
class Chosen:
    """A method with its parameters."""

    name: str
    shared: Mapping[str, Setting] = field(default_factory=dict)
    each: Sequence[Mapping[str, Setting]] = ()  # of each model but the base
    has_base: bool = False  # the first input is the base of the changes
    arithmetic: str = "float32"
    dtype: str | None = None  # to which mergekit would cast the models first

    @property
    def method(self) -> Method:
        return METHODS[self.name]

    def check(self, where: Mapping[str, str] | None = None) -> None:
        """Raises UsageError for a method or a parameter that is wrong.

        where: a place for a parameter, for messages.
        """
        least, most = self.method.models
        beside = " beside the base model" if self.has_base else ""
        if not least <= (count := len(self.each)) <= most:
            number = f"{least}" if least == most else f"at least {least}"
            raise UsageError(f"{self.name}: merges {number} models{beside}, and {count} are given")
        if self.arithmetic == "mergekit" and self.name not in EXACT:
            raise UsageError(
                f"--arithmetic mergekit: has the methods {' and '.join(EXACT)}, not {self.name}"
            )
        for found in (self.shared, *self.each):
            for name, setting in found.items():
                self._check(name, setting, (where or {}).get(name, ""))
        if "t" in self.method.parameters and "t" not in self.shared:
            raise UsageError(f"{self.name}: give its parameter t, such as --parameters t=0.5")

    def _check(self, name: str, setting: Setting, where: str) -> None:
        known = self.method.parameters
        if name not in known:
            listed = ", ".join(known) or "none"
            raise UsageError(f"{where}{name}: {self.name} has the parameters {listed}")
        must, right = _WRONG.get(name, ("a finite number", math.isfinite))
        if isinstance(setting, Sequence) and name in ("normalize", "rescale", "seed"):
            raise UsageError(f"{where}{name} is a list, and must be {must}")
        for value in setting if isinstance(setting, Sequence) else (setting,):
            if not math.isfinite(value) or not right(value):
                raise UsageError(f"{where}{name} is {value:g}, and must be {must}")

    def value(self, name: str, depth: float, own: Mapping[str, Setting] | None = None) -> float:
        """Returns a parameter at a depth of 0 .. 1; 0 if the method does not have it."""
        stated = {**self.method.parameters, **self.shared, **(own or {})}
        setting = stated.get(name, 1.0 if name in ("weight", "lambda", "density") else 0.0)
        if not isinstance(setting, Sequence):
            return float(setting)
        scaled = depth * (len(setting) - 1)
        first = int(scaled)
        second = min(first + 1, len(setting) - 1)
        part = scaled - first
        return (1 - part) * setting[first] + part * setting[second]

    @property
    def text(self) -> str:
        """Returns the parameters in words."""
        stated = {**self.method.parameters, **self.shared}
        found = [f"{n} {_text(v)}" for n, v in stated.items() if n not in EACH or not self.each]
        for name in (n for n in EACH if n in stated):
            values = [_text(own.get(name, stated[name])) for own in self.each]
            found.append(f"{name} {values[0] if len(set(values)) == 1 else ' '.join(values)}")
        return ", ".join(found)


def _text(setting: Setting) -> str:
    if isinstance(setting, Sequence):
        return f"[{', '.join(f'{x:.6g}' for x in setting)}]"
    return f"{setting:.6g}"


def chosen(options: AverageOptions, count: int) -> Chosen:
    """Returns the method that the options name, for `count` checkpoints. Raises UsageError."""
    assert options.method is not None
    method = METHODS[options.method]
    for name in ("schedule", "reverse", "start", "end", "window", "min_interval"):
        if getattr(options, name):
            raise UsageError(f"{options.spelled(name)}: is of sums; leave it out with --method")
    nuslerp_base = options.method == "nuslerp" and count == 3
    has_base = method.needs_base or nuslerp_base
    models = count - has_base
    weights = options.weights
    if weights is not None and len(found := [float(w) for w in weights]) != models:
        beside = " beside the base, the first one," if has_base else ""
        raise UsageError(
            f"--weights has {len(found)} numbers, and {models} checkpoints{beside} are merged"
        )
    each = [{}] * models if weights is None else [{"weight": w} for w in found]
    shared: dict[str, Setting] = (
        dict(stated) if isinstance(stated := options.parameters, Mapping) else {}
    )
    if options.normalize:
        shared["normalize"] = 1.0
    out = Chosen(options.method, shared, each, has_base, options.arithmetic)
    out.check()
    return out


def made(inputs: Sequence[Checkpoint], options: AverageOptions, base: int) -> Checkpoint:
    """Returns the merge that the options describe: by their method, or a sum.

    base: the number of the checkpoint whose format, args and config the result has.
    """
    if options.method is not None:
        masters = options.summed != "weights"
        if options.summed == "states":
            raise UsageError("--from states: is of sums; give --from masters with --method")
        return merged(inputs, chosen(options, len(inputs)), masters, base)
    for name in ("parameters", "arithmetic"):
        if getattr(options, name) != (None if name == "parameters" else "float32"):
            raise UsageError(f"--{name}: is of --method; give it as well")
    return average(inputs, coefficients(options, len(inputs)), base, options.summed)


def again(inputs: Sequence[Checkpoint], facts: Mapping[str, Any], of: Checkpoint) -> Checkpoint:
    """Returns the merge that the manifest of `of` describes. facts: its entry of the merge.

    Raises UsageError for inputs that are not those of the entry.
    """
    listed, name = facts["inputs"], facts.get("method")
    if len(listed) != len(inputs):
        raise UsageError(
            f"{of.path}: was made of {len(listed)} checkpoints, and {len(inputs)} are given; give"
            " the others with --with"
        )
    if name is None:
        found = [float.fromhex(one["coefficient"]) for one in listed]
        out = average(inputs, found, 0, facts["of"])
    else:
        has_base = bool(METHODS[name].needs_base or (name == "nuslerp" and len(inputs) == 3))
        each = [{n: v for n, v in one.items() if n in EACH} for one in listed[has_base:]]
        how = Chosen(name, facts["parameters"], each, has_base, facts["arithmetic"])
        out = merged(inputs, how, facts["of"] != "weights")
    assert isinstance(out.merging, Averaging)
    for one, known in zip(inputs, listed, strict=True):
        refuse_changed(one.path, out.merging.read(one), known["layout"], of.path)
    return out


def merged(
    inputs: Sequence[Checkpoint], how: Chosen, masters: bool = False, base: int = 0
) -> Checkpoint:
    """Returns a checkpoint whose weights are merged; its args and config are those of one input.

    Raises the errors of `Averaging.layout`.
    """
    coefficients = (1.0,) * len(inputs)
    out = replace(inputs[base], merging=Mixing(tuple(inputs), coefficients, base, masters, how=how))
    _ = out.layout
    return out


@dataclass(frozen=True)
class Mixing(Averaging):
    """The merge of several checkpoints by a method."""

    how: Chosen = Chosen("linear")
    term: ClassVar[str] = MIX

    @property
    def facts(self) -> Facts:
        """Returns the manifest's entry: the method, its parameters and the inputs."""
        average = dict(super().facts["average"])
        inputs = [{k: v for k, v in i.items() if k != "coefficient"} for i in average["inputs"]]
        for own, given in zip(inputs[self.how.has_base :], self.how.each, strict=True):
            own.update(given)
        stated = {**self.how.method.parameters, **self.how.shared}
        return {
            "average": {
                **average,
                "inputs": inputs,
                "method": self.how.name,
                "arithmetic": self.how.arithmetic,
                "parameters": {n: v for n, v in stated.items() if v == v},
            }
        }

    @property
    def notes(self) -> list[str]:
        """Returns the contract of the values."""
        what = "master copies" if self.masters else "weights"
        arithmetic = "in float32, rounded once"
        if self.how.arithmetic == "mergekit":
            arithmetic = "with mergekit's roundings"
        text = f" ({self.how.text})" if self.how.text else ""
        return [
            f"formula: {self.how.name}{text}, of the {what} of {len(self.inputs)} checkpoints:"
            f" {self.how.method.contract}; {arithmetic}"
        ]

    def _words(
        self,
        place: Origin,
        of: Place,
        own: Matrix,
        turned: bool,
        shapes: Mapping[str, tuple[int, ...]],
        others: Mapping[int, Mapping[Place, list[Matrix]]],
    ) -> list[int]:
        return self._mix((*place, int(turned)), of, shapes, others).words()

    def _mix(
        self,
        place: tuple[int, int, int, int, int, int],
        of: Place,
        shapes: Mapping[str, tuple[int, ...]],
        others: Mapping[int, Mapping[Place, list[Matrix]]],
    ) -> Mix:
        """Returns the merge of a piece of a tensor."""
        how, method, (template, layer, expert) = self.how, self.how.method, of
        name, shape = template.format(layer=layer, expert=expert), shapes[template]
        rows, columns = (1, *shape) if len(shape) < 2 else (shape[0], math.prod(shape[1:]))
        layers = int(self.inputs[self.base].dims["num_layers"])
        inside = template.startswith("layers.{layer}")
        depth = 0.0 if not inside else layer / (layers - 1) if layers > 1 else 1.0
        own = ({"weight": 1.0}, *how.each) if how.has_base else how.each
        shares = tuple(
            Share._make([*(how.value(n, depth, one) for n in EACH), int(how.has_base and i == 0)])
            for i, one in enumerate(own)
        )
        parts = tuple(self._parts(of, rows * columns, others))
        normalize = how.value("normalize", depth)
        if how.name == "linear" and normalize and not math.fsum(x.weight for x in shares):
            raise UsageError(f"{name}: normalize: the sum of the weights is 0")
        rounded = 0
        if how.arithmetic == "mergekit":
            kinds = {part.part.dtype for part in parts}
            if len(kinds) > 1:
                listed = ", ".join(FACTORS[k] for k in sorted(kinds))
                raise UsageError(
                    f"{name}: --arithmetic mergekit: the checkpoints have {listed}; give those of"
                    " one dtype"
                )
            rounded = 1 + kinds.pop()
            if how.dtype not in (None, kind := FACTORS[rounded - 1]):
                raise UsageError(
                    f"{name}: --arithmetic mergekit: the checkpoints have {kind}, and the recipe"
                    f" casts them to {how.dtype} first; leave dtype out, or --arithmetic"
                )
        key = hashlib.blake2b(name.encode(), digest_size=8).digest()
        return Mix(
            *place,
            rows,
            columns,
            int.from_bytes(key, "little", signed=True),
            self.base,
            mixing.NAMES.index(method.formula),
            method.kept,
            int(method.elects),
            int(normalize),
            int(how.value("rescale", depth)),
            rounded,
            int(how.value("seed", depth)),
            how.value("lambda", depth),
            how.value("t", depth),
            shares,
            parts,
        )

    def _parts(
        self, of: Place, count: int, others: Mapping[int, Mapping[Place, list[Matrix]]]
    ) -> Iterator[Part]:
        """Yields the parts of a tensor of all inputs."""
        for number in range(len(self.inputs)):
            covered = 0
            for one in others[number].get(of, ()):
                self._refuse_computed(one.of, self.inputs[number])
                covered += math.prod(one.box.shape)
                yield Part(one.factor, number, -one.offset, *one.box.offset, *one.box.shape)
            assert covered == count, (of, number, covered)
