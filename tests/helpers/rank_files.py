"""Saves a Hugging Face model as the ranks of a training by torch's FSDP2 do, each its own part.

    PYTHONPATH=. python -m tests.helpers.rank_files HF_DIR OUT [titan | steps | weights]

OUT/verl       model_world_size_4_rank_R.pt, optim_* and fsdp_config.json, mesh ("fsdp",)
OUT/hsdp       the same, mesh ("ddp", "fsdp")
OUT/columns    the same, mesh ("fsdp",), the up projections cut in columns
OUT/model      shard-*.safetensors of torch's HuggingFaceStorageWriter, in two files each
               (with `weights` only OUT/verl and OUT/model, without an optimizer; of a Llama also
               OUT/titan/step-10 in the names of torchtitan, and its first layers as OUT/universal,
               of DeepSpeed, with their config in OUT/universal/hf)
OUT/step-10    with `titan`, this one alone: what torchtitan saves, in the names of HF_DIR
OUT/verl/global_step_N/actor, OUT/hsdp/... with `steps`, these alone: what verl saves after steps 3
               and 4 of a training in fp32, and in OUT/STATE-N the whole state, as torch gathers it
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard

WORLD = 4


def model_of(arrays: dict[str, torch.Tensor]) -> torch.nn.Module:
    """Returns a module whose parameters have these names."""
    root = torch.nn.Module()
    for name, value in arrays.items():
        *path, last = name.split(".")
        module = root
        for part in path:
            if part not in dict(module.named_children()):
                module.add_module(part, torch.nn.Module())
            module = module.get_submodule(part)
        module.register_parameter(last, torch.nn.Parameter(value.clone()))
    return root


def stepped(model: torch.nn.Module) -> torch.optim.Optimizer:
    """Returns an optimizer after a step with made-up gradients, which leaves the weights alone."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, weight_decay=0.0)
    for parameter in model.parameters():
        parameter.grad = parameter.detach() * 3
    optimizer.step()
    return optimizer


def save_titan(rank: int, arrays: dict[str, torch.Tensor], out: Path) -> None:
    """Saves as torchtitan does (components/checkpointer/dcp.py, components/optimizer/utils.py)."""
    dist.init_process_group("gloo", f"file://{out}/meeting", rank=rank, world_size=WORLD)
    biases = {key: value for key, value in arrays.items() if key.endswith("expert_bias_E")}
    model = model_of({key: value for key, value in arrays.items() if key not in biases})
    fully_shard(model, mesh=init_device_mesh("cpu", (WORLD,), mesh_dim_names=("fsdp",)))
    optimizer = stepped(model)
    state: dict[str, Any] = {}
    for name, parameter in model.named_parameters():
        own = optimizer.state[parameter]
        state |= {f"state.{name}.{key}": value for key, value in own.items()}
        settings = {**optimizer.param_groups[0], "lr": 2e-4, "initial_lr": 3e-4}
        settings["weight_decay"] = 0.1 if parameter.ndim > 1 else 0.0
        state |= {f"param_groups.{name}.{k}": v for k, v in settings.items() if k != "params"}
    saved = {
        "optimizer": state,
        "lr_scheduler": {"last_epoch": 10},
        "train_state": {"step": torch.tensor(10, dtype=torch.int32)},
        "dataloader": {f"dp_rank_{rank}": b"x"},
        **model.state_dict(),
        **biases,
    }
    dcp.save(saved, checkpoint_id=out / "step-10")
    dist.barrier()  # a rank that ends would refuse a slower one
    dist.destroy_process_group()


