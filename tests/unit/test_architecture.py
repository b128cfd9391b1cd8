"""The structure of the code.

Imports point in one direction, converting imports nothing heavy, and no Python names a model.
"""

from __future__ import annotations

import ast
import functools
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.commands import python
from tests.helpers.tiny import TinyModel

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "mckpt"
MODULES = {
    ".".join(p.relative_to(ROOT).with_suffix("").parts)
    .removeprefix("mckpt.")
    .removesuffix(".__init__"): p
    for p in sorted(PACKAGE.rglob("*.py"))
}
HEAVY = ("torch", "transformers", "megatron", "safetensors", "transformer_engine", "accelerate")
HEAVY += ("huggingface_hub", "obstore", "boto3")


def words(table: dict[str, str]) -> dict[str, set[str]]:
    return {name: set(text.split()) for name, text in table.items()}


CORE = "errors geometry mapping options progress storage values version"
UPPER = f"{CORE} checkpoint conversion formats launching pages"
# What the modules of a package, or a module outside of all packages, may import of mckpt. Arrows
# point down only.
MAY = words(
    {
        "version": "",
        "errors": "",
        "progress": "errors",
        "storage": "errors version",
        "values": "errors",
        "geometry": "errors values",
        "containers": "errors geometry storage values",
        "mapping": "errors geometry values version",
        "options": "errors geometry mapping values",
        "keywords": "geometry options progress",
        "formats": f"{CORE} containers",
        "checkpoint": f"{CORE} formats",
        "adapters": f"{CORE} checkpoint containers conversion formats",
        "editing": f"{CORE} checkpoint formats",
        "execute": "errors geometry progress storage values version",
        "conversion": f"{CORE} checkpoint containers execute formats keywords",
        "checking": f"{CORE} checkpoint containers execute formats",
        "api": f"{CORE} adapters checking checkpoint conversion editing execute formats keywords",
        "pages": f"{CORE} checkpoint conversion formats",
        "launching": "errors execute",
        "verification": f"{UPPER} adapters editing keywords",
        "cli": f"{UPPER} adapters api checking editing execute verification",
        "trainer": "errors execute formats geometry options",
        "live": f"{CORE} adapters api checkpoint containers conversion execute formats",
    }
)
# The packages that they must not import, not even through other modules.
FAR = words(
    {
        "geometry": "api checkpoint containers execute formats mapping",
        "execute": "api checkpoint containers conversion formats mapping",
        "formats": "api checkpoint cli conversion execute",
        "mapping": "api checkpoint execute formats",
    }
)


@functools.cache
def tree(module: str) -> ast.Module:
    return ast.parse(MODULES[module].read_text(encoding="utf-8"))


def folder(module: str) -> str:
    """Returns the package of a module, or the module itself if it belongs to no package."""
    return module.split(".")[0]


def statements(
    node: ast.AST, top: bool = False, types: bool = False
) -> Iterator[ast.Import | ast.ImportFrom]:
    """Returns the import statements below a node.

    top: only those that run when the module is imported. types: those for type checkers too.
    """
    for child in ast.iter_child_nodes(node):
        if not types and isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test):
            continue
        if top and isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            continue
        if isinstance(child, (ast.Import, ast.ImportFrom)):
            yield child
        yield from statements(child, top, types)


def imported(module: str, **which: bool) -> set[str]:
    """Returns the full dotted names of everything that a module imports; `statements` explains the
    arguments.
    """
    out = set()
    for node in statements(tree(module), **which):
        if isinstance(node, ast.Import):
            out |= {a.name for a in node.names}
        else:
            assert node.level == 0, f"{module}: a relative import"
            out |= {f"{node.module}.{a.name}" for a in node.names}
    return out


@functools.cache
def ours(module: str) -> set[str]:
    """Returns the modules of mckpt that a module imports, at any depth of its code and for type
    checkers too.
    """
    out = set()
    for name in imported(module, types=True):
        if name.split(".")[0] == "mckpt":
            rest = name.removeprefix("mckpt").lstrip(".")
            out.add(
                next(
                    (m for m in (rest, rest.rpartition(".")[0]) if m in MODULES and m != "mckpt"),
                    "mckpt",
                )
            )
    return out - {"lazy"}  # numpy, imported on first use


@functools.cache
def reach(module: str) -> set[str]:
    """Returns everything that a module imports, also through other modules."""
    out: set[str] = set()
    todo = [module]
    while todo:
        for m in ours(todo.pop()) - out:
            out.add(m)
            todo.append(m)
    return out


