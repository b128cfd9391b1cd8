"""Every class that transformers has for causal language models has a family, or a reason."""

from __future__ import annotations

import ast
import re
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from mckpt import mapping

# all of these classes, in the release that the first line names
LISTED = Path(__file__).parents[2] / "fixtures" / "causal_lm_classes.txt"


def installed() -> set[str]:
    """Returns the classes of the installed transformers, from the text of its source."""
    spec = find_spec("transformers")
    assert spec and spec.origin
    path = Path(spec.origin).parent / "models" / "auto" / "modeling_auto.py"
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
            names = {target.id for target in node.targets if isinstance(target, ast.Name)}
            if "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES" in names:
                pairs = ast.literal_eval(node.value.args[0])
                return {
                    c for _, found in pairs for c in ([found] if isinstance(found, str) else found)
                }
    raise AssertionError(f"{path} has no list of classes for causal language models")


def test_the_list_is_that_of_its_release() -> None:
    head, *listed = LISTED.read_text().splitlines()
    assert listed == sorted(set(listed)) and len(listed) > 180
    if f"transformers {version('transformers')}." in head:
        assert installed() == set(listed)


def test_every_class_has_a_family_or_a_reason() -> None:
    families = {a for name in mapping.names("hf") for a in mapping.load("hf", name).architectures}
    every = {*LISTED.read_text().splitlines()[1:], *installed()}
    assert sorted(every - families - mapping.refused().keys()) == []


def test_every_reason_is_a_line_that_names_what_megatron_lacks() -> None:
    for architecture, reason in mapping.refused().items():
        assert re.fullmatch(r"[^\n]{20,300}\.", reason), architecture
        assert "megatron-core" in reason.lower(), architecture
