"""Megatron-Bridge as a judge: converts many Hugging Face models to torch_dist in one process: a
program of tests/helpers/session.py.

It runs in an environment of its own, which CONTRIBUTING.md describes. A case is a dict with these
entries; the results stand behind the arrow:

    name        of the case
    source      Hugging Face directory
    destination the save directory that Megatron-Bridge makes
                -> supported: false if Megatron-Bridge has no class for the architecture
    checkpoint  a checkpoint of source, instead of destination: Megatron-Bridge loads it by its
                run_config.yaml and exports it
                -> equal: number of exported tensors with the bits of source; differ: the others
                -> step: of the checkpoint's train state
    forward     with a checkpoint: true
                -> unloaded: parameters that the checkpoint did not fill
                -> difference: largest difference of a logit from transformers; largest: of a logit
    image       with a checkpoint of a whole model: true; the logits are those of text and an image
                -> difference, largest as above; image, text: the difference at these positions

out_dir/NAME.json: ok, error {"0": warnings of Megatron-Bridge and traceback}, and the results.
"""

from __future__ import annotations

import contextlib
import gc
import inspect
import json
import logging
import os
import sys
import tempfile
import threading
import time
import traceback
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from benchmarks import peers
from tests.helpers import renamed, tiny


def prepare() -> None:
    sys.meta_path.append(peers.StandIns())
    peers.without_gpu()
    without_kernels()
    published_configs()
    sizes_of_two_kinds_of_layers()
    part_of_heads_with_rope()


def run(cases: list[dict[str, Any]], out: Path) -> int:
    threading.Thread(target=die_with, args=(int(os.environ["JUDGE_PARENT"]),), daemon=True).start()
    said = Warnings()
    logging.getLogger("megatron.bridge").addHandler(said)
    for case in cases:
        said.lines.clear()
        # a model sets them for its attention, and another one refuses them
        for name in ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN"):
            os.environ.pop(name, None)
        try:
            source = Path(case["source"])
            if "checkpoint" in case:
                found = load(
                    source,
                    Path(case["checkpoint"]),
                    forward=case.get("forward", False),
                    image=case.get("image", False),
                    exported=case.get("exported", True),
                )
            else:
                found = convert(source, Path(case["destination"]))
            result = {"ok": True, **found}
        except Exception:  # of any kind: the next models still run, and the test reads this one
            result = {
                "ok": False,
                "error": {"0": "\n".join([*said.lines, traceback.format_exc()])},
            }
        text = json.dumps({"name": case["name"], **result})
        (out / f"{case['name']}.json").write_text(text)
        gc.collect()
    return 0


class Warnings(logging.Handler):
    """Keeps the warnings. Megatron-Bridge warns of a parameter without a mapping, and fails later
    without naming it.
    """

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def without_device(packages: tuple[str, ...]) -> None:
    """Lets programs of ms-swift, which move modules to a GPU, run on CPU.

    packages: those that they import and do not use, for which stand-ins are made.
    """
    from mckpt.trainer import cpu

    peers.StandIns.packages += packages
    sys.meta_path.append(peers.StandIns())
    peers.without_gpu()
    without_kernels()
    cpu.install()
    move = torch.Tensor.to
    # mypy does not allow to replace a method
    torch.Tensor.to = lambda self, *to, **named: (  # type: ignore[method-assign]
        self if to == ("cuda",) else move(self, *to, **named)
    )


def without_kernels() -> None:
    """Lets gated delta nets and Mamba layers be built without FLA and mamba_ssm, whose kernels no
    conversion calls.
    """
    from mckpt.trainer import mamba

    mamba.install()
    from megatron.core.ssm import gated_delta_net

    for name, module in list(sys.modules.items()):
        if name.startswith(gated_delta_net.__name__):
            for kernel in ("HAVE_FLA", "causal_conv1d", "l2norm", "chunk_gated_delta_rule"):
                if not getattr(module, kernel, True):
                    setattr(module, kernel, NotImplemented)


