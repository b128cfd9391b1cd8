"""Megatron-Core's T5Model on torch_dist checkpoints, for tests/judge/test_t5.py: a kind of case of
tests/helpers/judge.py.

A case has `hf`, the Hugging Face directory; `checkpoint`, and `torch`, the same model in `torch`
files, whose keys and values must be those of each rank's model; `tokens` of the encoder, and
`answer`, those of the decoder; `given`, settings of the model that pretrain_t5.py has no flags for;
`saved`, where Megatron-Core saves the model again; and `tp`. Its logits are those of the decoder.

Megatron-Core's own attention on CPU takes no scores by distance. Explicit puts the formula in its
place, as the layer's spec allows.
"""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file

from mckpt import live, mapping


class Explicit(torch.nn.Module):
    """softmax(scale q k + distances) v, for q, k and v of [positions, batch, heads, width]."""

    def __init__(self, config: Any, *args: Any, **options: Any) -> None:
        super().__init__()
        scale = config.softmax_scale
        self.scale = config.kv_channels**-0.5 if scale is None else scale

    def forward(
        self, q: Any, k: Any, v: Any, mask: Any, attention_bias: Any = None, **more: Any
    ) -> torch.Tensor:
        scores = torch.einsum("qbhd,kbhd->bhqk", q * self.scale, k)
        if attention_bias is not None:
            scores = scores + attention_bias
        seen = scores.masked_fill(mask, float("-inf")).softmax(-1)
        return torch.einsum("bhqk,kbhd->qbhd", seen, v).flatten(2)


def build(args: Namespace, given: dict[str, Any]) -> Any:
    from megatron.core.models.T5 import t5_spec
    from megatron.core.models.T5.t5_model import T5Model
    from megatron.core.transformer.torch_norm import WrappedTorchNorm
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

    from mckpt.trainer.build import transformer_config

    t5_spec.LNImpl = WrappedTorchNorm
    functions = {
        "relu": torch.relu,
        "gelu_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
    }
    configs = []
    for num_layers in (args.decoder_num_layers, args.encoder_num_layers):
        args.num_layers = num_layers
        config = transformer_config(args, torch.float32)
        for name, value in given.items():
            assert hasattr(config, name)
            setattr(config, name, functions.get(value, value))
        configs.append(config)
    stacks = []
    for spec, config in zip(
        (t5_spec.encoder_model_with_local_spec(), t5_spec.decoder_model_with_local_spec()),
        reversed(configs),
        strict=True,
    ):
        spec.submodules.self_attention.submodules.core_attention = Explicit
        if config is configs[0]:
            spec.submodules.cross_attention.submodules.core_attention = Explicit
        layers = [spec] * config.num_layers
        stacks.append(TransformerBlockSubmodules(layers, layer_norm=WrappedTorchNorm))
    return T5Model(
        *configs,
        *stacks,
        args.padded_vocab_size,
        args.max_position_embeddings,
        position_embedding_type=args.position_embedding_type,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        relative_attention_num_buckets=args.relative_attention_num_buckets,
        relative_attention_max_distance=args.relative_attention_max_distance,
        parallel_output=False,
    ).eval()


@torch.no_grad()
def check_live(model: Any, own: dict[str, torch.Tensor], hf: str) -> None:
    """Checks that mckpt.live fills the model from a Hugging Face directory with the bits that it
    has, and gives the tensors of that directory.
    """
    wanted = {key: value.clone() for key, value in own.items()}
    for parameter in model.parameters():
        parameter.fill_(float("nan"))
    live.load([model], hf)
    assert all(torch.equal(own[key], wanted[key]) for key in own)
    listed = {file: load_file(file) for file in Path(hf).glob("*.safetensors")}
    theirs = {name: value for tensors in listed.values() for name, value in tensors.items()}
    for name, tensor in live.Sync([model], like=hf, allow_inexact=["activation"])():
        assert torch.equal(tensor, theirs.pop(name)), name
    assert not theirs.keys() - {"encoder.embed_tokens.weight", "decoder.embed_tokens.weight"}


def run(job: Any, args: Namespace) -> dict[str, Any]:
    """Runs a case of judge.py on one rank, whose process groups are there."""
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.validation import StrictHandling

    directory = f"{job['checkpoint']}/release"
    model = build(args, job["given"])
    # flat buffers of an optimizer have the parameters in this order
    parameters = [name for name, _ in model.named_parameters()]
    assert mapping.load("megatron", "t5").registration.sorted(parameters) == parameters
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(float("nan"))
    wanted = model.sharded_state_dict()
    state, missing, unread = dist_checkpointing.load(
        wanted, directory, strict=StrictHandling.RETURN_ALL
    )
    assert not [key for key in missing if "_extra_state" not in key], missing
    assert not [key for key in unread if "_extra_state" not in key], unread
    weights = {key: state[key] for key in wanted if "_extra_state" not in key}
    found = model.load_state_dict(weights, strict=False)
    assert not [key for pair in found for key in pair if "_extra_state" not in key], found
    own = {k: v for k, v in model.state_dict().items() if "_extra_state" not in k}
    file = f"{job['torch']}/release/mp_rank_{job.rank:02d}/model_optim_rng.pt"
    stored = torch.load(file, weights_only=False)["model"]
    assert own.keys() == {k for k in stored if "_extra_state" not in k}
    assert all(torch.equal(own[key], stored[key]) for key in own)
    check_live(model, own, job["hf"])
    args.num_layers = args.encoder_num_layers
    saved = Path(job["saved"]) / "release"
    if job.rank == 0:
        saved.mkdir(parents=True)
        (saved.parent / "latest_checkpointed_iteration.txt").write_text("release")
    dist.barrier()
    common = {"args": args, "checkpoint_version": 3.0, "iteration": 0}
    dist_checkpointing.save({**common, **model.sharded_state_dict()}, str(saved))
    tokens, answer = torch.tensor(job["tokens"]), torch.tensor(job["answer"])
    read, length = tokens.shape[1], answer.shape[1]
    later = torch.ones(length, length, dtype=torch.bool).triu(1)[None, None]
    with torch.no_grad():
        logits = model(
            tokens,
            answer,
            torch.zeros(1, 1, read, read, dtype=torch.bool),
            later,
            torch.zeros(1, 1, length, read, dtype=torch.bool),
        )
    job.keep(logits[..., : args.vocab_size])
    return {}
