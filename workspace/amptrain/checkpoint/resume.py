"""What a run may change when it continues, and the random generators it continues with."""

import random
from typing import Any

import numpy as np
import torch

from amptrain.config import Plain, TrainConfig, flatten, renamed
from amptrain.errors import ConfigError
from amptrain.words import counted

MAY_DIFFER = {
    *(
        "name",
        "runs",
        "data_dir",
        "num_workers",
        "prefetch_factor",
        "log_every",
        "save_every",
        "async_checkpoint",
        "keep_checkpoints",
    ),
    *("precision", "init_scale", "skip_broken", "val_fraction"),
    *("grad_checkpointing", "early_stop_patience", "metrics"),
}
"""Settings without influence on the weights, or (val_fraction) whose influence data.json shows. The
precision is looked at by itself, since auto and bf16 may be the same, and the loss scale continues
where it was."""
MUST_MATCH = {
    *(
        "data",
        "image_size",
        "augment",
        "random_erasing",
        "color_jitter",
        "mixup",
        "cutmix",
        "exif_orientation",
        "background",
        "white_level",
        "seed",
        "global_batch_size",
        "model",
        "weights",
        "freeze",
        "sync_batchnorm",
        "head_lr",
        "optimizer",
        "fused",
        "ema_decay",
        "loss",
        "eval_metric",
    ),
}
"""Settings without which the saved state, or the place in the data, means nothing."""


MOVABLE = {"imagefolder", "table"}
"""Kinds of data that are the same at another path if their files are, which data.json tells."""


def same_kind_of_data(saved: Plain, now: Plain) -> bool:
    """Whether only the path of the data may have changed."""
    kinds = {str(data).partition(":")[0] for data in (saved, now)}
    return len(kinds) == 1 and kinds <= MOVABLE


def check_changes(saved: dict[str, Plain], now: dict[str, Plain]) -> list[str]:
    """Sentences about settings that differ from those of the checkpoint. Raises ConfigError where
    it cannot go on."""
    saved = {**flatten(TrainConfig()), **renamed(saved)}  # an older run lacks what came later
    changed = [name for name in now if saved.get(name) != now[name] and name not in MAY_DIFFER]
    if same_kind_of_data(saved.get("data"), now["data"]):
        changed = [name for name in changed if name != "data"]
    texts = {name: f"{name} {saved.get(name)} → {now[name]}" for name in changed}
    refused = [texts[name] for name in changed if name in MUST_MATCH]
    if refused:
        raise ConfigError(
            f"This run was started with other settings: {', '.join(refused)}. It cannot continue "
            "with these; give the "
            "old ones, or another --name for a new run."
        )
    if not changed:
        return []
    return [
        f"Changed since the checkpoint: {', '.join(texts.values())}. From here on this is another "
        "run than before."
    ]


def check_world_size(saved: int, now: int, *, saved_steps: int, steps: int) -> list[str]:
    """Sentences about a changed number of processes. Raises ConfigError if it changes the steps of
    an epoch."""
    if saved == now:
        return []
    if saved_steps != steps:
        raise ConfigError(
            f"The checkpoint is of {counted(saved, 'process')}. With {now} an epoch has "
            f"{counted(steps, 'step')} in place of {saved_steps}, as its last images are too few "
            f"for {now}. Continue with {counted(saved, 'process')}, or start a run with --name."
        )
    return [
        f"The checkpoint is of {counted(saved, 'process')}, this run of {now}. Each step takes the "
        "same images as before, so the result is the same up to rounding; but BatchNorm's "
        "statistics and dropout are taken in each process."
    ]


def rng_state(device: torch.device) -> dict[str, Any]:
    """The generators of this process, as tensors and plain types: torch's, Python's, NumPy's."""
    kind, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
        "python": random.getstate(),
        "numpy": (
            str(kind),
            torch.from_numpy(np.asarray(keys).astype(np.int64)),
            position,
            has_gauss,
            float(gauss),
        ),
    }


def set_rng_state(state: dict[str, Any], device: torch.device) -> None:
    """Continue with the generators of `rng_state()`."""
    torch.set_rng_state(state["torch"])
    if device.type == "cuda" and state["cuda"] is not None:
        torch.cuda.set_rng_state(state["cuda"], device)
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    kind, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), position, has_gauss, cached))


def seed_all(seed: int, rank: int) -> None:
    """Seed the generators of this process with what differs between ranks: they draw dropout."""
    words = [int(word) for word in np.random.SeedSequence((seed, rank)).generate_state(3)]
    torch.manual_seed(words[0])
    random.seed(words[1])
    np.random.seed(words[2])
