"""Token sequences to train on, the same for the same seed whatever the parallel sizes: Megatron's
.bin/.idx, JSONL, or made up.

A source gives sequence i as seq_length + 1 tokens: the last seq_length are the labels of the first.
Documents are put in a seeded order, laid end to end, and cut; the last token of a sequence is the
first of the next, so every token but one is a label once an epoch.
"""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mckpt.errors import UsageError

Source = Callable[[int], np.ndarray]  # number of a sequence -> its tokens [seq_length + 1], int64

BRANCHES = 4  # of the chain that `mock` walks: its loss falls from log(vocab) to log(4) = 1.39


def open_source(
    path: str | None, args: Namespace, seq_length: int, seed: int, tokenizer: str | None = None
) -> Source:
    """`path`: a .jsonl file, the prefix of a .bin and .idx (or either of these), or None or "mock"
    for made-up text.
    """
    vocab = getattr(args, "vocab_size", None) or args.padded_vocab_size
    if path in (None, "mock"):
        return mock(vocab, seq_length, seed)
    assert path is not None
    documents: Sequence[np.ndarray]
    if path.endswith((".jsonl", ".json")):
        documents = read_jsonl(Path(path), tokenizer)
        lengths = np.array([len(document) for document in documents], np.int64)
    else:
        prefix = path.removesuffix(".bin").removesuffix(".idx")
        for suffix in (".bin", ".idx"):
            if not Path(prefix + suffix).exists():
                raise UsageError(
                    f"no data: {prefix}{suffix} does not exist (a JSONL file is named whole, with"
                    " .jsonl)"
                )
        from megatron.core.datasets.indexed_dataset import IndexedDataset

        indexed = IndexedDataset(prefix)
        documents, lengths = indexed, np.asarray(indexed.sequence_lengths, np.int64)
    if lengths.sum() <= seq_length:
        raise UsageError(
            f"{path} holds {lengths.sum()} tokens: not one sequence of {seq_length} + 1"
        )
    return bounded(pack(documents, lengths, seq_length, seed), vocab, path)


def read_jsonl(path: Path, tokenizer: str | None) -> list[np.ndarray]:
    """Documents of a JSONL file: "tokens" or "input_ids" as they are, "text" by the tokenizer, with
    its end of text behind it.
    """
    encode: Any = None
    documents = []
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except ValueError as e:
                raise UsageError(f"{path}, line {number}: is no JSON: {e}") from None
            if not isinstance(record, dict):
                raise UsageError(
                    f'{path}, line {number}: is no object with "text", "tokens" or "input_ids"'
                )
            tokens = record.get("tokens", record.get("input_ids"))
            if tokens is None and "text" in record:
                if encode is None:
                    encode = text_encoder(tokenizer, path)
                tokens = encode(record["text"])
            if tokens is None:
                raise UsageError(
                    f'{path}, line {number}: none of "text", "tokens", "input_ids" is there'
                )
            documents.append(np.asarray(tokens, np.int64))
    return documents


def text_encoder(tokenizer: str | None, path: Path) -> Callable[[str], list[int]]:
    if tokenizer is None:
        raise UsageError(f"{path} holds text: name the directory of its tokenizer")
    from transformers import AutoTokenizer

    loaded = AutoTokenizer.from_pretrained(tokenizer)
    end = [] if loaded.eos_token_id is None else [loaded.eos_token_id]
    return lambda text: loaded(text, add_special_tokens=False)["input_ids"] + end


def pack(
    documents: Sequence[np.ndarray], lengths: np.ndarray, seq_length: int, seed: int
) -> Source:
    """Sequences of documents laid end to end; each epoch has orders of its own of both.

    Documents are read when a sequence needs them.
    """
    per_epoch = (int(lengths.sum()) - 1) // seq_length
    epochs: dict[int, tuple[np.ndarray, np.ndarray, np.ndarray]] = {}

    def orders(epoch: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Documents in order, the end of each in tokens, and the order of the sequences cut from
        them.
        """
        if epoch not in epochs:
            epochs.clear()
            random = np.random.RandomState([seed, epoch])
            order = random.permutation(len(lengths))
            epochs[epoch] = order, np.cumsum(lengths[order]), random.permutation(per_epoch)
        return epochs[epoch]

    def sequence(number: int) -> np.ndarray:
        order, ends, shuffled = orders(number // per_epoch)
        start = int(shuffled[number % per_epoch]) * seq_length
        first, last = np.searchsorted(ends, [start, start + seq_length], side="right")
        text = np.concatenate(
            [np.asarray(documents[int(order[i])], np.int64) for i in range(first, last + 1)]
        )
        skipped = start - (int(ends[first - 1]) if first else 0)
        return text[skipped : skipped + seq_length + 1]

    return sequence


def bounded(source: Source, vocab: int, path: str) -> Source:
    def sequence(number: int) -> np.ndarray:
        tokens = source(number)
        if tokens.min() < 0 or tokens.max() >= vocab:
            raise UsageError(
                f"{path} holds token {tokens.max()}; the model's vocabulary ends at {vocab - 1}"
            )
        return tokens

    return sequence


def mock(vocab: int, seq_length: int, seed: int) -> Source:
    """A random walk over the vocabulary: each token is followed by one of BRANCHES others, fixed by
    the seed, so there is much to learn.
    """
    following = np.random.RandomState([seed, 0]).randint(0, vocab, (vocab, BRANCHES))

    def sequence(number: int) -> np.ndarray:
        random = np.random.RandomState([seed, 1 + number])
        choices = random.randint(0, BRANCHES, seq_length)
        tokens = np.empty(seq_length + 1, np.int64)
        tokens[0] = random.randint(vocab)
        for i, choice in enumerate(choices):
            tokens[i + 1] = following[tokens[i], choice]
        return tokens

    return sequence
