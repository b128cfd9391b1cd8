"""Edits of the vocabulary: rows beside numpy and beside transformers, tokenizers, and configs."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from safetensors.numpy import load_file

import mckpt
from mckpt.checkpoint.logical import LogicalTensor, Reader
from mckpt.editing import tokens
from mckpt.editing.tokens import Tokenizer
from mckpt.editing.vocabulary import _noise
from mckpt.errors import SourceError, UsageError
from tests.formats.test_edit import Tensors, made, same, written
from tests.helpers import tiny
from tests.helpers.commands import command_line, good, refused, run

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "fixtures" / "tiny-qwen3"
WEIGHTS = ("model.embed_tokens.weight", "lm_head.weight")
# of the new tokenizer: tokens that the old one does not have, and some that are not kept
ADDED, DROPPED = ["<|image|>", "the in", " an"], ["the", "\u0120the", "<|im_start|>"]


def tokenizer_of(directory: Path) -> dict[str, Any]:
    text: dict[str, Any] = json.loads((directory / "tokenizer.json").read_text())
    return text


def ids_of(directory: Path) -> dict[str, int]:
    """Returns the number of each token, as the package tokenizers reads it."""
    from tokenizers import Tokenizer as Library

    path = str(directory / "tokenizer.json")
    found: dict[str, int] = Library.from_file(path).get_vocab(with_added_tokens=True)
    return found


def other_tokenizer(directory: Path, **files: Any) -> Path:
    """Writes a tokenizer whose tokens have other numbers, without some and with new ones."""
    text = tokenizer_of(SOURCE)
    model = text["model"]
    kept = [t for t in reversed(model["vocab"]) if t not in DROPPED]
    model["vocab"] = {token: number for number, token in enumerate(kept)}
    pairs = (tuple(pair.split(" ")) if isinstance(pair, str) else pair for pair in model["merges"])
    model["merges"] = [f"{a} {b}" for a, b in pairs if {a, b, a + b} <= model["vocab"].keys()]
    special = [a for a in text["added_tokens"] if a["content"] not in DROPPED]
    special += [{**special[0], "content": one, "special": False} for one in ADDED]
    text["added_tokens"] = [{**a, "id": len(kept) + n} for n, a in enumerate(special)]
    directory.mkdir(parents=True, exist_ok=True)
    files = {"tokenizer_config.json": {"eos_token": "<|im_end|>"}, **files, "tokenizer.json": text}
    for name, content in files.items():
        (directory / name).write_text(json.dumps(content))
    return directory


def rows_of(tensors: Tensors, old_of: dict[int, int], size: int, new: Any = None) -> Tensors:
    """Returns the tensors with rows of old numbers; new: makes a row of the number and the old
    rows, which is rounded once.
    """
    out = dict(tensors)
    for name in WEIGHTS:
        if name in out:
            wide = out[name].astype("f8")
            rows = [
                out[name][old_of[n]]
                if n in old_of
                else np.asarray(wide.mean(0) if new is None else new(n, wide), "f4")
                for n in range(size)
            ]
            out[name] = np.stack([row.astype(out[name].dtype) for row in rows])
    return out


CASES = ("qwen3-tied", "qwen3-moe", "deepseek-v3", "bamba", "qwen3_next")


@pytest.mark.parametrize("case", CASES)
def test_rows_go_where_a_map_says(case: str, tmp_path: Path) -> None:
    """Rows in another order, two of one old row, new ones between them, and rows left out."""
    source = made(case, tmp_path)
    tensors, dims = load_file(source / "model.safetensors"), mckpt.open(source).dims
    count = dims["vocab_size"]
    kept = [old for old in reversed(range(count)) if not 30 <= old < 40]
    old_of = {new + new // 6: old for new, old in enumerate(kept)}
    size = 3 * count
    old_of |= {size - 1: 9, size - 2: 9}
    (tmp_path / "ids.json").write_text(json.dumps(old_of))
    recipe = written(f"- vocab: {{map: {tmp_path / 'ids.json'}}}", tmp_path)
    dist, out, megatron = tmp_path / "dist", tmp_path / "out", tmp_path / "megatron"
    said = good("edit", source, out, "--recipe", recipe)
    assert "not in the new vocabulary" in said.out + said.err
    expected = rows_of(tensors, old_of, size)
    if case == "deepseek-v3":  # its layer of multi-token prediction repeats both
        for name in tensors.keys() - set(WEIGHTS):
            if name.endswith(("embed_tokens.weight", "shared_head.head.weight")):
                expected[name] = expected[WEIGHTS[name.endswith("head.weight")]]
    same(out, expected)
    assert json.loads((out / "config.json").read_text())["vocab_size"] == size
    mckpt.convert(source, dist, format="torch", tp=2)
    good("edit", dist, megatron, "--recipe", recipe, "--tp", 4)
    assert not mckpt.diff(out, megatron)
    assert mckpt.check(megatron).verdict == "sound"


def test_copies_of_the_embedding_are_compared_as_the_files_have_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not row by row, as the edit cuts them."""
    source = made("deepseek-v3", tmp_path)
    tensors, count = load_file(source / "model.safetensors"), mckpt.open(source).dims["vocab_size"]
    (tmp_path / "ids.json").write_text(json.dumps({n: count - 1 - n for n in range(count)}))
    step, compared = f"vocab: {{map: {tmp_path / 'ids.json'}}}", list[str]()
    real = Reader._same

    def noted(self: Reader, held: Any, row: int, name: str, check: Any) -> bool:
        compared.append(name)
        return real(self, held, row, name, check)

    monkeypatch.setattr(Reader, "_same", noted)
    mckpt.edit(source, tmp_path / "out", [step])
    assert sorted(compared) == ["embed.weight", "lm_head.weight"]
    copy = next(name for name in tensors if name.endswith("layers.4.embed_tokens.weight"))
    tiny.write_weights(source, tensors | {copy: -tensors[copy]})
    with pytest.raises(SourceError, match=r"embed\.weight: its copy in"):
        mckpt.edit(source, tmp_path / "apart", [step])