def published_configs() -> None:
    """Registers the config classes of models whose Python is published beside their weights. MiMo's
    is that of Qwen2 with the number of layers of multi-token prediction.
    """
    from transformers import AutoConfig, PreTrainedConfig, Qwen2Config

    class MiMoConfig(Qwen2Config):
        model_type = "mimo"

    class Published(PreTrainedConfig):
        def convert_rope_params_to_dict(self, **more: Any) -> dict[str, Any]:
            return more  # rope_theta and rope_scaling stay attributes, as in transformers 4

    class Block(dict[str, Any]):
        """A part of block_configs, whose keys are attributes in configuration_decilm.py."""

        def __getattr__(self, name: str) -> Any:
            if name not in self:
                raise AttributeError(name)
            value = self[name]
            return Block(value) if isinstance(value, dict) else value

    class DeciLMConfig(Published):
        model_type = "nemotron-nas"

        def __post_init__(self, **more: Any) -> None:
            blocks = [Block(block) for block in more.pop("block_configs", [])]
            super().__post_init__(block_configs=blocks, **more)

    class SarvamMLAConfig(Published):
        model_type = "sarvam_mla"

    class SarvamMoEConfig(Published):
        model_type = "sarvam_moe"

    for kind in (MiMoConfig, DeciLMConfig, SarvamMLAConfig, SarvamMoEConfig):
        AutoConfig.register(kind.model_type, kind)


def sizes_of_two_kinds_of_layers() -> None:
    """Lets Megatron-Bridge, which is made for transformers 5.12, read the sizes of Gemma 4's layers
    under the keys of config.json. transformers 5.23 moves them to one config for each layer.
    """
    from transformers import Gemma4TextConfig

    made = Gemma4TextConfig.__post_init__

    def with_keys(self: Any, **more: Any) -> None:
        keys = {"global_head_dim": 512, "num_global_key_value_heads": None}
        stated = {key: more.get(key, default) for key, default in keys.items()}
        made(self, **more)
        self.allow_global_per_layer_attribute_access = True
        for key, value in stated.items():
            setattr(self, key, value)

    if not hasattr(Gemma4TextConfig, "global_head_dim"):
        Gemma4TextConfig.__post_init__ = with_keys


def part_of_heads_with_rope() -> None:
    """Lets Megatron-Bridge read partial_rotary_factor of GLM-4.5V where transformers 5.23 does not
    have it: beside rope_parameters.
    """
    from transformers import Glm4vMoeTextConfig

    made = Glm4vMoeTextConfig.__post_init__

    def with_part(self: Any, **more: Any) -> None:
        made(self, **more)
        self.partial_rotary_factor = self.rope_parameters["partial_rotary_factor"]

    if not hasattr(Glm4vMoeTextConfig, "partial_rotary_factor"):
        Glm4vMoeTextConfig.__post_init__ = with_part


def die_with(parent: int) -> None:
    """Ends this process when the process that started it has ended."""
    while True:
        time.sleep(1)
        with contextlib.suppress(PermissionError):
            try:
                os.kill(parent, 0)
            except ProcessLookupError:
                os._exit(1)


def convert(source: Path, destination: Path) -> dict[str, Any]:
    """Does the steps of AutoBridge.import_ckpt, in fp32, which some bridges do not take from the
    config. It does not save the tokenizer, because the tiny models have none.
    """
    from megatron.bridge import AutoBridge
    from megatron.bridge.training.model_load_save import temporary_distributed_context
    from transformers import dynamic_module_utils

    config = json.loads((source / "config.json").read_text())
    if config["architectures"][0] not in AutoBridge.list_supported_models():
        return {"supported": False}
    dynamic_module_utils.HF_MODULES_CACHE = str(destination.parent)
    own = any(source.glob("modeling_*.py"))  # the tests wrote it
    with temporary_distributed_context("gloo"):
        bridge = AutoBridge.from_hf_pretrained(
            source, torch_dtype=torch.float32, trust_remote_code=own
        )
        provider = bridge.to_megatron_provider()
        provider.params_dtype, provider.bf16, provider.fp16 = torch.float32, False, False
        # some bridges choose one that is not installed, and no conversion calls it
        provider.moe_token_dispatcher_type = "alltoall"
        provider.finalize()
        model = provider.provide_distributed_model(wrap_with_ddp=False, use_cpu_initialization=True)
        bridge.save_megatron_model(model, destination, low_memory_save=True)
    return {"supported": True}


