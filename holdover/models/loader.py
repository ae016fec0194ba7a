"""Reading a Hugging Face checkpoint folder: its configuration and its weights, nothing silently ignored."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from blake3 import blake3
from safetensors import SafetensorError, safe_open

from holdover.errors import ModelError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
SERVED_DTYPES = ("bfloat16", "float32")
# Tensors that checkpoints carry and no forward pass reads.
UNUSED_WEIGHTS = re.compile(r"rotary_emb\.inv_freq$")


def read_config(folder: Path) -> dict[str, Any]:
    """The checkpoint's config.json. Raises ModelError if there is none or it cannot be read."""
    path = folder / "config.json"
    if not folder.is_dir():
        raise ModelError(f"there is no model folder {folder}; give the folder that holds config.json.")
    try:
        config = json.loads(path.read_text())
    except FileNotFoundError:
        raise ModelError(f"{folder} has no config.json; give the folder of a Hugging Face checkpoint.") from None
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read: {error}.") from None
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        raise ModelError(f"{path} names no model_type; it is no Hugging Face configuration.")
    return config


def serving_dtype(wanted: str, config: dict[str, Any]) -> torch.dtype:
    """The type to compute in: `wanted`, or for "auto" the checkpoint's own."""
    name = wanted
    if wanted == "auto":
        inner = config.get("text_config")
        places = [config, inner] if isinstance(inner, dict) else [config]
        names = (place.get(key) for place in places for key in ("dtype", "torch_dtype"))
        name = str(next(filter(None, names), "float32")).removeprefix("torch.")
        name = "bfloat16" if name == "float16" else name
    if name not in SERVED_DTYPES:
        raise ModelError(f"dtype {name!r} is not served; use --dtype {' or '.join(SERVED_DTYPES)}.")
    return DTYPES[name]


class Weights:
    """The tensors of a checkpoint folder, single or sharded safetensors, memory-mapped and taken by name."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        index = folder / "model.safetensors.index.json"
        if index.exists():
            try:
                shard_of = dict(json.loads(index.read_text())["weight_map"])
            except (ValueError, KeyError, TypeError) as error:
                raise ModelError(f"{index} is no index of shards: {error}.") from None
            shards = sorted(set(shard_of.values()))
            foreign = [shard for shard in shards if Path(shard).name != shard]
            if foreign:
                raise ModelError(f"{index} names {foreign[0]!r}, which is not a file of its own folder.")
        else:
            shards, shard_of = ["model.safetensors"], {}
        missing = [shard for shard in shards if not (folder / shard).is_file()]
        if missing:
            raise ModelError(
                f"{folder} lacks {', '.join(missing)}"
                + (f" of its {len(shards)} shards" if len(shards) > 1 else "")
                + "; download the checkpoint again, whole (safetensors)."
            )
        self.files = [folder / shard for shard in shards]
        self._open: dict[str, Any] = {}
        self._shard_of: dict[str, str] = {}
        for shard in shards:
            try:
                self._open[shard] = safe_open(folder / shard, framework="pt")
            except (SafetensorError, OSError) as error:
                raise ModelError(f"{folder / shard} is damaged ({error}); download it again.") from None
            self._shard_of.update(dict.fromkeys(self._open[shard].keys(), shard))
        absent = sorted(set(shard_of) - set(self._shard_of))
        if absent:
            raise ModelError(f"{folder / shard_of[absent[0]]} lacks {absent[0]}, which the index places there.")
        self._left = set(self._shard_of)
        self._aliases: dict[str, str] = {}

    def leave(self, pattern: str) -> None:
        """Weights whose names match are of no use to the model: they are not asked for, and not missed."""
        self._left = {name for name in self._left if not re.search(pattern, name)}

    def rename(self, before: str, after: str) -> None:
        """Weights whose names begin with `before` can be taken under names that begin with `after` too."""
        for name in [name for name in self._shard_of if name.startswith(before)]:
            self._aliases[after + name.removeprefix(before)] = name

    def has(self, name: str) -> bool:
        return self._aliases.get(name, name) in self._shard_of

    def take(self, name: str, shape: tuple[int, ...], *, aliases: tuple[str, ...] = ()) -> torch.Tensor:
        """The tensor `name` (or under one of its `aliases`), which must have this shape. Raises ModelError."""
        found = next((each for each in (name, *aliases) if self.has(each)), None)
        if found is None:
            raise ModelError(f"the checkpoint {self.folder} lacks the weight {name}; it is not whole.")
        found = self._aliases.get(found, found)
        tensor: torch.Tensor = self._open[self._shard_of[found]].get_tensor(found)
        if not tensor.dtype.is_floating_point or tensor.dtype.itemsize < 2:
            raise ModelError(f"the weight {found} has dtype {tensor.dtype}; quantised checkpoints are not served.")
        if tensor.shape != shape:
            raise ModelError(
                f"the weight {found} has shape {list(tensor.shape)}; its config.json asks for {list(shape)}."
            )
        self._left.discard(found)
        return tensor

    def check_all_taken(self) -> None:
        """Raise ModelError if the checkpoint holds weights that the model did not ask for."""
        left = sorted(name for name in self._left if not UNUSED_WEIGHTS.search(name))
        if left:
            raise ModelError(
                f"the checkpoint {self.folder} holds {len(left)} weights that this model does not use, "
                f"such as {left[0]}; it is of another kind than its config.json says."
            )

    def digest(self) -> str:
        """BLAKE3 over all weight files, in the order of their names (hex)."""
        whole = blake3()
        for file in self.files:
            whole.update(blake3(max_threads=blake3.AUTO).update_mmap(file).digest())
        return whole.hexdigest()


def require(config: dict[str, Any], allowed: dict[str, Callable[[Any], bool]]) -> None:
    """Refuse by name each setting that would change the result and is not implemented. Raises ModelError."""
    for name, accepts in allowed.items():
        if name in config and not accepts(config[name]):
            raise ModelError(
                f"config.json has {name} = {json.dumps(config[name])[:200]}, which is not implemented for "
                f"{config['model_type']}; this checkpoint can't be served exactly, so it isn't served."
            )


def positive(config: dict[str, Any], *names: str) -> None:
    """Raise ModelError unless each of `names` is a positive whole number."""
    for name in names:
        value = config.get(name)
        if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
            raise ModelError(f"config.json has {name} = {value!r}; it must be a positive whole number.")