@pytest.mark.parametrize("module", [m for m in MODULES if folder(m) in MAY])
def test_modules_import_only_the_packages_that_they_may(module: str) -> None:
    assert {folder(m) for m in ours(module)} <= MAY[folder(module)] | {folder(module)}


@pytest.mark.parametrize("module", [m for m in MODULES if folder(m) in FAR])
def test_modules_do_not_reach_forbidden_packages_through_others(module: str) -> None:
    assert not {folder(m) for m in reach(module)} & FAR[folder(module)]


def test_imports_form_no_cycle() -> None:
    assert [m for m in MODULES if m in reach(m)] == []


def test_names_of_optimizer_state_come_from_its_door() -> None:
    """Other modules import names from the package, or whole modules of it."""
    package = "formats.megatron.optimizer"
    parts = {f"mckpt.{m}" for m in MODULES if m.startswith(f"{package}.")}
    assert parts
    for module in MODULES:
        names = imported(module, types=True)
        if not module.startswith(package):
            assert not {n for n in names if n.rpartition(".")[0] in parts}, module


def test_every_package_has_an_import_rule() -> None:
    assert {folder(m) for m in MODULES} - {"__init__", "__main__", "lazy"} == set(MAY)


def test_nothing_imports_the_trainer() -> None:
    """Only the commands that run the trainer import it, and only when they run it."""
    for module in MODULES:
        if not module.startswith("trainer"):
            assert not any("trainer" in name for name in imported(module, top=True)), module
            if folder(module) not in ("cli", "verification"):
                assert not any(name.startswith("mckpt.trainer") for name in imported(module)), (
                    module
                )


def test_nothing_imports_live() -> None:
    """Only programs of users do, which have a model of Megatron-Core."""
    for module in MODULES:
        if not module.startswith("live"):
            assert not any(name.startswith("mckpt.live") for name in imported(module)), module


@pytest.mark.parametrize(
    "module", [m for m in MODULES if folder(m) in ("geometry", "values")] + ["mapping.expression"]
)
def test_the_core_touches_no_files(module: str) -> None:
    found = {name.split(".")[0] for name in imported(module)}
    assert not found & {"os", "io", "pathlib", "mmap", "shutil", "tempfile", "subprocess", "yaml"}
    calls = {
        n.func.id
        for n in ast.walk(tree(module))
        if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)
    }
    assert not calls & {"open", "print", "input", "eval", "exec", "compile", "__import__"}


def test_only_listed_modules_use_threads_and_none_prints() -> None:
    for module in MODULES:
        if module.split(".")[0] == "trainer":
            continue
        calls = {
            n.func.id
            for n in ast.walk(tree(module))
            if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)
        }
        assert not calls & {"print", "eval", "exec", "compile", "__import__"}, module
        roots = {name.split(".")[0] for name in imported(module)}
        threaded = (
            "checking",
            "cli.terminal",
            "checkpoint.comparison",
            "conversion.optimizer",
            "conversion.store_journal",
            "conversion.to_store",
            "editing.vocabulary",
            "execute.engine",
            "execute.files",
            "execute.measuring",
            "execute.ranks",
            "execute.threads",
            "live.devices",  # memory of each thread
            "live.pieces",
            "live.saving",
            "storage.sparse_copy",
            "values.shared",  # locks, and memory of each thread
            "verification.levels",
            "verification.report",
            "verification.verdict",
        )
        assert module in threaded or not roots & {"threading", "concurrent"}, module
        assert module == "execute.threads" or "multiprocessing" not in roots, module
        assert folder(module) == "cli" or not roots & {"click", "rich"}, module


def test_no_pickle_is_loaded_by_pickle() -> None:
    """Only `safe_pickle` unpickles, with inert classes."""
    for module in MODULES:
        roots = {name.split(".")[0] for name in imported(module)}
        assert module.startswith("containers.safe_pickle.") or not roots & {
            "pickle",
            "_pickle",
            "marshal",
            "shelve",
            "dill",
            "cloudpickle",
        }, module


def test_nothing_heavy_is_imported_by_a_module() -> None:
    """No module outside the trainer imports a heavy package at its top. `LogicalTensor.torch()`
    imports torch when it is called.
    """
    for module in MODULES:
        if module.split(".")[0] != "trainer":
            assert not {name.split(".")[0] for name in imported(module, top=True)} & set(HEAVY), (
                module
            )


# ---------------------------------------------------------------------------------- models are data