def train(rank: int, arrays: dict[str, torch.Tensor], out: Path) -> None:
    """Saves as verl does (verl/utils/checkpoint/fsdp_checkpoint_manager.py)."""
    dist.init_process_group("gloo", f"file://{out}/meeting", rank=rank, world_size=WORLD)
    one = init_device_mesh("cpu", (WORLD,), mesh_dim_names=("fsdp",))
    two = init_device_mesh("cpu", (2, WORLD // 2), mesh_dim_names=("ddp", "fsdp"))
    for name, mesh in (("verl", one), ("hsdp", two)):
        model = model_of({key: value.float() for key, value in arrays.items()})
        if "lm_head.weight" not in arrays:  # tied: a further name of the same parameter
            head = model.get_parameter("model.embed_tokens.weight")
            model.add_module("lm_head", torch.nn.Module())
            model.get_submodule("lm_head").register_parameter("weight", head)
        attention = model.get_submodule("model.layers.0.self_attn")
        attention.add_module("rotary_emb", torch.nn.Module())
        attention.get_submodule("rotary_emb").register_buffer("inv_freq", torch.ones(4))
        for layer in model.get_submodule("model.layers").children():
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3, (0.9, 0.95), weight_decay=0.1)
        for step in range(1, 5):
            for number, parameter in enumerate(model.parameters()):
                parameter.grad = (parameter.detach() + number / 100) * step
            optimizer.step()
            if step >= 3:
                folder = out / name / f"global_step_{step}/actor"
                folder.mkdir(parents=True, exist_ok=True)
                ending = f"world_size_{WORLD}_rank_{rank}.pt"
                torch.save(model.state_dict(), folder / f"model_{ending}")
                torch.save(optimizer.state_dict(), folder / f"optim_{ending}")
                torch.save({"lr_scheduler": {}, "rng": {}}, folder / f"extra_state_{ending}")
                gathered = StateDictOptions(full_state_dict=True)
                whole: Any = get_optimizer_state_dict(model, optimizer, options=gathered)["state"]
                for state in ("exp_avg", "exp_avg_sq") if rank == 0 and name == "verl" else ():
                    (out / f"{state}-{step}").mkdir()
                    values = {key: whole[key][state].contiguous() for key in arrays}
                    save_file(values, out / f"{state}-{step}/model.safetensors")
    dist.barrier()  # a rank that ends would refuse a slower one
    dist.destroy_process_group()


def by_columns(parameter: torch.nn.Parameter) -> Shard | None:
    return Shard(1) if parameter.ndim == 2 and parameter.shape[0] == 10 else None


def save(
    rank: int,
    arrays: dict[str, torch.Tensor],
    out: Path,
    titan: dict[str, torch.Tensor] | None = None,
) -> None:
    """titan: the same in the names of torchtitan; only weights are saved then."""
    dist.init_process_group("gloo", f"file://{out}/meeting", rank=rank, world_size=WORLD)
    one = init_device_mesh("cpu", (WORLD,), mesh_dim_names=("fsdp",))
    two = init_device_mesh("cpu", (2, WORLD // 2), mesh_dim_names=("ddp", "fsdp"))
    for name, mesh, placed in (
        ("verl", one, None),
        ("hsdp", two, None),
        ("columns", one, by_columns),
    )[: 1 if titan else 3]:
        model = model_of(arrays)
        fully_shard(model, mesh=mesh, shard_placement_fn=placed)
        folder = out / name
        folder.mkdir(exist_ok=True)
        torch.save(model.state_dict(), folder / f"model_world_size_{WORLD}_rank_{rank}.pt")
        if not titan:
            state = stepped(model).state_dict()
            torch.save(state, folder / f"optim_world_size_{WORLD}_rank_{rank}.pt")
        if name == "verl":
            index = {key: 1 + number % 2 for number, key in enumerate(arrays)}
            writer = dcp.HuggingFaceStorageWriter(str(out / "model"), index, save_distributed=True)
            dcp.save(model.state_dict(), storage_writer=writer)
    if titan:
        fully_shard(model := model_of(titan), mesh=one)
        dcp.save(model.state_dict(), checkpoint_id=out / "titan/step-10")
    dist.barrier()  # a rank that ends would refuse a slower one
    dist.destroy_process_group()


def save_universal(arrays: dict[str, torch.Tensor], hf: Path, out: Path) -> None:
    """Saves the first third of the layers and the rest of the model as DeepSpeed does. The moments
    are links to the weights, because nothing reads them.
    """
    config = json.loads((hf / "config.json").read_text())
    config |= {"num_hidden_layers": config["num_hidden_layers"] // 3, "torch_dtype": "float32"}
    (out / "first").mkdir()
    (out / "first/config.json").write_text(json.dumps(config))
    shapes = {}
    for name, value in arrays.items():
        number = re.search(r"layers\.(\d+)\.", name)
        if number and int(number[1]) >= config["num_hidden_layers"]:
            continue
        shapes[name], folder = value.shape, out / "universal/zero" / name
        folder.mkdir(parents=True)
        with open(folder / "fp32.pt", "wb") as file:  # which has no name inside, for the links
            torch.save({"param": value.float()}, file)
        for moment in ("exp_avg.pt", "exp_avg_sq.pt"):
            (folder / moment).symlink_to("fp32.pt")
    model = {"param_shapes": [shapes], "global_steps": 7}
    torch.save(model, out / "universal/mp_rank_00_model_states.pt")
    group = {"lr": 2e-4, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1, "step": 7}
    torch.save({"param_groups": [group], "state": {}}, out / "universal/zero/optimizer_state.pt")


def main(hf: Path, out: Path, kind: str = "") -> None:
    out = out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    arrays: dict[str, Any] = {}
    for file in sorted(hf.glob("*.safetensors")):
        arrays |= load_file(file)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    only: Any = save
    if kind == "weights":
        from tests.helpers.titan_steps import titan

        torch.set_num_threads(1)
        only = partial(save, titan=titan(arrays, json.loads((hf / "config.json").read_text())))
    each = {"titan": save_titan, "steps": train, "weights": only, "": save}[kind]
    mp.start_processes(each, (arrays, out), nprocs=WORLD, start_method="fork")
    if kind == "weights":  # after the forks, which survive no threads
        save_universal(arrays, hf, out)
    for actor in out.glob("*/global_step_*/actor"):
        (actor / "fsdp_config.json").write_text(json.dumps({"world_size": WORLD}))
        shutil.copytree(hf, actor / "huggingface", ignore=shutil.ignore_patterns("*.safetensors"))
    for state in out.glob("exp_avg*"):
        shutil.copy(hf / "config.json", state)
    if kind in ("titan", "steps"):
        return
    for name in ("verl",) if kind else ("verl", "hsdp", "columns"):
        facts = {"FSDP_version": 2, "world_size": WORLD}
        (out / name / "fsdp_config.json").write_text(json.dumps(facts))
        shutil.copytree(
            hf, out / name / "huggingface", ignore=shutil.ignore_patterns("*.safetensors")
        )
    shutil.copytree(hf, out / "model/.hf_metadata", ignore=shutil.ignore_patterns("*.safetensors"))


def prepare() -> None:
    """Does nothing: this module has imported all that its ranks need."""


def run(cases: list[dict[str, Any]], out: Path) -> int:
    """Saves the model in out/hf: as a program of tests/helpers/session.py."""
    for case in cases:
        main(out / "hf", out, case["kind"])
    return 0


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:])
