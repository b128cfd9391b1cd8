"""An image of noise among text, as both sides of a verdict take it.

transformers' whole model runs it once. `Image` keeps what then enters its text model: a feature at
each place of the image, the positions, and the features that are added behind the first layers.
Every run that is compared, of transformers and of Megatron-Core, takes these. So the comparison is
one of the text models; towers are compared by their values.

    <text> <image> ... <image> <text>     a grid of GRID features, one in each place of the image

Models with M-RoPE have three positions for each place: time, row and column. Each frequency of the
rotary embedding belongs to one of the three.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mckpt.errors import MappingError, SourceError
from mckpt.trainer import hybrid

SEED = 3
AROUND = 16  # tokens of text before the image, and behind it
GRID = (6, 10)  # rows and columns of features, as far as the model takes images of any size
FILE = "image.npz"  # beside the logits of transformers
LEAVE_OUT = "leave --image out, and the text model is verified without an image"
# the keyword arguments of a text model that Megatron-Core's can be given too
KNOWN = {"inputs_embeds", "position_ids", "visual_pos_masks", "deepstack_visual_embeds"}
# keys of a config with the token at each place of an image, and those before and behind it
PLACES = ("image_token_id", "image_token_index", "media_placeholder_token_id")
BEGINS = ("vision_start_token_id", "image_start_token_id", "boi_token_index")
ENDS = ("vision_end_token_id", "image_end_token_id", "eoi_token_index")


class Image:
    """One image of noise in a sequence of `tokens`, and what transformers makes of it."""

    def __init__(self, model: Any, directory: str, instead: Mapping[int, int]) -> None:
        """Draws the image and runs it.

        model: transformers' whole model of `directory`, in fp32. instead: as in job.json. Raises
        MappingError for a model that takes other inputs, or whose text model does more with an
        image than Megatron-Core's.
        """
        self.where = f"{directory}: {type(model).__name__}"
        try:
            self._draw(model, instead)
        except (MappingError, torch.OutOfMemoryError):
            raise
        except Exception as e:  # of any kind: what a model says about inputs that it does not take
            said = str(e).partition("\n")[0]
            raise MappingError(
                f"{self.where} takes no image that can be drawn here ({type(e).__name__}: {said});"
                f" {LEAVE_OUT}"
            ) from e

    def _draw(self, model: Any, instead: Mapping[int, int]) -> None:
        config = model.config
        size, token = config.get_text_config().vocab_size, _first(config, PLACES)
        if token is None or not token < size:
            raise ValueError(f"its config has no token of an image below {size:,}")
        inputs = self._noise(model)
        drawn = np.random.RandomState(SEED).randint(0, size, 2 * AROUND).tolist()
        text = [instead.get(t, t) for t in drawn]
        begin, end = ([t] if (t := _first(config, names)) else [] for names in (BEGINS, ENDS))
        before, behind = [*text[:AROUND], *begin], [*end, *text[AROUND:]]
        with torch.no_grad():
            found = model.get_image_features(**inputs)
        parts = getattr(found, "pooler_output", found)
        parts = found.last_hidden_state if parts is None else parts
        count = sum(part.numel() // part.shape[-1] for part in parts)
        self.tokens = [*before, *[token] * count, *behind]
        self.places = np.arange(len(before), len(before) + count)
        self.entered = self._entered(model, inputs)

    def _noise(self, model: Any) -> dict[str, torch.Tensor]:
        """Returns an image as the model takes it: patches of a grid, an image of any size, or one
        of a fixed size.
        """
        vision = model.config.vision_config
        device = model.get_input_embeddings().weight.device
        taken = inspect.signature(model.get_image_features).parameters
        tower = getattr(model.base_model, "vision_tower", None)
        channels = getattr(vision, "in_channels", getattr(vision, "num_channels", 3))
        more: dict[str, torch.Tensor] = {}
        if "image_grid_thw" in taken:
            sides = [side * vision.spatial_merge_size for side in GRID]
            patch = channels * vision.temporal_patch_size * vision.patch_size**2
            shape = [sides[0] * sides[1], patch]
            more["image_grid_thw"] = torch.tensor([[1, *sides]], device=device)
        elif tower and "image_sizes" in inspect.signature(tower.forward).parameters:
            each = vision.patch_size * getattr(model.config, "spatial_merge_size", 1)
            most = vision.image_size // each
            sides = [min(GRID[0], max(1, most - 1)) * each, min(GRID[1], most) * each]
            shape = [1, channels, *sides]
            more["image_sizes"] = torch.tensor([sides], device=device)
        else:
            size = vision.image_size
            shape = [1, channels, *([size, size] if isinstance(size, int) else size)]
        generator = torch.Generator().manual_seed(SEED)
        return {"pixel_values": torch.randn(shape, generator=generator).to(device), **more}

    @torch.no_grad()
    def _entered(self, model: Any, inputs: dict[str, torch.Tensor]) -> dict[str, Any]:
        """Runs the image once; returns the tensors that enter the text model, by their names."""
        rows = torch.tensor([self.tokens], device=inputs["pixel_values"].device)
        image = torch.zeros_like(rows)
        image[0, self.places] = 1
        kinds = {"token_type_ids": image, "mm_token_type_ids": image.int()}
        taken = inspect.signature(model.forward).parameters
        kinds = {name: value for name, value in kinds.items() if name in taken}
        entered: dict[str, Any] = {}
        looks_ahead: list[bool] = []

        def keep(_module: Any, _args: Any, given: dict[str, Any]) -> None:
            entered.update({k: v for k, v in given.items() if _is_tensor(v)})

        def look(_module: Any, _args: Any, given: dict[str, Any]) -> None:
            mask = given.get("attention_mask")
            if isinstance(mask, torch.Tensor) and mask.dim() == 4:
                seen = mask if mask.dtype == torch.bool else mask == 0
                looks_ahead.append(bool(seen.triu(1).any()))

        decoder = model.get_decoder()
        hooks = [decoder.register_forward_pre_hook(keep, with_kwargs=True)]
        hooks += [m.register_forward_pre_hook(look, with_kwargs=True) for m in decoder.modules()]
        try:
            model(rows, use_cache=False, **inputs, **kinds)
        finally:
            for hook in hooks:
                hook.remove()
        for module in model.modules():
            if hasattr(module, "rope_deltas"):  # those of the last image, which text would get
                module.rope_deltas = None
        if any(looks_ahead):
            raise MappingError(
                f"{self.where} lets each place of an image see all of the image, and"
                f" Megatron-Core's text model sees what is before it; {LEAVE_OUT}"
            )
        plain = torch.arange(len(self.tokens), device=rows.device)
        positions = entered.get("position_ids", plain[None])
        masks = entered.get("visual_pos_masks", image.bool())
        if (
            entered.keys() - KNOWN
            or "inputs_embeds" not in entered
            or not bool((positions == plain).all() or len(positions) >= 3)
            or not torch.equal(masks.cpu(), image.bool().cpu())
        ):
            raise MappingError(
                f"{self.where} gives its text model {', '.join(sorted(entered))}, which"
                f" Megatron-Core's does not take; {LEAVE_OUT}"
            )
        return entered

    def save(self, folder: Path) -> None:
        """Saves to FILE what Megatron-Core's text model needs: places, features, those that are
        added behind layers, and the positions if a token has three.
        """
        positions = self.entered.get("position_ids", torch.zeros(1))
        kept = {
            "places": self.places,
            "features": self.entered["inputs_embeds"][0, self.places].cpu().numpy(),
        }
        behind = self.entered.get("deepstack_visual_embeds", ())
        kept |= {f"behind_{layer}": value.cpu().numpy() for layer, value in enumerate(behind)}
        if len(positions) >= 3:  # there may be a row for text before them
            kept["positions"] = positions[-3:, 0].cpu().numpy()
        named: dict[str, Any] = kept  # numpy types the names as its own options
        np.savez(folder / FILE, **named)

    @contextmanager
    def shown(self, model: Any) -> Iterator[None]:
        """Gives the tensors that entered the text model to every run of `model`, of any dtype."""

        def enter(_module: Any, args: Any, given: dict[str, Any]) -> Any:
            dtype = given["inputs_embeds"].dtype
            return args, given | {name: _cast(value, dtype) for name, value in self.entered.items()}

        hook = model.get_decoder().register_forward_pre_hook(enter, with_kwargs=True)
        try:
            yield
        finally:
            hook.remove()


def _first(config: Any, names: Sequence[str]) -> int | None:
    """Returns the first token of these names that a config has."""
    found = (getattr(config, name, None) for name in names)
    return next((token for token in found if token is not None), None)


def _is_tensor(value: Any) -> bool:
    parts = value if isinstance(value, (list, tuple)) else [value]
    return bool(parts) and all(isinstance(part, torch.Tensor) for part in parts)


def _cast(value: Any, dtype: torch.dtype) -> Any:
    """Returns a tensor, or a list of tensors, in a dtype, if its values are floating."""
    if isinstance(value, (list, tuple)):
        return [_cast(part, dtype) for part in value]
    return value.to(dtype) if value.is_floating_point() else value


# ------------------------------------------------------------------------------ of Megatron-Core


@contextmanager
def given(
    chunks: list[Any],
    folder: Path,
    mrope: Mapping[str, Any] | None,
    rows: Callable[[int, bool], torch.Tensor],
) -> Iterator[None]:
    """Makes Megatron-Core's text model take the image of `folder`, if one is there.

    mrope: `section`, the number of frequencies of each axis, and `interleaved`; None for a model
        with one position for a token. rows: returns the positions in the sequence of this rank's
        rows; its arguments are their number, and whether sequence parallelism cuts them.
    """
    if not (folder / FILE).exists():
        yield
        return
    with np.load(folder / FILE) as file:
        kept = {name: torch.from_numpy(file[name]) for name in file.files}
    if "positions" in kept and (mrope is None or not hasattr(chunks[0], "rotary_pos_emb")):
        raise SourceError(
            "transformers gives each token three positions, and nothing says how Megatron's rotary"
            f" embedding takes them: no mrope_section is stated; {LEAVE_OUT}"
        )

    def at_image(hidden: torch.Tensor, values: torch.Tensor, added: bool) -> torch.Tensor:
        """Returns hidden [rows, 1, width] with `values` at the image, added or in its place."""
        index = rows(len(hidden), True) - int(kept["places"][0])
        here = (index >= 0) & (index < len(values))
        changed, new = hidden.clone(), values[index[here]].to(hidden)
        at = here.to(hidden.device)
        changed[at, 0] = changed[at, 0] + new if added else new
        return changed

    def embed(_module: Any, _args: Any, out: torch.Tensor) -> torch.Tensor:
        return at_image(out, kept["features"], added=False)

    def add(layer: int) -> Callable[..., Any]:
        def hook(_module: Any, _args: Any, out: Any) -> Any:
            hidden, *more = out if isinstance(out, tuple) else (out,)
            hidden = at_image(hidden, kept[f"behind_{layer}"], added=True)
            return (hidden, *more) if isinstance(out, tuple) else hidden

        return hook

    def turn(module: Any, _args: Any, out: Any) -> Any:
        table, *more = out if isinstance(out, tuple) else (out,)
        at = rows(len(table), False).clamp(max=len(kept["positions"][0]) - 1)
        assert mrope is not None
        angles = _angles(module, kept["positions"][:, at], mrope)
        return (angles, *more) if isinstance(out, tuple) else angles

    hooks = []
    for chunk in chunks:
        pattern = getattr(chunk, "hybrid_layer_pattern", None)
        # a layer of a hybrid model is one part of a layer of transformers
        parts = [layer for layer, _ in hybrid.places(pattern)] if pattern else []
        if chunk.pre_process:
            hooks.append(chunk.embedding.register_forward_hook(embed))
        for module in chunk.decoder.layers:
            number = module.layer_number - 1
            layer = parts[number] if parts else number
            if f"behind_{layer}" in kept and layer not in parts[number + 1 :]:
                hooks.append(module.register_forward_hook(add(layer)))
        if "positions" in kept:
            hooks.append(chunk.rotary_pos_emb.register_forward_hook(turn))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _angles(module: Any, positions: torch.Tensor, mrope: Mapping[str, Any]) -> torch.Tensor:
    """Returns the angles [rows, 1, 1, width] of a rotary embedding of Megatron-Core for positions
    [3, rows]. Each angle is that of the embedding's own table.

    The frequencies of `section` (2, 1, 1) belong to t t h w, or interleaved to t h w t.
    """
    # packed_seq: all positions, also with context parallelism
    table = module.forward(int(positions.max()) + 1, packed_seq=True)
    table = table[0] if isinstance(table, tuple) else table
    half, section = table.shape[-1] // 2, mrope["section"]
    if sum(section) != half:
        raise SourceError(
            f"mrope_section {section} has {sum(section)} frequencies, and the rotary embedding of"
            f" the Megatron model has {half}"
        )
    axes = torch.repeat_interleave(torch.arange(len(section)) % 3, torch.tensor(section))
    if mrope["interleaved"]:
        axes = torch.zeros(half, dtype=torch.long)
        for axis in (1, 2):
            axes[axis : 3 * section[axis] : 3] = axis
    axes = axes.repeat_interleave(2) if module.rotary_interleaved else torch.cat([axes, axes])
    axes, of_axis = axes.to(table.device), table[positions.to(table.device)]
    return torch.where(axes == 0, of_axis[0], torch.where(axes == 1, of_axis[1], of_axis[2]))
