"""The order of the test files, and the checkpoints that several of them read."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import hypothesis
import pytest

from mckpt import errors
from tests.helpers import made_models, tiny, verifying
from tests.helpers.commands import good
from tests.helpers.tiny import TinyModel

# The models are tiny, and two processes share the cores: threads of torch only wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# The tests start thousands of processes, which would otherwise compile all of mckpt each time.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# Most tests read errors as the command line words them, also those of the Python API.
errors.show_options(True)

# hypothesis gives an example 200 ms by default, which a busy machine exceeds
hypothesis.settings.register_profile("without a deadline", deadline=None)
hypothesis.settings.load_profile("without a deadline")


# The longest files come first, so that both processes end at the same time. The tests of the first
# one mostly wait.
LONG = [
    *("test_ranks.py", "test_stock.py", "test_optimizer.py", "test_verify.py"),
    *("test_family_models.py", "test_edit_matrix.py", "test_live.py", "test_megatron.py"),
    *("test_docs.py", "test_round_trips.py", "test_stores.py"),
]


# The newest release of megatron-core that Python 3.10 and 3.11 have is older than this one.
NEWEST = [0, 18]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Puts the files of LONG first. Older releases of megatron-core skip the tests for which one
    release is enough, unless JUDGED asks for the results of all.
    """
    place = {name: number for number, name in enumerate(LONG)}
    items.sort(key=lambda item: place.get(item.path.name, len(LONG)))
    installed = [int(part) for part in version("megatron-core").split(".")[:2]]
    if installed < NEWEST and "JUDGED" not in os.environ:
        skip = pytest.mark.skip(reason="CI runs this under Python 3.12, with the newest release")
        for item in items:
            if item.get_closest_marker("newest"):
                item.add_marker(skip)


def pytest_collection_finish() -> None:
    """Importing the test files must not import torch: see tests/helpers/lazy.py."""
    if "torch" in sys.modules:
        raise pytest.UsageError("a test file imports torch: import it inside of its tests")


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    """A folder for all tests of one file."""
    return tmp_path_factory.mktemp(request.module.__name__.rpartition("test_")[2])


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TinyModel]:
    """A function (case, dtype) -> the Hugging Face directory of a model of tests/helpers/tiny.py or
    made_models.py. Each is written once. A test that changes one must copy it, which is checked at
    the end.
    """
    root = tmp_path_factory.mktemp("tiny")
    stamped: dict[Path, dict[Path, int]] = {}

    def written(case: str, dtype: str = "bfloat16") -> Path:
        directory = root / dtype / case
        if directory not in stamped:
            if case in tiny.CASES:
                tiny.tiny_random(case, directory, dtype)
            elif dtype == "float32":
                made_models.make([case], directory.parent)
            else:
                made_models.cast(written(case, "float32"), directory, dtype)
            stamped[directory] = stamps(directory)
        return directory

    yield written
    changed = [path for path, before in stamped.items() if stamps(path) != before]
    assert not changed, f"a test changed {changed}, which others read: it must change a copy"


def stamps(root: Path) -> dict[Path, int]:
    """Returns the time at which each file and folder below a directory was last changed."""
    return {path: path.stat().st_mtime_ns for path in root.rglob("*")}


@pytest.fixture(scope="session")
def sources(tiny_model: TinyModel) -> dict[str, Path]:
    """Every case of fixtures/tiny in fp32, for judges that compare logits."""
    return {case: tiny_model(case, "float32") for case in tiny.CASES}


@pytest.fixture(scope="session")
def src(tiny_model: TinyModel) -> Path:
    """The Hugging Face directory of the case qwen3 in bf16."""
    return tiny_model("qwen3")


@pytest.fixture
def small_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Allows any `max_memory`, so that tiny tensors are moved in many pieces."""
    monkeypatch.setattr("mckpt.values.sizes.LEAST_MEMORY", 1)


@pytest.fixture
def forked_verify(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes `verify` run its processes as forks of one that has imported what they need."""
    verifying.use_session(monkeypatch)


@pytest.fixture(scope="session")
def headless(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Writes a DeepSeek-V3 as transformers saves it: without its layers of multi-token prediction,
    although config.json counts them.
    """
    root = tmp_path_factory.mktemp("headless") / "hf"
    root.mkdir()
    config = tiny.config("deepseek-v3")
    arrays = tiny.tensors(config)
    tiny.write_weights(root, {name: arrays[name] for name in tiny.decoder_only(config, arrays)})
    tiny.write_json(root / "config.json", {**config, "torch_dtype": "bfloat16"})
    return root


@pytest.fixture(scope="session")
def torch_dir(tmp_path_factory: pytest.TempPathFactory, src: Path) -> Path:
    """`src` as `torch` at tp 2, pp 2. Tests only read it."""
    root = tmp_path_factory.mktemp("torch") / "ckpt"
    good("hf-to-megatron", src, root, "--format", "torch", "--tp", 2, "--pp", 2)
    return root


@pytest.fixture(scope="session")
def dist_dir(tmp_path_factory: pytest.TempPathFactory, src: Path) -> Path:
    """`src` as `torch_dist`. Tests only read it."""
    root = tmp_path_factory.mktemp("dist") / "ckpt"
    good("hf-to-megatron", src, root)
    return root


@pytest.fixture(scope="module")
def trained(tmp_path_factory, src):
    """A save directory whose checkpoint is an iteration, not a release."""
    root = tmp_path_factory.mktemp("trained") / "ckpt"
    good("hf-to-megatron", src, root, "--iteration", 7, "--format", "torch")
    return root