def test_rows_change_places_in_a_vocabulary_of_the_same_size(tmp_path: Path) -> None:
    """The padding of a Megatron checkpoint is not part of it."""
    source = made("qwen2", tmp_path)
    tensors, count = load_file(source / "model.safetensors"), mckpt.open(source).dims["vocab_size"]
    old_of = {new: (new + 5) % count for new in range(count)}
    (tmp_path / "ids.json").write_text(json.dumps(old_of))
    recipe = written(f"- vocab: {{map: {tmp_path / 'ids.json'}}}", tmp_path)
    mckpt.convert(source, tmp_path / "dist", tp=2)
    mckpt.edit(tmp_path / "dist", tmp_path / "out", recipe, format="hf")
    same(tmp_path / "out", rows_of(tensors, old_of, count))
    mckpt.edit(tmp_path / "dist", tmp_path / "megatron", recipe, tp=4)
    assert not mckpt.diff(tmp_path / "out", tmp_path / "megatron")


@pytest.mark.parametrize("case", ["qwen3-tied", "qwen3-moe"])
def test_two_maps_and_other_edits_follow_each_other(case: str, tmp_path: Path) -> None:
    """The rows of the second map are rows of the first one, of which some are new."""
    source = made(case, tmp_path)
    tensors, count = load_file(source / "model.safetensors"), mckpt.open(source).dims["vocab_size"]
    config = json.loads((source / "config.json").read_text())
    config = {name: value for name, value in config.items() if "token_id" not in name}
    (source / "config.json").write_text(json.dumps(config))
    (source / "generation_config.json").unlink()
    chance = np.random.default_rng(5)
    maps = []
    for number, (old, size) in enumerate([(count, count + 40), (count + 40, count)]):
        places = chance.permutation(size)[: size - 25].tolist()
        maps.append(dict(zip(places, chance.integers(0, old, size).tolist(), strict=False)))
        (tmp_path / f"{number}.json").write_text(json.dumps(maps[number]))
        tensors = rows_of(tensors, maps[number], size, lambda n, rows: rows[7])
    steps = [
        f"vocab: {{map: {tmp_path}/0.json, size: {count + 40}, init: 7}}",
        f"vocab: {{map: {tmp_path}/1.json, size: {count}, init: 7}}",
    ]
    if case == "qwen3-tied":
        steps.append("untie")
        tensors[WEIGHTS[1]] = tensors[WEIGHTS[0]]
    mckpt.edit(source, tmp_path / "out", steps)
    same(tmp_path / "out", tensors)
    good("verify", "--contract", "--level", "bytes", source, tmp_path / "out")


