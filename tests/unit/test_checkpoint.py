"""Checkpoints: their files, their model and their tensors, which do not change."""

from __future__ import annotations

import dataclasses
import pickle
from pathlib import Path

import pytest

from mckpt.checkpoint.checkpoint import Checkpoint
from mckpt.options import SourceOptions


def test_a_checkpoint_and_its_parts_do_not_change(src: Path, torch_dir: Path) -> None:
    for path in (src, torch_dir):
        ckpt = Checkpoint.open(path)
        for part in (ckpt, ckpt.files, ckpt.model):
            for field in dataclasses.fields(part):
                with pytest.raises(dataclasses.FrozenInstanceError):
                    setattr(part, field.name, None)


def test_views_share_what_was_read_and_leave_the_first_as_it_is(torch_dir: Path) -> None:
    ckpt = Checkpoint.open(torch_dir)
    names, rows = list(ckpt), ckpt.dims["vocab_size"]
    padded = ckpt.with_padding()
    assert padded is not None and padded.dims["vocab_size"] >= rows
    for view in (padded, ckpt.with_optimizer(), ckpt.borrowing(), ckpt.with_dims(ckpt.dims)):
        assert view is not ckpt and view.files is ckpt.files and type(view) is type(ckpt)
    assert ckpt.with_optimizer().model is ckpt.model is ckpt.borrowing().model
    assert (list(ckpt), ckpt.dims["vocab_size"]) == (names, rows)
    assert not (ckpt.borrows or ckpt.has_states)


def test_a_pickle_opens_the_files_again(torch_dir: Path, src: Path) -> None:
    ckpt = Checkpoint.open(torch_dir, SourceOptions(like=src, settings={"norm_eps": 1e-6}))
    view = ckpt.with_dims({**ckpt.dims, "rope_theta": 5.0}).with_optimizer()
    data = pickle.dumps(view)
    again = pickle.loads(data)
    assert len(data) < 20_000  # neither headers nor mappings
    assert (again.path, again.files.options) == (view.path, view.files.options)
    assert again.has_states and again.dims == view.dims and list(again) == list(view)