def load(
    source: Path, checkpoint: Path, *, forward: bool, image: bool, exported: bool
) -> dict[str, Any]:
    """Loads a checkpoint by its run_config.yaml, exports it to Hugging Face as
    AutoBridge.export_ckpt does, and compares every tensor of `source` with the result. All
    parameters are NaN before.

    forward: also compares the logits with those that transformers computes of `source`. exported:
        False for a model of which Megatron-Bridge has no names of Hugging Face.
    """
    from megatron.bridge import AutoBridge
    from megatron.bridge.training import checkpointing
    from megatron.bridge.training.checkpointing import _get_train_state_from_state_dict
    from megatron.bridge.training.model_load_save import temporary_distributed_context
    from megatron.bridge.training.utils.checkpoint_utils import read_train_state
    from megatron.core import dist_checkpointing
    from safetensors.torch import load_file

    wanted: dict[str, torch.Tensor] = {}
    for path in sorted(source.glob("*.safetensors")):
        wanted |= load_file(path)
    differ, equal = [], 0
    with temporary_distributed_context("gloo"):
        bridge = AutoBridge.from_hf_pretrained(source, torch_dtype=torch.float32)
        with mock.patch.object(
            checkpointing,
            "_load_model_weights_from_checkpoint",
            filled_before(checkpointing._load_model_weights_from_checkpoint),
        ):
            model = bridge.load_megatron_model(checkpoint, wrap_with_ddp=False)
        unloaded = [name for name, p in model[0].named_parameters() if p.isnan().any()]
        judged = compare_logits(source, model[0]) if forward else {}
        judged |= compare_with_image(source, model[0]) if image else {}
        exports = bridge.export_hf_weights(model, cpu=True, show_progress=False) if exported else ()
        for name, found in exports:
            expected = wanted.pop(name, None)
            if expected is None:
                differ.append(f"{name}: not in the source")
            elif (found.shape, found.dtype) != (expected.shape, expected.dtype):
                differ.append(f"{name}: {list(found.shape)} {found.dtype}")
            elif not torch.equal(
                found.contiguous().view(torch.uint8), expected.contiguous().view(torch.uint8)
            ):
                differ.append(f"{name}: other bits")
            else:
                equal += 1
    state = checkpoint / "train_state.pt"
    common = dist_checkpointing.load_common_state_dict(str(checkpoint))
    train = read_train_state(str(state)) if state.exists() else None
    train = train or _get_train_state_from_state_dict(common)
    left = [f"{name}: not exported" for name in wanted]
    return {
        "equal": equal,
        "differ": differ + left * exported,
        "step": train.step,
        "unloaded": unloaded,
        **judged,
    }


def filled_before(load_weights: Any) -> Any:
    """Returns a function that fills all parameters with NaN, and then loads them."""

    def filled(path: Any, model: Any, **more: Any) -> Any:
        with torch.no_grad():
            for parameter in model[0].parameters():
                parameter.fill_(float("nan"))
        return load_weights(path, model, **more)

    return filled


def reference_of(source: Path) -> Any:
    """Returns the model as transformers computes it."""
    published = json.loads((source / "config.json").read_text())
    kind = tiny.class_of(published)
    with tempfile.TemporaryDirectory() as folder:
        return kind.from_pretrained(
            renamed.for_transformers(source, Path(folder) / "hf"),
            config=kind.config_class.from_dict(renamed.config(published)),
            dtype=torch.float32,
            attn_implementation="eager",
        ).eval()