def test_the_manifest_has_the_rows_of_a_map_as_ranges_and_equal_new_rows_once(
    tmp_path: Path,
) -> None:
    source = made("qwen3", tmp_path)
    old_of = {0: 9, 1: 10, 2: 11, 3: 0, 7: 1, 8: 1, 9: 0}
    (tmp_path / "ids.json").write_text(json.dumps(old_of))
    step = f"vocab: {{map: {tmp_path / 'ids.json'}, size: 5000}}"
    done = mckpt.edit(source, tmp_path / "out", [step])
    (edit,) = done["edits"]
    assert edit["Vocabulary"]["kept"] == "9-11,0,+3,1,1,0,+4990"
    width = mckpt.open(source).dims["hidden_size"]
    made_rows = [file["bytes"] for file in done["source"]["files"] if file["name"].endswith(".bin")]
    assert made_rows == [1024 * width * 4] * 2


def test_a_new_tokenizer_gives_each_known_token_its_row(tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    new = other_tokenizer(tmp_path / "new")
    before, after = ids_of(SOURCE), ids_of(new)
    old_of = {number: before[token] for token, number in after.items() if token in before}
    size = max(after.values()) + 1
    assert len(after) == size == len(before) and len(old_of) == size - len(ADDED)
    recipe = written(f"- vocab: {{tokenizer: {new}, init: zero}}", tmp_path)
    out, megatron = tmp_path / "out", tmp_path / "megatron"
    said = good("edit", SOURCE, out, "--recipe", recipe)
    assert f"{len(old_of)} of them old ones" in said.out + said.err
    tensors = load_file(SOURCE / "model.safetensors")
    same(out, rows_of(tensors, old_of, size, lambda n, rows: np.zeros_like(rows[0])))

    for name in ("config.json", "generation_config.json"):
        found, was = (json.loads((path / name).read_text()) for path in (out, SOURCE))
        assert found["eos_token_id"] == after["<|im_end|>"]
        for key in ("bos_token_id", "pad_token_id"):
            assert found.get(key) == (after["<|endoftext|>"] if key in was else None)
    names = {path.name for path in out.iterdir()}
    assert tokenizer_of(out) == tokenizer_of(new)
    assert "tokenizer_config.json" in names and "special_tokens_map.json" not in names

    good("edit", SOURCE, megatron, "--recipe", recipe, "--tp", 2)
    good("megatron-to-hf", megatron, tmp_path / "back")
    good("diff", out, tmp_path / "back")
    for path in out.iterdir():
        if path.name not in ("mckpt.json", "model.safetensors"):
            assert json.loads((tmp_path / "back" / path.name).read_text()) == json.loads(
                path.read_text()
            ), path.name

    # the same text, in the numbers of each, and the logits of the tokens that both have
    text = "in on a " + "".join(map(chr, range(97, 123)))
    places = torch.tensor(sorted(old_of)), torch.tensor([old_of[n] for n in sorted(old_of)])
    logits = []
    for path, kept in zip((out, SOURCE), places, strict=True):
        ids = AutoTokenizer.from_pretrained(path)(text, return_tensors="pt").input_ids
        with torch.no_grad():
            model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
            logits.append(model(ids).logits[..., kept])
    assert logits[0].equal(logits[1])  # to the last bit


def test_the_second_edit_reads_the_tokenizer_and_configs_of_the_first_one(tmp_path: Path) -> None:
    tensors, count = load_file(SOURCE / "model.safetensors"), mckpt.open(SOURCE).dims["vocab_size"]
    new = other_tokenizer(tmp_path / "new")
    old, kept = ids_of(SOURCE), ids_of(new)
    there_and_back = [f"vocab: {{tokenizer: {one}, init: zero}}" for one in (new, SOURCE)]
    mckpt.edit(SOURCE, tmp_path / "back", there_and_back)
    wanted = {number: number for token, number in old.items() if token in kept}
    same(
        tmp_path / "back",
        rows_of(tensors, wanted, max(old.values()) + 1, lambda _, rows: np.zeros_like(rows[0])),
    )
    refused_size = [f"vocab: {{tokenizer: {new}}}", f"vocab: {{size: {max(kept.values())}}}"]
    with pytest.raises(UsageError, match=f"tokenizer in {new} has tokens up to"):
        mckpt.edit(SOURCE, tmp_path / "out", refused_size)
    maps = [{n: (n + 5) % count for n in range(count)}, {n: n for n in range(262)}]
    for number, pairs in enumerate(maps):  # the token 266 becomes 261
        (tmp_path / f"{number}.json").write_text(json.dumps(pairs))
    mckpt.edit(SOURCE, tmp_path / "out", [f"vocab: {{map: {tmp_path}/{n}.json}}" for n in (0, 1)])
    same(tmp_path / "out", rows_of(tensors, maps[0], 262))
    assert json.loads((tmp_path / "out" / "config.json").read_text())["eos_token_id"] == 261


def test_rows_of_subwords_are_the_means_of_their_pieces(tmp_path: Path) -> None:
    from tokenizers import Tokenizer as Library

    new = other_tokenizer(tmp_path / "new")
    before, after = ids_of(SOURCE), ids_of(new)
    library = Library.from_file(str(SOURCE / "tokenizer.json"))
    pieces = {after[t]: library.encode(t, add_special_tokens=False).ids for t in ADDED}
    assert [len(pieces[after[t]]) for t in ADDED] == [9, 3, 2]
    recipe = written(f"- vocab: {{tokenizer: {new}, init: subword, size: 280}}", tmp_path)
    good("edit", SOURCE, tmp_path / "out", "--recipe", recipe)
    old_of = {number: before[token] for token, number in after.items() if token in before}
    tensors = load_file(SOURCE / "model.safetensors")
    same(
        tmp_path / "out",
        # rows without a token are the mean of all
        rows_of(tensors, old_of, 280, lambda n, rows: rows[pieces.get(n, slice(None))].mean(0)),
    )


def test_a_tokenizer_that_writes_its_tokens_otherwise_has_the_same_tokens(tmp_path: Path) -> None:
    """One of sentencepiece, with the text of a byte-level one."""
    text = tokenizer_of(SOURCE)
    words = ["<unk>", "<0x0A>", "\u2581the", "\u2581a", "th", "\u2581", "\u00e9", "q", "\u2581then"]
    text["model"] = {"type": "Unigram", "unk_id": 0, "vocab": [[word, -1.0] for word in words]}
    text["pre_tokenizer"] = text["decoder"] = {
        **{"type": "Metaspace", "replacement": "\u2581"},
        **{"prepend_scheme": "always", "split": True},
    }
    text["added_tokens"] = [{**text["added_tokens"][-1], "id": len(words)}]
    new = tmp_path / "new"
    new.mkdir()
    (new / "tokenizer.json").write_text(json.dumps(text))
    before, found = ids_of(SOURCE), dict(Tokenizer(new).same_as(Tokenizer(SOURCE)))
    as_letters = {1: "\u010a", 2: "\u0120the", 3: "\u0120a", 4: "th", 5: "\u0120", 7: "q"}
    assert found == {n: before[t] for n, t in as_letters.items()} | {9: before["<|im_end|>"]}
    back = dict(Tokenizer(SOURCE).same_as(Tokenizer(new)))
    assert back == {old: n for n, old in found.items()}
    (split,) = Tokenizer(SOURCE).pieces(["\u2581then"], Tokenizer(new))
    assert split == (before["\u0120the"], before["n"])


def test_mean_and_normal_rows_are_those_of_transformers(tmp_path: Path) -> None:
    import torch
    from torch.distributions import constraints
    from transformers import AutoModelForCausalLM

    source = tiny.tiny_random("qwen3", tmp_path / "source", "float32")
    count, more = mckpt.open(source).dims["vocab_size"], 6000
    found: dict[str, Tensors] = {}
    for init in ("mean", "normal", "normal, seed: 1", "normal"):
        recipe = written(f"- vocab: {{size: {count + more}, init: {init}}}", tmp_path)
        good("edit", source, tmp_path / "out", "--recipe", recipe, "--overwrite")
        stored = load_file(tmp_path / "out" / "model.safetensors")
        for name, was in found.get(init, {}).items():
            assert stored[name].tobytes() == was.tobytes()
        found[init] = {name: stored[name] for name in WEIGHTS}
    check, drawn = type(constraints.positive_definite), dict[str, Tensors]()
    for init in ("normal", "mean"):
        torch.manual_seed(3)
        model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
        with pytest.MonkeyPatch.context() as patch:
            if init == "mean":
                patch.setattr(check, "check", lambda self, value: torch.tensor(False))
            model.resize_token_embeddings(count + more, mean_resizing=True)
        drawn[init] = {name: model.state_dict()[name].numpy() for name in WEIGHTS}
    for name in WEIGHTS:
        for init, rows in found.items():
            assert rows[name][:count].tobytes() == drawn["mean"][name][:count].tobytes(), init
        old = drawn["mean"][name][:count].astype("f8")
        np.testing.assert_allclose(
            found["mean"][name][count:], drawn["mean"][name][count:], rtol=0, atol=1e-7
        )
        wanted = 1e-9 * np.cov(old.T, bias=True)
        size, noise = np.sqrt(np.trace(wanted)), []
        for one in (found["normal"], found["normal, seed: 1"], drawn["normal"]):
            new = one[name][count:].astype("f8") - old.mean(0)
            assert np.linalg.norm(new.mean(0)) < 3 * size / np.sqrt(more)
            apart = np.linalg.norm(np.cov(new.T, bias=True) - wanted) / np.linalg.norm(wanted)
            assert apart < 0.15, (name, apart)
            noise.append(new)
        assert abs(np.mean(noise[0] * noise[1])) < 0.05 * np.mean(noise[0] ** 2)
    both = [found["normal"][n][count:] - found["mean"][n][count:] for n in WEIGHTS]
    assert abs(np.corrcoef(both[0].ravel(), both[1].ravel())[0, 1]) < 0.05  # other draws


class Rows(np.ndarray):
    """An array in place of a logical tensor."""

    def numpy(self) -> np.ndarray:
        return np.asarray(self)


def test_a_few_normal_rows_have_the_covariance_of_many() -> None:
    """More new rows than dimensions are drawn in another way than fewer; numpy says of both what
    their covariance is.
    """
    drawn = np.random.default_rng(0)
    # rows that come again, in other blocks, with values far from zero
    old = np.tile(drawn.standard_normal((256, 32)), (4, 1)) @ drawn.standard_normal((32, 32)) + 9
    old = (old + 0.1 * drawn.standard_normal(old.shape))[:900].astype("f4")
    wanted = 1e-9 * np.cov(old.astype("f8").T, bias=True)
    for at_once, draws in ((32, 200), (5, 1000), (33, 200)):
        mean, tensor = old.mean(0, dtype="f8"), cast(LogicalTensor, old.view(Rows))
        found = [list(_noise(tensor, mean, at_once, [seed])) for seed in range(draws)]
        rows = np.concatenate([block for blocks in found for block in blocks])
        assert rows.shape == (at_once * draws, 32)
        apart = np.linalg.norm(np.cov(rows.T, bias=True) - wanted) / np.linalg.norm(wanted)
        assert apart < 0.1, (at_once, apart)
        beside = rows[:-1].T @ rows[1:] / len(rows)  # two rows have nothing in common
        assert np.linalg.norm(beside) < 0.1 * np.linalg.norm(wanted)
        assert np.linalg.norm(rows.mean(0)) < 3 * np.sqrt(np.trace(wanted) / len(rows))


def test_normal_rows_of_equal_ones_have_no_noise() -> None:
    old = np.full((90, 8), 2.5, "f4").view(Rows)
    (rows,) = _noise(cast(LogicalTensor, old), np.full(8, 2.5), 20, [0])
    assert not rows.any()


def test_normal_rows_of_few_tokens_are_their_mean(tmp_path: Path) -> None:
    """Their covariance has not the full rank, so transformers takes the mean too."""
    (tmp_path / "ids.json").write_text(json.dumps({n: n for n in range(20)}))
    first = written(f"- vocab: {{map: {tmp_path / 'ids.json'}}}", tmp_path)
    source = made("qwen3", tmp_path)
    good("edit", source, tmp_path / "small", "--recipe", first)
    recipe = written("- vocab: {size: 25, init: normal}", tmp_path)
    good("edit", tmp_path / "small", tmp_path / "out", "--recipe", recipe)
    tensors = load_file(tmp_path / "small" / "model.safetensors")
    same(tmp_path / "out", rows_of(tensors, {n: n for n in range(20)}, 25))


@pytest.mark.parametrize(
    ("step", "words"),
    [
        ("{tokenizer: none}", "has no tokenizer.json"),
        ("{map: none.json}", "is not a file"),
        ("{map: list.json}", "an object of new numbers"),
        ("{map: far.json}", "row 900 of map: the vocabulary has the rows 0 to 270"),
        ("{map: low.json}", "low.json: row -1: rows have numbers from 0 to"),
        ("{map: high.json}", f"high.json: row {10**20}: rows have numbers from 0 to"),
        ("{size: 400, init: subword}", "subword needs tokenizer"),
        ("{size: 2, map: far.json}", "has no row for token 5"),
        ("{tokenizer: new, size: 30}", "has no row for token 266"),
        ("{map: few.json}", "config.json has bos_token_id 264, and this token is left out"),
        ("{size: 400, seed: x}", "wants size"),
    ],
)
def test_a_vocabulary_that_cannot_be_made_is_refused(
    step: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    other_tokenizer(tmp_path / "new")
    maps = {"far": {"5": 900}, "few": {"0": 0, "1": 266}, "low": {"0": -1}, "high": {"1": 10**20}}
    for name, content in {"list": [1], **maps}.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    recipe = written(f"- vocab: {step}", tmp_path)
    refused(2, words, args=("edit", SOURCE, tmp_path / "out", "--recipe", recipe))
    assert not (tmp_path / "out").exists()


def test_a_killed_edit_leaves_no_files_for_ever(tmp_path: Path) -> None:
    place, step = tmp_path / "temporary", ("--edit", "vocab: {size: 280}")
    place.mkdir()
    kill = "import os; from mckpt.conversion import run; run.run = lambda *a: os._exit(9)"
    how: dict[str, Any] = {"env": {**os.environ, "TMPDIR": str(place)}}
    run(command_line("edit", SOURCE, tmp_path / "out", *step, before=kill), code=9, **how)
    assert len(list(place.rglob("*.bin"))) == 2
    run(command_line("edit", SOURCE, tmp_path / "out", *step), **how)
    assert not list(place.iterdir())


def test_special_tokens_that_the_new_tokenizer_states_need_no_row(tmp_path: Path) -> None:
    stated = {"generation_config.json": {"bos_token_id": 7, "eos_token_id": [3, 4]}}
    new = other_tokenizer(tmp_path / "new", **stated)
    (tmp_path / "ids.json").write_text(json.dumps({"0": 0, "11": 264}))
    recipe = written(f"- vocab: {{tokenizer: {new}, map: {tmp_path / 'ids.json'}}}", tmp_path)
    good("edit", SOURCE, tmp_path / "out", "--recipe", recipe)
    config = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert config["bos_token_id"] == 7 and config["eos_token_id"] == [3, 4]
    assert config["pad_token_id"] == 11  # its row is token 11 now
    assert config["do_sample"] is False


def test_a_special_token_of_a_config_keeps_its_row(tmp_path: Path) -> None:
    """Without a tokenizer, the configs alone say which rows are in use."""
    source = made("qwen3", tmp_path)
    config, path = json.loads((source / "config.json").read_text()), source / "config.json"
    path.write_text(json.dumps({**config, "eos_token_id": [1, 190]}))
    with pytest.raises(UsageError, match="has eos_token_id 190, and this token is left out"):
        mckpt.edit(source, tmp_path / "out", ["vocab: {size: 190}"])
    mckpt.edit(source, tmp_path / "out", ["vocab: {size: 191}"])
    stated = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (stated["vocab_size"], stated["eos_token_id"]) == (191, [1, 190])


def test_a_map_without_a_tokenizer_leaves_out_one_that_does_not_fit(tmp_path: Path) -> None:
    count = mckpt.open(SOURCE).dims["vocab_size"]
    for shift, fits in ((0, True), (1, False)):
        ids = {n + shift: n for n in range(count)}
        (tmp_path / "ids.json").write_text(json.dumps(ids))
        recipe, out = (
            written(f"- vocab: {{map: {tmp_path / 'ids.json'}}}", tmp_path),
            tmp_path / f"{shift}",
        )
        good("edit", SOURCE, out, "--recipe", recipe)
        assert (out / "tokenizer.json").exists() == fits
        config = json.loads((out / "config.json").read_text())
        assert config["eos_token_id"] == 266 + shift


def test_the_package_tokenizers_is_needed_for_subwords_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "tokenizers", None)
    new = other_tokenizer(tmp_path / "new")
    recipe = written(f"- vocab: {{tokenizer: {new}, init: subword}}", tmp_path)
    refused(
        9, "pip install tokenizers", args=("edit", SOURCE, tmp_path / "out", "--recipe", recipe)
    )
    recipe = written(f"- vocab: {{tokenizer: {new}}}", tmp_path)
    good("edit", SOURCE, tmp_path / "out", "--recipe", recipe)


def test_special_tokens_are_found_in_the_parts_of_a_config() -> None:
    config = {"text_config": {"eos_token_id": [1, 2], "pad_token_id": -1}, "image_token_index": 3}
    config |= {"bos_token_id": None, "hidden_size": 2}
    new = tokens.restated("config.json", config, lambda n: {1: 5, 2: 6, 3: 7}.get(n, n), {})
    assert new == {
        **{"text_config": {"eos_token_id": [5, 6], "pad_token_id": -1}, "image_token_index": 7},
        **{"bos_token_id": None, "hidden_size": 2},
    }


@pytest.mark.parametrize("form", ["fully_sharded_model_space", "dp_zero_gather_scatter"])
def test_the_state_of_an_optimizer_follows_its_rows(form: str, tmp_path: Path) -> None:
    source = tiny.unpack(f"optimizer/{form}", tmp_path / form)
    before = mckpt.open(source).with_optimizer()
    count = before.dims["vocab_size"]
    old_of = {n + n // 4: old for n, old in enumerate(reversed(range(2, count)))} | {2 * count: 7}
    (tmp_path / "ids.json").write_text(json.dumps(old_of))
    recipe = written(f"- vocab: {{map: {tmp_path / 'ids.json'}, init: normal}}", tmp_path)
    mckpt.edit(source, tmp_path / "out", recipe, format="torch_dist", tp=2, pp=1, ep=1)
    after = mckpt.open(tmp_path / "out").with_optimizer()
    new = [n for n in range(2 * count + 1) if n not in old_of]
    at, was = list(old_of), list(old_of.values())
    assert set(after) == set(before) and len(new) > count // 2
    seen = set[str]()
    for name in after:
        rows, old = after[name][:].numpy(), before[name][:].numpy()
        weight, _, state = name.partition("@")
        if weight not in ("embed.weight", "lm_head.weight"):
            assert rows.tobytes() == old.tobytes(), name
            continue
        assert rows[at].tobytes() == old[was].tobytes(), name
        if state.startswith("exp_avg"):
            assert not rows[new].any() and old.any()
        else:
            spread = rows[new].astype("f8") - old.astype("f8").mean(0)
            assert 0 < np.abs(spread).max() < 0.01
        if state == "master":
            weights = after[weight][:].numpy()
            assert rows.astype(weights.dtype)[new].tobytes() == weights[new].tobytes()
        seen.add(state)
    assert seen >= {"", "exp_avg", "exp_avg_sq"}
    assert mckpt.check(tmp_path / "out").verdict == "sound"
