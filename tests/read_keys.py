"""Makes mappings/read_keys.yaml, the names that the classes of transformers may read from a config,
from the source of the installed transformers:

python -m tests.read_keys

A name counts as read if the source has it as an attribute, a text, a parameter, a field or a
method. That is more than the source really reads, so only a name that is computed can be missed.
Computed texts become patterns, such as `*_token_id`.
"""

from __future__ import annotations

import ast
import re
import textwrap
from collections import Counter
from collections.abc import Iterator
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from mckpt import mapping
from mckpt.mapping.heads import language_models
from mckpt.mapping.inert import KEY
from mckpt.mapping.nodes import FOLDER

TABLE = FOLDER / "read_keys.yaml"
HEAD = """# The names that the classes of families may read from a config.json, in transformers.
# A key that is not here is inert. `python -m tests.read_keys` writes this file from the source.
#
# `shared` has the names of the modules of all models, and of a quarter of the classes. A name with
# an asterisk stands for all that match it. `types` are values of model_type.
"""
# what a model imports and runs, beside the files of its own folder
SHARED = (
    "configuration_utils.py",
    "modeling_*.py",
    *(f"{name}.py" for name in ("masking_utils", "activations", "cache_utils", "initialization")),
    *(f"{name}.py" for name in ("core_model_loading", "conversion_mapping", "fusion_mapping")),
    *(f"{name}.py" for name in ("pytorch_utils", "vision_utils", "backbone_utils")),
    *("monkey_patching.py", "models/auto/auto_factory.py", "models/auto/configuration_auto.py"),
    *(f"utils/{name}.py" for name in ("generic", "hub", "output_capturing", "quantization_config")),
    *("integrations/**/*.py", "loss/*.py", "generation/**/*.py", "quantizers/*.py"),
    "distributed/*.py",
)
# lists of imports, callbacks of the trainer, its DeepSpeed, tokenizers, exports, files of GGUF, and
# batches of requests: no model computes logits of a config.json with them
NOT_OF_A_MODEL = re.compile(
    r".*/__init__\.py|modeling_gguf_\w+\.py|generation/(streamers|watermarking)\.py"
    r"|generation/continuous_batching/.*"
    r"|integrations/((integration_utils|deepspeed|tiktoken|executorch|tpu)\.py|(mistral|gguf)/.*)"
)
# modules that a model imports for types, documentation and messages
NO_CONFIG = {"processing_utils", "utils", "image_processing_utils", "video_utils", "image_utils"}
# computed names: get_text_config makes decoder_layers the layers of the decoder
PATTERNS = {"decoder*", "encoder*"}
# texts that the code computes and that are not names of keys: groups of regular expressions, names
# of classes, tensors, requests and devices, and the sizes of a DistributedConfig
NO_KEYS = re.compile(
    r"\**|\*_|g\*|\*b|\*(cpu|cuda)|(class|def|linux|transformers|send|req_)\*|is_\*_available|\*_size"
    r"|\*_(blocks|scales?|scale_inv|enc|precision_config|attention_scaling|max_seq_len_cached)"
    r"|\*(weight|scales|scale_inv|qbiases|activation_scale|position_ids|learnable_sil_emb|.*inv_freq)"
    r"|\*max_seq_len_cached"
)
COMPUTED = re.compile(r"[a-z*][a-z0-9_*]*")
_WRAP = {"break_long_words": False, "break_on_hyphens": False}
_OF_ALL = 4  # a name that one in so many models has is in `shared`


def table() -> str:
    """Returns the text of mappings/read_keys.yaml."""
    root = source_of_transformers()
    listed = {a for n in mapping.names("hf") for a in mapping.load("hf", n).architectures}
    models = dict[str, tuple[set[str], list[str], set[str]]]()
    for path in sorted(root.glob("models/*/modeling_*.py")):
        classes = re.findall(r"^class (\w+)", path.read_text(), re.MULTILINE)
        known = [c for c in classes if not listed.isdisjoint((c, *language_models(c)))]
        if not listed.isdisjoint(known):
            assert path.parent.name not in models
            files = sources(root, path.parent)
            names = set[str]().union(*map(names_in, files))
            models[path.parent.name] = (types_in(files), known, names)
    shared = names_of_a_config().union(*map(names_in, shared_sources(root)), PATTERNS)
    counts = Counter(name for *_, names in models.values() for name in names)
    shared |= {name for name, count in counts.items() if count * _OF_ALL >= len(models)}
    shared = unmatched(shared, shared)
    parts = [HEAD, f"transformers: {version('transformers')}\n", _folded("shared", shared)]
    parts.append("models:\n")
    for model, (types, known, names) in models.items():
        own = unmatched(names - shared, shared)
        parts.append(f"  {model}:\n{_folded('types', types, 4)}{_folded('classes', known, 4)}")
        parts.append(_folded("names", own, 4))
    return "".join(parts)


def unmatched(names: set[str], shared: set[str]) -> set[str]:
    """Returns the names that no pattern in `shared` stands for."""
    patterns = [re.escape(name).replace(r"\*", ".*") for name in shared if "*" in name]
    matched = re.compile("|".join(patterns)).fullmatch
    return {name for name in names if "*" in name or not matched(name)}


def _folded(key: str, names: set[str] | list[str], indent: int = 0) -> str:
    inner = " " * (indent + 2)
    words = " ".join(sorted(names))
    text = textwrap.fill(words, 100, initial_indent=inner, subsequent_indent=inner, **_WRAP)
    return f"{' ' * indent}{key}: >-\n{text}\n"


