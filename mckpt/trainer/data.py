"""Token sequences to train on, from Megatron's .bin/.idx, from JSONL, or made up.

They depend on the seed and not on the parallel sizes. A source returns sequence i as seq_length + 1
tokens, of which the last seq_length are the labels of the first. Documents are put in a seeded
order, laid end to end, and cut. The last token of a sequence is the first of the next one, so every
token but one is a label once in each epoch.
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

BRANCHES = 4  # of each token in `mock`, so that the loss falls from log(vocab) to log(4) = 1.39


def open_source(
    path: str | None, args: Namespace, seq_length: int, seed: int, tokenizer: str | None = None
) -> Source:
    """Opens `path`: a .jsonl file, the prefix of a .bin and .idx (or either of these), or None or
    "mock" for made-up text. Raises UsageError if there is no data or not one whole sequence.
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
    """Reads the documents of a JSONL file: "tokens" or "input_ids" as they are, or "text" as the
    tokenizer encodes it, followed by the tokenizer's end of text.
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
                raise UsageError(f"{path}, line {number}: not valid JSON: {e}") from None
            if not isinstance(record, dict):
                raise UsageError(
                    f'{path}, line {number}: is not an object with "text", "tokens" or "input_ids"'
                )
            tokens = record.get("tokens", record.get("input_ids"))
            if tokens is None and "text" in record:
                if encode is None:
                    encode = text_encoder(tokenizer, path)
                tokens = encode(record["text"])
            if tokens is None:
                raise UsageError(
                    f'{path}, line {number}: has none of "text", "tokens", "input_ids"'
                )
            documents.append(np.asarray(tokens, np.int64))
    return documents


def text_encoder(tokenizer: str | None, path: Path) -> Callable[[str], list[int]]:
    """Returns a function from text to tokens. Raises UsageError without a tokenizer."""
    if tokenizer is None:
        raise UsageError(f"{path} holds text: name the directory of its tokenizer")
    from transformers import AutoTokenizer

    loaded = AutoTokenizer.from_pretrained(tokenizer)
    end = [] if loaded.eos_token_id is None else [loaded.eos_token_id]
    return lambda text: loaded(text, add_special_tokens=False)["input_ids"] + end


def pack(
    documents: Sequence[np.ndarray], lengths: np.ndarray, seq_length: int, seed: int
) -> Source:
    """Returns a source of documents laid end to end. Each epoch has its own order of documents and
    of sequences. Documents are read when a sequence needs them.
    """
    per_epoch = (int(lengths.sum()) - 1) // seq_length
    epochs: dict[int, tuple[np.ndarray, np.ndarray, np.ndarray]] = {}

    def orders(epoch: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns the documents in order, where each ends in tokens, and the order of sequences."""
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
    """Returns the source with a check: UsageError for a token outside the vocabulary."""

    def sequence(number: int) -> np.ndarray:
        tokens = source(number)
        if tokens.min() < 0 or tokens.max() >= vocab:
            raise UsageError(
                f"{path} holds token {tokens.max()}; the model's vocabulary ends at {vocab - 1}"
            )
        return tokens

    return sequence


def mock(vocab: int, seq_length: int, seed: int) -> Source:
    """Returns a random walk over the vocabulary. One of BRANCHES tokens follows each token, and the
    seed fixes which, so a model can learn them.
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
