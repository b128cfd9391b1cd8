"""run_config.yaml, which Megatron-Bridge writes beside a checkpoint instead of args."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mckpt import mapping
from mckpt.errors import SourceError
from mckpt.mapping import Dims
from mckpt.storage.files import read_file

RUN_CONFIG = "run_config.yaml"


def run_config_dims(path: Path, known: Mapping[str, Any], said: Mapping[str, Any]) -> Dims:
    """Returns the dims that a run_config.yaml says.

    known: dims from elsewhere; MappingError if the file denies one. said: dims that win over it.
    """
    config = _model(path)
    return mapping.load("run_config", "bridge").read(config, known, str(path), said)


def _model(path: Path) -> dict[str, Any]:
    """The model section of a run_config.yaml; its tags of Python objects are read as
    plain values.
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
    try:
        found = yaml.load(read_file(path, 1 << 24), Loader)  # a SafeLoader: nothing is imported
    except yaml.YAMLError as e:
        raise SourceError(f"{path}: not valid YAML: {e}") from None
    model = found.get("model") if isinstance(found, dict) else None
    if not isinstance(model, dict):
        raise SourceError(f"{path}: has no `model` section")
    return model