def noise(config: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor], torch.Tensor]:
    """Returns tokens [1, length] with an image of noise among them, the image as the model takes
    it, and the places of the image [1, length].
    """
    drawn = torch.manual_seed(3)
    stated = {v for k, v in config.to_dict().items() if "token" in k and isinstance(v, int)}
    words = torch.tensor([n for n in range(config.get_text_config().vocab_size) if n not in stated])
    vision = config.vision_config
    if grid := hasattr(vision, "spatial_merge_size"):
        side, patch = 2 * vision.spatial_merge_size, vision.temporal_patch_size
        patch *= 3 * vision.patch_size**2
        more = {
            "pixel_values": torch.randn(side * side, patch, generator=drawn),
            "image_grid_thw": torch.tensor([[1, side, side]]),
        }
        count = side * side // vision.spatial_merge_size**2
    else:
        size, patch = (
            n if isinstance(n, int) else n[0] for n in (vision.image_size, vision.patch_size)
        )
        more = {
            "pixel_values": torch.randn(1, 3, size, size, generator=drawn),
            "image_sizes": torch.tensor([[size, size]]),
        }
        ratio = getattr(config, "downsample_ratio", getattr(vision, "pixel_shuffle_ratio", 0))
        if merged := getattr(config, "spatial_merge_size", 0):
            count = (size // patch // merged) ** 2
        elif ratio:
            count = int(size // patch * ratio) ** 2
        else:
            count = config.mm_tokens_per_image
    edges: list[list[int]] = [[], []]
    if grid:
        named = "vision" if hasattr(config, "vision_start_token_id") else "image"
        edges = [[getattr(config, f"{named}_{end}_token_id")] for end in ("start", "end")]
    text = words[torch.randint(len(words), (2, 8), generator=drawn)].tolist()
    places = [config.image_token_id] * count
    tokens = torch.tensor([[*text[0], *edges[0], *places, *edges[1], *text[1]]])
    return tokens, more, tokens == config.image_token_id


def compare_with_image(source: Path, model: Any) -> dict[str, float]:
    """Returns the largest difference between the logits of Megatron-Bridge's whole model and those
    of transformers, for text with an image: of all positions, of the image and of the text.
    """
    reference = reference_of(source)
    tokens, more, image = noise(reference.config)
    for module in model.modules():
        if hasattr(module, "config"):
            with contextlib.suppress(AttributeError):
                module.config.apply_rope_fusion = module.config.moe_permute_fusion = False
        if type(module).__name__ == "Qwen3VLVisionPatchMerger":
            # Megatron-Bridge takes the approximation by tanh here, and transformers does not
            module.activation_func = torch.nn.functional.gelu
    kinds = {"token_type_ids": image.long(), "mm_token_type_ids": image.int()}

    def known(function: Any) -> dict[str, torch.Tensor]:
        names = inspect.signature(function).parameters
        return {name: value for name, value in (more | kinds).items() if name in names}

    length = tokens.shape[1]
    hidden = ~torch.ones(1, 1, length, length, dtype=torch.bool).tril()
    own_mask = "position_embedding_type" in vars(model)  # it makes its mask from the tokens
    with torch.no_grad():
        wanted = reference(
            input_ids=tokens, attention_mask=torch.ones_like(tokens), **known(reference.forward)
        ).logits
        found = model.eval()(
            input_ids=tokens,
            position_ids=None,
            attention_mask=None if own_mask else hidden,
            **known(model.forward),
        )
        found = (found[0] if isinstance(found, tuple) else found)[..., : wanted.shape[-1]]
    apart = (found - wanted).abs().amax(-1)
    return {
        "difference": apart.max().item(),
        "image": apart[image].max().item(),
        "text": apart[~image].max().item(),
        "largest": wanted.abs().max().item(),
    }


def compare_logits(source: Path, model: Any) -> dict[str, float]:
    """Returns the largest difference between the logits of Megatron-Bridge's model and those of
    transformers, and the largest logit.
    """
    reference = reference_of(source)
    config = reference.config
    length = min(config.max_position_embeddings, 96)
    tokens = torch.randint(config.vocab_size, (2, length), generator=torch.manual_seed(1))
    positions = torch.arange(length)[None].expand(2, -1)
    hidden = ~torch.ones(1, 1, length, length, dtype=torch.bool).tril()  # of later positions
    for module in model.modules():  # layers that differ have configs of their own
        if hasattr(module, "config"):
            # their kernels run on GPUs only
            module.config.apply_rope_fusion = module.config.moe_permute_fusion = False
    with torch.no_grad():
        wanted = reference(tokens).logits
        found = model.eval()(tokens, positions, hidden)[..., : config.vocab_size]
    return {
        "difference": (found - wanted).abs().max().item(),
        "largest": wanted.abs().max().item(),
    }