def source_of_transformers() -> Path:
    found = find_spec("transformers")
    assert found and found.origin
    return Path(found.origin).parent


def shared_sources(root: Path) -> list[Path]:
    """Returns the files that all models may run."""
    found = {path for pattern in SHARED for path in root.glob(pattern)}
    return sorted(p for p in found if not NOT_OF_A_MODEL.fullmatch(p.relative_to(root).as_posix()))


def sources(root: Path, folder: Path) -> set[Path]:
    """Returns the files of the config and the model in a folder, and those of other models that
    they import.

    Raises AssertionError if they import a module that no list of this file has.
    """
    left = [p for p in folder.glob("*.py") if p.name.startswith(("modeling_", "configuration_"))]
    found, shared = set(left), set(shared_sources(root))
    while left:
        path = left.pop()
        for module in imported(path, root):
            if root / "models" in module.parents and "auto" not in module.parts:
                if module.suffix and module not in found:
                    found.add(module)
                    left.append(module)
            elif "auto" not in module.parts:
                top = module.relative_to(root).parts
                inside = module.with_suffix("").is_dir() and top[0] in {
                    "integrations",
                    "generation",
                }
                assert module in shared or inside or top[0].removesuffix(".py") in NO_CONFIG, module
    return found


def imported(path: Path, root: Path) -> Iterator[Path]:
    """Yields the modules of transformers that a file imports."""
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.ImportFrom):
            continue
        named = node.module or ""
        if not node.level and named.partition(".")[0] != "transformers":
            continue
        base = path.parents[node.level - 1] if node.level else root.parent
        names = [named.replace(".", "/")] if named else [a.name for a in node.names]
        for module in (base / name for name in names):
            yield module if module.is_dir() else module.with_suffix(".py")


def types_in(files: set[Path]) -> set[str]:
    """Returns the values of model_type of the config classes in some files."""
    pattern = re.compile(r'^    model_type = "([^"]+)"', re.MULTILINE)
    return {name for path in files for name in pattern.findall(path.read_text())}


def names_of_a_config() -> set[str]:
    """Returns the names that every config of transformers has, also from the classes of other
    packages.
    """
    from transformers import PretrainedConfig

    return set(filter(KEY.fullmatch, dir(PretrainedConfig())))


def names_in(path: Path) -> set[str]:
    """Returns the names that the code of a file may read from a config, and the patterns of those
    that it computes.

    Names are left out that can be of no config: attributes of imported modules, and those of the
    `self` of a class that is neither a config nor a mixin.
    """
    tree = ast.parse(path.read_text())
    nodes = list(ast.walk(tree))
    skipped = set[int]()
    modules = {a.asname or a.name for n in nodes if isinstance(n, ast.Import) for a in n.names}
    bound = {n.arg for n in nodes if isinstance(n, ast.arg)}
    bound |= {n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    for node in nodes:
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            skipped.add(id(node.value))  # a docstring
        elif isinstance(node, ast.Assign) and _is_named(node.targets[0], "__all__"):
            skipped.update(map(id, ast.walk(node)))
        elif isinstance(node, ast.ClassDef) and not re.search("Config|Mixin", node.name):
            skipped.update(
                id(n)
                for n in ast.walk(node)
                if isinstance(n, ast.Attribute) and _is_named(n.value, "self")
            )
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            skipped |= {id(node)} if node.value.id in modules - bound else set()
    found = {name for node in nodes if id(node) not in skipped for name in _names(node)}
    plain = {name for name in found if "*" not in name and KEY.fullmatch(name)}
    patterns = {n for n in found if "*" in n and COMPUTED.fullmatch(n) and not NO_KEYS.fullmatch(n)}
    return plain | patterns


def _names(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Attribute):
        yield node.attr
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value.replace("*", " ")  # with a space, so that it is not taken for a pattern
    elif isinstance(node, (ast.arg, ast.keyword)):
        yield node.arg or ""
    elif isinstance(node, ast.ClassDef):
        for line in node.body:
            if isinstance(line, ast.AnnAssign):
                yield ast.unparse(line.target)
            elif isinstance(line, ast.Assign):
                yield from map(ast.unparse, line.targets)
            elif isinstance(line, ast.FunctionDef):
                yield line.name
    elif isinstance(node, ast.JoinedStr):
        yield "".join(v.value if isinstance(v, ast.Constant) else "*" for v in node.values)
    elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        texts = [_text(side) for side in (node.left, node.right)]
        if texts != ["", ""]:
            yield "".join(text or "*" for text in texts)
    elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod):
        yield re.sub("%[a-z]", "*", _text(node.left))
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        yield from _computed(node.func, [_text(n) for a in node.args for n in ast.walk(a)])


def _computed(called: ast.Attribute, texts: list[str]) -> Iterator[str]:
    if called.attr in ("startswith", "removeprefix"):
        yield from (f"{text}*" for text in texts if text)
    elif called.attr in ("endswith", "removesuffix"):
        yield from (f"*{text}" for text in texts if text)
    elif called.attr == "format":
        yield re.sub(r"\{.*?\}", "*", _text(called.value))


def _is_named(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name


def _text(node: ast.AST) -> str:
    """Returns the text that a node is, "" for every other node."""
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


if __name__ == "__main__":
    TABLE.write_text(table())
