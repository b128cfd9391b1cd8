"""`mckpt verify --image`: an image of noise runs through both text models, and the values of the
towers are compared.

The processes of `verify` are forks of one session.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np
import pytest
import yaml
from safetensors.numpy import load_file, save_file

import mckpt
from mckpt.containers import safe_pickle
from mckpt.geometry.parallel import Parallel
from mckpt.options import VerifyOptions
from mckpt.verification.levels import verify_all
from mckpt.verification.verdict import CLEAN, FAULT
from tests.helpers import commands, verifying
from tests.helpers.commands import Pt
from tests.helpers.lazy import torch
from tests.helpers.tiny import TinyModel
from tests.judge.test_verify import State, change_rope_base, seed

pytestmark = [pytest.mark.judge, pytest.mark.newest]

IMAGE, TEXT = "float32, image", "float32, text with the image"
# starts of the keys of text models
TEXT_KEYS = ("lm_head.", "language_model.", "model.language_model.")
TEXT_KEYS += ("model.layers.", "model.embed_tokens.", "model.norm.")
QUICK: dict[str, Any] = {"device": "cpu", "sequences": 1, "length": 64, "image": True}


@pytest.fixture(autouse=True, scope="module")
def in_one_session() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        verifying.use_session(patch)
        yield


def expect_pass(found: mckpt.Verdict, source: Path, places: int) -> None:
    """Fails unless the verdict is a pass that judged an image of `places` features and every tensor
    of the towers.
    """
    assert (found.verdict, found.reasons) == ("pass", [])
    for part in (IMAGE, TEXT):
        measured = found.facts["logits"][part]
        assert measured["below"] >= CLEAN and measured["probe_above"] >= FAULT, part
    seen = found.facts["image"]
    assert (seen["places"], seen["judged"]) == (places, seen["positions"])
    keys = load_file(source / "model.safetensors").keys()
    # Megatron's model has no place for the indexers of MiniMax-M3
    apart = [key for key in keys if not key.startswith(TEXT_KEYS) or ".index_" in key]
    assert seen["towers_equal"] == len(apart) > 20


# A case; how it is converted; the sizes of the run; places of the image: 6 x 10 where the model
# takes images of any size, else those of 16 x 16 pixels with patches of 4 x 4, of which InternVL
# merges 2 x 2. Qwen2-VL, Qwen2.5-VL and GLM-4.5V have M-RoPE in sections, Qwen3-VL and Qwen3.5
# interleaved. Qwen3-VL adds features behind the layers 0 and 1, which are on two pipeline stages at
# pp 4. Qwen3.5 is hybrid.
MODELS: list[tuple[str, dict[str, Any], dict[str, int], int]] = [
    ("qwen2_vl", {}, {}, 60),
    ("qwen2_5_vl", {"towers": "bridge"}, {"tp": 2, "pp": 2}, 60),
    ("qwen3_vl", {}, {"pp": 4}, 60),
    ("qwen3_vl", {"dialect": "hybrid", "parallel": Parallel(pp=2)}, {"pp": 2}, 60),
    ("qwen3_vl", {"towers": "swift", "format": "torch", "parallel": Parallel(tp=2)}, {}, 60),
    ("qwen3_vl_moe", {"towers": "bridge"}, {"tp": 2, "ep": 2}, 60),
    ("qwen3_5_vl", {"towers": "bridge"}, {"pp": 2}, 60),
    ("glm4v_moe", {"towers": "swift"}, {"pp": 2}, 60),
    ("mistral3", {}, {"tp": 2}, 60),
    ("llava", {}, {}, 16),
]
FURTHER = {
    "qwen3_5_moe_vl": 60,
    "internvl": 4,
    "qwen2_5_omni_thinker": 60,
    "qwen3_omni_thinker": 60,
    "minimax_m3": 60,
    "pixtral": 12,
    "internvl_moe": 4,
    "aria_vl": 4,
    "llama4_vl": 4,
    "got_ocr2": 4,
}
SLOW = [pytest.param(case, {}, {}, n, marks=pytest.mark.slow) for case, n in FURTHER.items()]


@pytest.mark.parametrize(("case", "how", "sizes", "places"), [*MODELS, *SLOW])
def test_an_image_is_verified(
    case: str,
    how: dict[str, Any],
    sizes: dict[str, int],
    places: int,
    tiny_model: TinyModel,
    tmp_path: Path,
) -> None:
    source = tiny_model(case, "float32")
    if case == "mistral3":  # its tower takes images of any size up to this one
        source = shutil.copytree(source, tmp_path / "hf")
        commands.edit_json(
            source / "config.json", lambda c: c["vision_config"].update(image_size=96)
        )
    mckpt.plan(source, tmp_path / "megatron", **how).run()
    found = mckpt.verify(source, tmp_path / "megatron", **QUICK, **sizes)
    expect_pass(found, source, places)
    assert "resharded" not in found.facts


@pytest.mark.parametrize("level", ["forward", pytest.param("train", marks=pytest.mark.slow)])
def test_a_whole_model_of_ms_swift_is_verified(
    level: Literal["forward", "train"], tiny_model: TinyModel, tmp_path: Path
) -> None:
    """The args that ms-swift saves are settings of its run. They do not describe the model, and
    config.json does.
    """
    source, release = tiny_model("qwen3_vl", "float32"), tmp_path / "megatron/release"
    mckpt.plan(source, tmp_path / "megatron", towers="swift").run()
    (release / "mckpt.json").unlink()
    common = Pt(release / "common.pt")
    args = {"swift_version": "4.6.0", "template": "qwen3_vl", "mtp_num_layers": None}
    common.value["args"] = safe_pickle.namespace(**args)
    common.save()
    found = mckpt.verify(source, release, **QUICK, level=level, steps=2)
    expect_pass(found, source, 60)
    assert ("training" in found.facts) == (level == "train")


@pytest.mark.slow
@pytest.mark.newest
def test_gated_delta_nets_of_a_whole_model_train(tiny_model: TinyModel, tmp_path: Path) -> None:
    """The copy of the text model that trains is for a megatron-core that has such layers."""
    source = tiny_model("qwen3_5_vl", "float32")
    mckpt.plan(source, tmp_path / "megatron", towers="bridge").run()
    found = mckpt.verify(source, tmp_path / "megatron", **QUICK, level="train", steps=2)
    expect_pass(found, source, 60)
    assert found.facts["training"]["moved"] > 0


def test_sequence_parallelism_cuts_the_image(tiny_model: TinyModel, tmp_path: Path) -> None:
    """A mixture of experts that is built for training has it at tp 2."""
    source = tiny_model("qwen3_vl_moe", "float32")
    mckpt.plan(source, tmp_path / "megatron").run()
    with pytest.MonkeyPatch.context() as patch:
        verifying.use_session(patch, sequence_parallel=True)
        found = mckpt.verify(source, tmp_path / "megatron", **QUICK, tp=2)
    expect_pass(found, source, 60)


def test_a_cast_text_model_keeps_its_tower(tiny_model: TinyModel, tmp_path: Path) -> None:
    """The command prints everything about the image, and so do its report and its card."""
    source, out = tiny_model("qwen3_vl", "float32"), tmp_path / "megatron"
    mckpt.plan(source, out, dtype="bf16").run()
    files = "--report", tmp_path / "page.html", "--card", tmp_path / "card.yaml"
    quick = "--device", "cpu", "--sequences", 1, "--length", 64
    said = commands.good("verify", source, out, "--image", "--json", *quick, *files)
    names = [f"{dtype}, {part}" for part in ("image", "text with the image")
             for dtype in ("float32", "bfloat16")]  # fmt: skip
    names = ["float32", "bfloat16", *names]
    assert list(said.json["logits"]) == names
    card = yaml.safe_load((tmp_path / "card.yaml").read_text())
    assert list(card["logits"]) == names
    for image in (said.json["image"], card["image"]):
        assert (image["places"], image["positions"], image["towers_equal"]) == (60, 94, 45)
    page = (tmp_path / "page.html").read_text()
    assert all(f"<th>{name}</th>" in page for name in names) and "60 of 94" in page
    lines = mckpt.Verdict("pass", [], said.json).lines()
    assert any(line.startswith("towers: 45 tensors equal") for line in lines)
    assert any(line.startswith("logits bfloat16, image: rms") for line in lines), lines


# --------------------------------------------------------------------------------------- the faults


def same(directory: Path) -> None:
    """Changes nothing."""


def other_sections(directory: Path) -> None:
    """Gives two frequencies of the columns to the time, in the config.json that training reads."""
    commands.edit_json(
        directory / "hf/config.json",
        lambda c: c["text_config"]["rope_scaling"].update(mrope_section=[6, 2, 2]),
    )


def not_interleaved(directory: Path) -> None:
    commands.edit_json(
        directory / "hf/config.json",
        lambda c: c["text_config"]["rope_scaling"].update(mrope_interleaved=False),
    )


def fewer_frequencies(directory: Path) -> None:
    commands.edit_json(
        directory / "hf/config.json",
        lambda c: c["text_config"]["rope_scaling"].update(mrope_section=[4, 3, 2]),
    )


def other_element(directory: Path) -> None:
    (path,) = directory.glob("hf/carried*.safetensors")
    change_element(path)
    commands.restate(path)


def change_element(path: Path) -> None:
    held = load_file(path)
    held["model.visual.blocks.1.attn.proj.weight"][3, 5] += 1
    save_file(held, path, {"format": "pt"})


def exchange_layers(state: State, args: Any) -> None:
    for name in [name for name in state if name.startswith("decoder.layers.1.")]:
        other = name.replace(".1.", ".2.", 1)
        state[name], state[other] = state[other], state[name]


FAULTS: dict[str, Callable[..., None]] = {
    "clean": same,
    "sections": other_sections,
    "order": not_interleaved,
    "tower": other_element,
    "layers": exchange_layers,
    "theta": change_rope_base,
}
IN_STATE = ("layers", "theta")


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("image")


@pytest.fixture(scope="module")
def verdicts(work: Path, tiny_model: TinyModel) -> dict[str, mckpt.Verdict]:
    source = tiny_model("qwen3_vl", "float32")
    mckpt.plan(source, work / "base", format="torch", transformer_impl="local").run()
    for name, change in FAULTS.items():
        if name in IN_STATE:
            seed(work / "base", work / name, change)
        else:
            change(shutil.copytree(work / "base", work / name))
    options = VerifyOptions(**QUICK, keep=work / "kept")
    found = verify_all(source, [work / name for name in FAULTS], options)
    return dict(zip(FAULTS, found, strict=True))


def moved(verdicts: dict[str, mckpt.Verdict], work: Path, name: str) -> np.ndarray:
    """Returns how far the logits of each position of the sequence with the image are away, in
    tolerances.
    """
    number = list(FAULTS).index(name)
    with np.load(work / f"kept/image/checkpoint{number}.0.npz") as arrays:
        apart: np.ndarray = arrays["max_abs"]
    return apart / verdicts[name].facts["logits"][IMAGE]["tolerance"]


def test_the_clean_twin_passes(verdicts: dict[str, mckpt.Verdict], tiny_model: TinyModel) -> None:
    expect_pass(verdicts["clean"], tiny_model("qwen3_vl", "float32"), 60)


@pytest.mark.parametrize(
    ("name", "arg", "stated"),
    [
        ("sections", "mrope_section", "[4, 3, 3], the args say [6, 2, 2]"),
        ("order", "mrope_interleaved", "True, the args say False"),
    ],
)
def test_a_wrong_m_rope_is_found_at_the_image(
    verdicts: dict[str, mckpt.Verdict], work: Path, name: str, arg: str, stated: str
) -> None:
    """Text alone, and text before the image, has three equal positions. So has the first place of
    the image.
    """
    found = verdicts[name]
    assert found.verdict == "fail"
    logits = found.facts["logits"]
    assert logits["float32"]["below"] >= CLEAN
    assert logits[IMAGE]["max_abs"] >= FAULT * logits[IMAGE]["tolerance"]
    apart = moved(verdicts, work, name)
    assert apart[:18].max() <= 1 / CLEAN and apart[18:77].min() > 1
    assert any(f"{arg}): the config says {stated}" in reason for reason in found.reasons)
    where = found.facts["where"]
    assert (where["point"], where["args"]) == ("layers.0.attn", [arg])
    assert where["position"] == {"sequence": "image", "position": 18}
    assert "position 18 of the sequence with the image" in found.reasons[-1]


def test_a_changed_element_of_a_tower_is_named(verdicts: dict[str, mckpt.Verdict]) -> None:
    found = verdicts["tower"]
    assert found.verdict == "fail" and len(found.reasons) == 1
    name = "carried.model.visual.blocks.1.attn.proj.weight"
    assert found.reasons[0].startswith(f"{name}: 1 element differs, first at [3, 5]")
    assert found.facts["image"]["towers_equal"] == 44
    # the text models take what the tower of transformers makes of the image
    assert all(measured["below"] >= CLEAN for measured in found.facts["logits"].values())


@pytest.mark.parametrize(
    ("name", "named"), [("layers", "layers.1.attn.q.weight"), ("theta", "rotary_base")]
)
def test_a_fault_of_the_text_model_is_found_at_the_image_too(
    verdicts: dict[str, mckpt.Verdict], work: Path, name: str, named: str
) -> None:
    found = verdicts[name]
    assert found.verdict == "fail" and any(named in reason for reason in found.reasons)
    for part in ("float32", IMAGE, TEXT):
        measured = found.facts["logits"][part]
        assert measured["max_abs"] >= FAULT * measured["tolerance"], part
    assert moved(verdicts, work, name)[17:77].min() > 1


def test_faults_of_a_whole_model_are_found(tiny_model: TinyModel, tmp_path: Path) -> None:
    """run_config.yaml states the sections, and the tower lies in the checkpoint."""
    source, changed = tiny_model("qwen3_vl", "float32"), tmp_path / "changed"
    shutil.copytree(source, changed)
    change_element(changed / "model.safetensors")
    mckpt.plan(changed, tmp_path / "megatron", towers="bridge").run()
    path = tmp_path / "megatron/release/run_config.yaml"
    config = yaml.safe_load(path.read_text())
    config["model"]["mrope_section"] = [6, 2, 2]
    path.write_text(yaml.safe_dump(config))
    found = mckpt.verify(source, tmp_path / "megatron", **QUICK)
    assert found.verdict == "fail" and found.facts["logits"]["float32"]["below"] >= CLEAN
    assert found.facts["logits"][IMAGE]["below"] < 1 / FAULT
    assert found.facts["image"]["towers_equal"] == 44
    for word in ("mrope_section", "blocks.1.attn.proj.weight: 1 element differs"):
        assert any(word in reason for reason in found.reasons), found.reasons


def test_sections_of_another_sum_do_not_load(
    verdicts: dict[str, mckpt.Verdict], work: Path, tiny_model: TinyModel, tmp_path: Path
) -> None:
    fewer_frequencies(shutil.copytree(work / "base", tmp_path / "fewer"))
    found = mckpt.verify(tiny_model("qwen3_vl", "float32"), tmp_path / "fewer", **QUICK)
    assert found.verdict == "fail"
    assert "[4, 3, 2] has 9 frequencies, and the rotary embedding" in found.reasons[-1]


# ----------------------------------------------------------------------------- what cannot be run


def test_a_text_model_has_no_image(src: Path, dist_dir: Path) -> None:
    commands.refused(2, "no vision_config", "--image", args=("verify", src, dist_dir, "--image"))
    bytes_only = ("verify", src, dist_dir, "--image", "--level", "bytes")
    commands.refused(2, "--level bytes runs no model", args=bytes_only)


@pytest.mark.parametrize(
    ("case", "why"),
    [
        ("llava", "no token of an image below 211"),
        pytest.param("kimi_k25", "no attribute 'spatial_merge_size'", marks=pytest.mark.slow),
    ],
)
def test_an_image_that_cannot_be_drawn_is_refused(
    case: str, why: str, tiny_model: TinyModel, tmp_path: Path
) -> None:
    source = shutil.copytree(tiny_model(case, "float32"), tmp_path / "hf")
    if case == "llava":  # a token that the text model does not have
        commands.edit_json(source / "config.json", lambda c: c.update(image_token_index=211))
    mckpt.plan(source, tmp_path / "megatron").run()
    quick = ("--device", "cpu", "--sequences", "1", "--length", "64", "--image")
    words = ("no image that can be drawn", why, "leave --image out")
    commands.refused(4, *words, args=("verify", source, tmp_path / "megatron", *quick))


def test_sections_that_nothing_states_are_refused(tiny_model: TinyModel, tmp_path: Path) -> None:
    """transformers then takes those of its own default."""
    source = shutil.copytree(tiny_model("qwen3_vl", "float32"), tmp_path / "hf")
    commands.edit_json(
        source / "config.json", lambda c: c["text_config"]["rope_scaling"].pop("mrope_section")
    )
    mckpt.plan(source, tmp_path / "megatron").run()
    with pytest.raises(mckpt.errors.SourceError, match="no mrope_section is stated; leave --image"):
        mckpt.verify(source, tmp_path / "megatron", **QUICK)


def test_an_image_that_sees_itself_in_both_directions_is_refused(
    tiny_model: TinyModel, tmp_path: Path
) -> None:
    """transformers gives the text model of Gemma 3 such a mask."""
    from mckpt import launching

    job = {"hf": str(tiny_model("gemma3_vl", "float32")), "out": str(tmp_path), "dtype": "float32"}
    job |= {"sequences": [], "casts": [], "uncast": [], "config": {}, "carried": [], "image": True}
    with pytest.raises(mckpt.errors.MappingError, match=r"see all of the image.*leave --image"):
        launching.launch("mckpt.trainer.reference", job, tmp_path, "cpu")


# --------------------------------------------------------------------------- parts of a sequence


class Table:
    """A rotary embedding whose angle of frequency i at position p is 100 * p + i."""

    rotary_interleaved = False

    def forward(self, length: int, packed_seq: bool) -> Any:
        angles = 100 * torch.arange(length)[:, None] + torch.arange(4)
        return torch.cat([angles, angles], -1)[:, None, None]


def test_each_frequency_turns_with_its_own_position() -> None:
    """Sections of 2, 1 and 1 frequencies take the positions t t h w; interleaved, t h w t."""
    from mckpt.trainer import images

    positions = torch.tensor([[7], [8], [9]])
    for interleaved, wanted in ((False, [700, 701, 802, 903]), (True, [700, 801, 902, 703])):
        mrope = {"section": [2, 1, 1], "interleaved": interleaved}
        found = images._angles(Table(), positions, mrope)
        assert found.flatten().tolist() == wanted * 2


def test_ranks_of_context_parallelism_see_their_parts_of_the_image(tmp_path: Path) -> None:
    """Two ranks have the quarters 0 and 3, and 1 and 2, of a sequence of 16. The image is at 3 to
    9, and its features are added behind the layer 0 too.
    """
    from mckpt.trainer import images

    places, width = np.arange(3, 10), 2
    features = np.arange(14, dtype=np.float32).reshape(7, width) + 1
    np.savez(tmp_path / images.FILE, places=places, features=features, behind_0=10 * features)
    halves = ([*range(4), *range(12, 16)], [*range(4, 12)])
    embedding, layer = torch.nn.Identity(), torch.nn.Identity()
    layer.layer_number = 1
    chunk: Any = SimpleNamespace(
        pre_process=True, embedding=embedding, decoder=SimpleNamespace(layers=[layer])
    )

    def run(positions: list[int]) -> Any:
        def rows(count: int, is_cut: bool) -> Any:
            assert count == len(positions) and is_cut
            return torch.tensor(positions)

        with images.given([chunk], tmp_path, None, rows):
            return layer(embedding(torch.zeros(len(positions), 1, width)))[:, 0]

    wanted = torch.zeros(16, width)
    wanted[3:10] = 11 * torch.from_numpy(features)
    for positions in (list(range(16)), *halves):
        assert torch.equal(run(positions), wanted[positions])
    assert not layer(embedding(torch.zeros(16, 1, width))).any()  # the hooks are gone
