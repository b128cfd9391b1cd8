"""run_config.yaml, which Megatron-Bridge writes beside a checkpoint instead of args.

    model:       the fields of its model provider: the model, and the parallel sizes
    checkpoint:  save_optim, save_rng: whether the checkpoint has these states
(Megatron-Bridge, training/model_load_save.py: load_model_config; training/checkpointing.py)

A checkpoint of NeMo 2.0 has context/model.yaml beside its directory `weights`, whose section
`config` is read in the same way (NeMo, lightning/io/mixin.py: io_dump). One of NeMo 1 has
model_config.yaml beside its weights, without sections (models/language_modeling/
megatron_base_model.py: build_transformer_config).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from mckpt import mapping
from mckpt.errors import MappingError, SourceError, UsageError
from mckpt.formats.megatron.save_directory import CONTEXT, NEMO_CONFIG, NEMO_WEIGHTS, WEIGHTS
from mckpt.geometry.parallel import Parallel
from mckpt.mapping import Dims, MappingFile
from mckpt.storage.files import read_file

RUN_CONFIG = "run_config.yaml"
NEMO_MODEL = "model.yaml"
# file -> the `trainer` of the mapping file that reads it, and the section with the model
_NEMO = {NEMO_MODEL: ("NeMo", "config"), NEMO_CONFIG: ("NeMo 1", None)}
TRAIN_STATE = "train_state.pt"  # counters of the training run; Megatron-Bridge loads without it
_MAX_BYTES = 1 << 24
# the args of parallel sizes that have another name here
_SIZES = {
    "decoder_first_pipeline_num_layers": "num_layers_in_first_pipeline_stage",
    "decoder_last_pipeline_num_layers": "num_layers_in_last_pipeline_stage",
}
_CHECKPOINT = {
    "_target_": "megatron.bridge.training.config.CheckpointConfig",
    "ckpt_format": "torch_dist",
    "fully_parallel_save": True,
}


def run_config_dims(
    path: Path,
    file: MappingFile,
    known: Mapping[str, Any],
    given: Mapping[str, Any],
    family: MappingFile | None = None,
) -> Dims:
    """Returns the dims that a run_config.yaml states.

    known: dims from elsewhere; raises MappingError if the file contradicts one. given: dims that
    replace those of the file. family: that of the model.
    """
    # the model does not depend on these, so a run may have chosen others
    specs = file.dims, family.dims if family else {}
    free = {n: v for n, v in known.items() if any(n in dims and dims[n].free for dims in specs)}
    model, true = read_model(path), known.get("vocab_size")
    if true is not None and model.get("should_pad_vocab") is False:
        # its vocab_size may be the number of rows with padding, as an optimizer's state needs them
        rows = model.get("vocab_size")
        free |= {"vocab_size": true} if isinstance(rows, int) and true <= rows else {}
    return file.read(model, known, str(path), {**free, **given})


def run_config_text(path: Path) -> str:
    """Returns the text of a run_config.yaml; empty without the file."""
    return read_file(path, _MAX_BYTES).decode("utf-8", "replace") if path.is_file() else ""


def description_of(root: Path) -> Path | None:
    """Returns the file that describes the model of a checkpoint without args; None if it has none.

    root: the directory of the tensors.
    """
    found = [root / RUN_CONFIG, root / NEMO_CONFIG]
    if root.name == WEIGHTS:
        found.append(root.parent / CONTEXT / NEMO_MODEL)
    if root.name == NEMO_WEIGHTS:
        found.append(root.parent / NEMO_CONFIG)
    return next((path for path in found if path.is_file()), None)


def optimizer_name(root: Path) -> Any:
    """Returns the name of the optimizer that the description of a checkpoint states, such as adam;
    None if it states none.
    """
    path = description_of(root)
    if path is None or path.name not in (RUN_CONFIG, NEMO_MODEL):
        return None
    section = read_section(path, "optimizer" if path.name == RUN_CONFIG else "optim")
    if path.name == NEMO_MODEL and isinstance(section, dict):
        section = section.get("config")
    return section.get("optimizer") if isinstance(section, dict) else None


def mapping_file(dialect: MappingFile, path: Path = Path(RUN_CONFIG)) -> MappingFile | None:
    """Returns the mapping file that reads the description of checkpoints of this dialect, and
    writes the section `model` of a run_config.yaml; None if there is none.

    path: the file with the description, as `description_of` returns it.
    """
    trainer, _ = _NEMO.get(path.name, (dialect.trainer, None))
    files = (mapping.load("run_config", name) for name in mapping.names("run_config"))
    file = next((file for file in files if file.trainer == trainer), None)
    return mapping.of_whole_model(file) if file and dialect.whole else file


def model_section(
    file: MappingFile, dims: Dims, given: Mapping[str, Any], parallel: Parallel
) -> dict[str, Any]:
    """Returns the section `model` for these dims. `given` has values for the names under the
    mapping file's `given`.

    Raises MappingError if no model provider of Megatron-Bridge has such a model.
    """
    optional = {
        key for n, dim in file.dims.items() if mapping.schema().dims[n].optional for key in dim.keys
    }
    section: dict[str, Any] = {}
    for key, value in file.write(dims, given).items():
        if isinstance(value, dict):
            value = {k: v for k, v in value.items() if v is not None} or None
        if value is not None or key in optional:  # else the provider's default is meant
            section[key] = value
    section |= sizes(parallel)
    again = file.read(section, source=RUN_CONFIG)
    if lost := [name for name in again if not mapping.equal(dims[name], again[name])]:
        raise MappingError.of(
            f"no model provider of {file.trainer} would compute what the source does:",
            (f"{name} is {dims[name]}, and it would be {again[name]}" for name in lost),
        )
    return section


def sizes(parallel: Parallel) -> dict[str, Any]:
    """Returns the parallel sizes as entries of the section `model`."""
    return {_SIZES.get(name, name): value for name, value in parallel.args().items()}


def parallel_of(path: Path) -> Parallel:
    """Returns the parallel sizes that the section `model` states. Raises SourceError if they are
    wrong.
    """
    model = read_model(path)
    named = {name: model.get(other) for name, other in _SIZES.items()}
    try:
        return Parallel.of_args({**model, **named})
    except (UsageError, TypeError, AttributeError) as e:  # a value of another kind
        raise SourceError(f"{path}: its parallel sizes are wrong: {e}") from None


def new(model: Mapping[str, Any], states: Mapping[str, bool]) -> bytes:
    """Returns a run_config.yaml.

    states: save_optim and save_rng, whether the checkpoint has these states.
    """
    import yaml

    sections = {"checkpoint": {**_CHECKPOINT, **states}, "model": dict(model), "tokenizer": None}
    return yaml.safe_dump(sections, allow_unicode=True).encode()


def restated(path: Path, model: Mapping[str, Any], states: Mapping[str, bool]) -> bytes:
    """Returns the content of a run_config.yaml with other values for these entries of its sections
    `model` and `checkpoint`. All others stay as they are, tags of Python objects too.
    """
    import yaml

    root = _parsed(path, yaml.compose, yaml.SafeLoader)
    entries = {"model": model, "checkpoint": states}
    for key, section in root.value if isinstance(root, yaml.MappingNode) else ():
        changed = entries.get(key.value)
        if changed and isinstance(section, yaml.MappingNode):
            kept = [pair for pair in section.value if pair[0].value not in changed]
            section.value = sorted(kept + _entries(changed), key=lambda pair: str(pair[0].value))
    return yaml.serialize(root, allow_unicode=True).encode()


def _entries(values: Mapping[str, Any]) -> list[Any]:
    """Returns the nodes of keys and values, as a YAML mapping has them."""
    import yaml

    node = yaml.compose(yaml.safe_dump(dict(values)), yaml.SafeLoader)
    assert isinstance(node, yaml.MappingNode)
    return node.value


def _parsed(path: Path, parse: Callable[[bytes, Any], Any], loader: Any) -> Any:
    """Returns what a function of PyYAML makes of a file; SourceError if it is not valid."""
    import yaml

    try:
        return parse(read_file(path, _MAX_BYTES), loader)
    # ValueError: a date or a number that does not exist
    except (yaml.YAMLError, ValueError, RecursionError) as e:
        raise SourceError(f"{path}: not valid YAML: {e}") from None


def read_model(path: Path) -> dict[str, Any]:
    """Returns the section `model` of a run_config.yaml, `config` of NeMo's model.yaml, or the whole
    of its model_config.yaml; its tags of Python objects are read as plain values.
    """
    _, section = _NEMO.get(path.name, ("", "model"))
    model = read_section(path, section)
    if not isinstance(model, dict):
        raise SourceError(f"{path}: has no {f'section `{section}`' if section else 'entries'}")
    return model


def read_section(path: Path, name: str | None) -> Any:
    """Returns a section of a run_config.yaml, as `read_model`, or with None all of them; None if it
    has no such section.
    """
    import yaml

    class Loader(yaml.SafeLoader):
        pass

    def plain(loader: yaml.SafeLoader, suffix: str, node: yaml.Node) -> Any:
        if isinstance(node, yaml.MappingNode):
            return loader.construct_mapping(node, deep=True)
        return (
            loader.construct_sequence(node, deep=True)
            if isinstance(node, yaml.SequenceNode)
            else getattr(node, "value", None)
        )

    Loader.add_multi_constructor("", plain)
    found = _parsed(path, yaml.load, Loader)  # a SafeLoader: nothing is imported
    if name is None:
        return found
    return found.get(name) if isinstance(found, dict) else None