# first words of family files that code uses as words, or that are parts of words
ORDINARY = ("seed", "gpt", "dots", "hy", "mamba", "megatron", "aria", "got")
FAMILIES = sorted(
    {
        path.stem.replace("_", "_?") if word in ORDINARY or len(word) < 3 else word
        for path in (ROOT / "mappings" / "hf").glob("*.yaml")
        for word in re.split("[^a-z]", path.stem)[:1]
    }
)
FAMILY = re.compile("|".join(FAMILIES), re.IGNORECASE)


def spoken(module: ast.Module) -> set[int]:
    """Returns the strings that only people read: docstrings, error messages and the help of
    options.
    """
    out = set()
    for node in ast.walk(module):
        parts: list[ast.AST] = []
        if (
            isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef))
            and ast.get_docstring(node, clean=False) is not None
        ):
            parts = [node.body[0]]
        elif isinstance(node, ast.Raise) or (
            isinstance(node, ast.keyword) and node.arg in ("help", "metavar", "epilog")
        ):
            parts = [node]
        out |= {id(n) for part in parts for n in ast.walk(part)}
    return out


def model_names(module: ast.Module) -> list[str]:
    """Returns the names of model families in strings that the code computes with."""
    quiet = spoken(module)
    found = []
    for node in ast.walk(module):
        texts = [
            v
            for f in ("value", "id", "attr", "name", "arg", "module")
            if isinstance(v := getattr(node, f, None), str)
        ]
        if id(node) not in quiet:
            found += [
                f"line {getattr(node, 'lineno', '?')}: {t}" for t in texts if FAMILY.search(t)
            ]
    return found


def test_no_model_is_named_in_code() -> None:
    wrong = {m: names for m in MODULES if (names := model_names(tree(m)))}
    assert not wrong


# ------------------------------------------------------------------------ imports that are paid for


def test_import_mckpt_imports_little() -> None:
    loaded = set(
        python("import sys, mckpt; print(*{name.split('.')[0] for name in sys.modules})").split()
    )
    assert not loaded & {*HEAVY, "numpy", "yaml", "click", "rich"}
    assert "mckpt" in loaded


COMMANDS = """
import json, os, sys
sys.stdout = open(os.devnull, "w")
import mckpt.cli
heavy = {heavy!r}
for line in json.loads(sys.argv[1]):
    sys.argv = ["mckpt", *line]
    try:
        mckpt.cli.main()
        code = 0
    except SystemExit as e:
        code = e.code or 0
    assert code == 0, (line, code)
    found = sorted({{n.split(".")[0] for n in sys.modules}} & set(heavy))
    assert not found, f"{{line}} imports {{found}}"
"""


def test_conversions_import_nothing_heavy(tiny_model: TinyModel, tmp_path: Path) -> None:
    """Runs every command that moves or reads tensors, in one process that never imported torch."""
    source = str(tiny_model("qwen3-moe"))
    a, b, c, back = (str(tmp_path / x) for x in ("a", "b", "c", "back"))
    lines = [
        ["inspect", source],
        ["plan", source, a, "--tp", "2"],
        ["hf-to-megatron", source, a, "--tp", "2", "--pp", "2", "--ep", "2", "--format", "torch"],
        ["inspect", a, "--json"],
        ["reshard", a, b, "--target-tp", "4", "--target-format", "torch_dist"],
        ["hf-to-megatron", source, c, "--common-state", "object", "--checksum", "sha256"],
        ["megatron-to-hf", b, back, "--check-replicas"],
        ["megatron-to-hf", c, back + "16", "--dtype", "fp16"],
        ["diff", source, back],
        ["diff", a, b, "--atol", "0"],
        ["inspect", b, "--megatron-args"],
        ["mappings", "list"],
        ["doctor"],
        ["mappings", "show", "llama"],
    ]
    python(COMMANDS.format(heavy=HEAVY), json.dumps(lines))


def test_the_api_imports_nothing_heavy(tiny_model: TinyModel, tmp_path: Path) -> None:
    source = str(tiny_model("llama"))
    python(
        f"""
        import sys, mckpt
        tp2 = mckpt.Parallel(tp=2)
        mckpt.convert(sys.argv[1], sys.argv[2] + "/a", format="torch", parallel=tp2)
        mckpt.plan(sys.argv[2] + "/a", sys.argv[2] + "/b", format="hf").run()
        assert not mckpt.diff(sys.argv[1], sys.argv[2] + "/b")
        assert mckpt.open(sys.argv[2] + "/a")["layers.3.attn.q.weight"][:8].numpy().shape == (8, 64)
        assert not {{n.split(".")[0] for n in sys.modules}} & set({HEAVY!r})
        """,
        source,
        str(tmp_path),
    )
