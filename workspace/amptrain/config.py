"""What a training run is told: groups of settings, each with its default, checked when made.

The flags of the command line, the keys of a YAML file and the keys of `config.yaml` in a run
directory are the same names, without the group in front; so every name is used once.
"""

import dataclasses
import difflib
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import yaml

from amptrain.errors import ConfigError
from amptrain.files import atomic_write
from amptrain.precisions import precision_names

if TYPE_CHECKING:
    PrecisionName = str
else:
    PrecisionName = Literal[("auto", *precision_names())]
AugmentName = Literal["none", "flip", "randaugment", "trivialaugment"]
ScheduleName = Literal["cosine", "step", "constant", "one-cycle"]
LossName = Literal["cross-entropy", "bce"]
ParallelName = Literal["ddp", "fsdp"]
WARMUP_EPOCHS = 2.0
IMAGE_SIZE = 224
"""Where nothing says otherwise."""
SMALLEST_IMAGE = 8

Plain = bool | int | float | str | None
RENAMED = {
    "accumulate": "grad_accum_steps",
    "batch_size": "global_batch_size",
    "clip_norm": "max_grad_norm",
    "keep": "keep_checkpoints",
    "prefetch": "prefetch_factor",
    "workers": "num_workers",
}
"""Settings by the names they had, which flags, YAML files and older runs may still use."""
NAMED_IN_RUN = {
    *("seed", "global_batch_size", "optimizer", "lr", "momentum", "weight_decay", "warmup_epochs"),
    *("label_smoothing", "max_grad_norm", "ema_decay", "head_lr", "freeze", "image_size"),
    *("augment", "random_erasing", "color_jitter", "mixup", "cutmix", "schedule", "class_weights"),
    *("lr_step_epochs", "lr_gamma", "loss", "exif_orientation", "background", "white_level"),
}
"""Settings that stand in the default name of a run where they are not the default."""


def require(condition: bool, sentence: str) -> None:
    """Raise ConfigError with `sentence` unless `condition` holds."""
    if not condition:
        raise ConfigError(sentence)


def is_colour(text: str) -> bool:
    """Whether Pillow knows a colour, without transparency, by this name or #rrggbb."""
    from PIL import ImageColor

    try:
        return text.removeprefix("#").isalnum() and len(ImageColor.getrgb(text)) == 3
    except ValueError:
        return False


def require_finite(settings: Any) -> None:
    """Raise ConfigError if a setting is nan or inf, which comparisons let through, and which would
    go into weights."""
    for name, value in vars(settings).items():
        finite = not isinstance(value, float) or math.isfinite(value)
        require(finite, f"--{name.replace('_', '-')} is {value}; it needs to be a finite number.")


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Where the run lives and what it runs on."""

    name: str | None = None
    """Name of the run; the default is made of data, model and precision. The same name continues
    the same run."""
    runs: Path = Path("runs")
    """Directory that holds the run directories."""
    config: Path | None = None
    """YAML file with defaults for these flags; a flag given here wins over it."""
    device: Literal["auto", "cuda", "cpu"] = "auto"
    """Where to train; auto takes CUDA if there is a device."""
    seed: int = 0
    """Seed of initial weights, order, augmentation and dropout."""
    deterministic: bool = False
    """Only deterministic kernels: the same command gives the same weights, bit for bit, also on
    CUDA; slower there."""
    log_every: int = 20
    """Steps in one line of the log."""
    save_every: int | None = None
    """Steps between checkpoints, besides the one at the end of each epoch."""
    async_checkpoint: bool = False
    """Write checkpoints while the next steps are made: they wait for a copy in memory only, which
    takes as much of rank 0's as a checkpoint."""
    keep_checkpoints: int = 2
    """Checkpoints kept; at least 2, so that a damaged one has one before it."""

    def __post_init__(self) -> None:
        # Shells leave the tilde of --runs=~/runs alone.
        object.__setattr__(self, "runs", self.runs.expanduser())
        require(self.log_every >= 1, f"--log-every is {self.log_every}; it needs at least 1 step.")
        require(
            self.save_every is None or self.save_every >= 1,
            f"--save-every is {self.save_every}; it needs at least 1 step, or leave it out.",
        )
        require(
            self.keep_checkpoints >= 2,
            f"--keep-checkpoints is {self.keep_checkpoints}; keep at least 2, the newest may be "
            "damaged by a crash.",
        )
        require(
            0 <= self.seed < 2**63, f"--seed is {self.seed}; it needs to be from 0 to 2**63 - 1."
        )
        name_ok = self.name is None or (self.name not in {"", ".", ".."} and "/" not in self.name)
        require(
            name_ok,
            f"--name is {self.name!r}; it needs to be the name of one directory, without a slash.",
        )


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """What is learned from."""

    data: str = "digits"
    """digits (ships with this), cifar10, imagefolder:PATH (folders of images, one a class),
    table:FILE (CSV or JSONL with path and label), file.py:FUNCTION or module:FUNCTION (your own
    data set), or fake:N (N images, for speed)."""
    data_dir: Path = Path("data")
    """Directory in which cifar10 lies (cifar-10-batches-py, as torchvision writes it)."""
    image_size: int | None = None
    """Height and width of an image in pixels, for all but digits and cifar10; the default is what
    --weights were trained with, else 224."""
    augment: AugmentName = "flip"
    """Random changes of training images: flip shifts or crops, and flips; randaugment and
    trivialaugment change shape and colour besides; none also leaves out crops and flips."""
    random_erasing: float = 0.0
    """Share of the training images of which a random part is covered, such as 0.1."""
    color_jitter: float = 0.0
    """Training images: largest change of brightness, contrast and saturation, such as 0.4."""
    mixup: float = 0.0
    """Blend pairs of training images and their labels, in parts of a Beta(MIXUP, MIXUP)
    distribution, such as 0.2."""
    cutmix: float = 0.0
    """Put a part of one training image into another, of a size from a Beta(CUTMIX, CUTMIX)
    distribution, such as 1.0; with --mixup one of both for each pair."""
    exif_orientation: bool = True
    """Turn photos upright, as their EXIF data say."""
    background: str = "white"
    """Colour behind images with transparent parts, such as black or #808080."""
    white_level: float | None = None
    """Value that is white in images of more than 8 bits, such as 4095 for 12 bits in 16; by default
    65535 for 16 bits, see docs/data.md."""
    num_workers: int | None = None
    """Loader processes of each rank; the default comes from the CPU quota, and is 0 for data held
    in memory."""
    prefetch_factor: int = 2
    """Batches each worker prepares ahead."""
    val_fraction: float | None = None
    """Part of each class held out for validation where the data has none; the default is 0.2."""
    skip_broken: bool = False
    """Leave out images that cannot be read, count them and list them, in place of stopping."""

    def __post_init__(self) -> None:
        from amptrain.data.sources import check

        require_finite(self)
        check(self.data)
        require(
            self.val_fraction is None or 0 < self.val_fraction < 1,
            f"--val-fraction is {self.val_fraction}; it needs to be between 0 and 1, such as 0.2.",
        )
        require(
            0 <= self.random_erasing <= 1,
            f"--random-erasing is {self.random_erasing}; it needs to be from 0 to 1.",
        )
        require(
            0 <= self.color_jitter <= 1,
            f"--color-jitter is {self.color_jitter}; it needs to be from 0 to 1.",
        )
        for name in ("mixup", "cutmix"):
            value = getattr(self, name)
            require(value >= 0, f"--{name} is {value}; it needs to be 0 (none) or above.")
        require(
            self.size >= SMALLEST_IMAGE,
            f"--image-size is {self.image_size}; it needs at least {SMALLEST_IMAGE} pixels.",
        )
        require(
            is_colour(self.background),
            f"--background is {self.background!r}; it needs a colour such as white, black or "
            "#808080.",
        )
        require(
            self.white_level is None or self.white_level > 0,
            f"--white-level is {self.white_level}; it needs to be above 0, such as 4095.",
        )
        require(
            self.num_workers is None or self.num_workers >= 0,
            f"--num-workers is {self.num_workers}; it needs 0 or more.",
        )
        require(
            self.prefetch_factor >= 1,
            f"--prefetch-factor is {self.prefetch_factor}; it needs at least 1 batch.",
        )

    @property
    def size(self) -> int:
        """`image_size`, where it is chosen."""
        return IMAGE_SIZE if self.image_size is None else self.image_size


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """What is trained."""

    model: str = "auto"
    """small_cnn, any classification model of torchvision by name, or file.py:function for one of
    your own; auto is small_cnn for digits, else resnet50."""
    weights: str | None = None
    """Weights to start from: DEFAULT or another name of torchvision's, a file (.safetensors, .pth)
    or a run. The head is new where the classes are others."""
    freeze: bool = False
    """Train the head only; the rest stays as it is, BatchNorm's statistics too."""
    channels_last: bool = True
    """NHWC memory format, which tensor cores want; the most of the gain of mixed precision in
    convolutions."""
    compile: bool = False
    """torch.compile; the first steps take longer."""
    sync_batchnorm: bool = False
    """BatchNorm over the images of all processes, for few images on each GPU."""
    grad_checkpointing: bool = False
    """Compute the inside of each block again in the backward pass in place of keeping it: less
    memory, more time, the same step."""
    parallel: ParallelName = "ddp"
    """Several processes: with ddp each holds the whole model; with fsdp its part of all parameters,
    gradients and optimizer values, for models too large for one GPU."""
    find_unused_parameters: bool = False
    """Several processes: allow parameters that do not take part in each step; slower."""

    def __post_init__(self) -> None:
        require(
            not (self.grad_checkpointing and self.compile),
            "--grad-checkpointing and --compile do not go together: torch.compile decides by "
            "itself what it computes again. Leave one of them out.",
        )
        if self.parallel == "fsdp":
            require(
                not self.compile,
                "--parallel fsdp and --compile do not go together: amptrain compiles a whole model "
                "at once, and fsdp gathers it block by block. Leave one of them out.",
            )
            require(
                not self.find_unused_parameters,
                "--find-unused-parameters is a setting of --parallel ddp. Leave it out with fsdp.",
            )


@dataclass(frozen=True, kw_only=True)
class PrecisionConfig:
    """How numbers are held, and how fp16 gradients are scaled."""

    precision: PrecisionName = "auto"
    """auto is bf16 where the hardware has it, else fp16 on a GPU, fp32 on a CPU; fp32 is true FP32,
    with TF32 off."""
    init_scale: float = 2.0**16
    """fp16: the loss scale to start with; many skipped steps at the start ask for 2**14 or
    2**12."""
    growth_factor: float = 2.0
    """fp16: the scale grows by this after growth-interval steps without overflow."""
    backoff_factor: float = 0.5
    """fp16: the scale shrinks by this on an overflow."""
    growth_interval: int = 2000
    """fp16: steps without overflow before the scale grows."""
    min_scale: float = 1.0
    """fp16: the run stops with a diagnosis when the scale falls below this."""
    max_consecutive_skips: int = 30
    """The run stops with a diagnosis after this many skipped steps in a row."""

    def __post_init__(self) -> None:
        require_finite(self)
        require(
            self.init_scale > 0,
            f"--init-scale is {self.init_scale}; it needs to be above 0, such as 65536.",
        )
        require(
            self.growth_factor > 1,
            f"--growth-factor is {self.growth_factor}; it needs to be above 1.",
        )
        require(
            0 < self.backoff_factor < 1,
            f"--backoff-factor is {self.backoff_factor}; it needs to be between 0 and 1.",
        )
        require(
            self.growth_interval >= 1,
            f"--growth-interval is {self.growth_interval}; it needs at least 1 step.",
        )
        # Below 2**-100 the scaler's 1/scale overflows FP32 and the next good step writes NaN into
        # the weights.
        require(
            2.0**-100 <= self.min_scale <= self.init_scale,
            f"--min-scale is {self.min_scale}; it needs to be from 2**-100 to the initial scale "
            f"{self.init_scale:g}.",
        )
        require(
            1 <= self.max_consecutive_skips <= 100,
            f"--max-consecutive-skips is {self.max_consecutive_skips}; it needs to be from 1 to "
            "100.",
        )


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """How the model is trained."""

    epochs: int = 12
    """Passes over the training images."""
    max_steps: int | None = None
    """End after this many steps, the learning rate's schedule too."""
    global_batch_size: int = 64
    """Images in one optimizer step: over all processes and all accumulated micro-batches."""
    grad_accum_steps: int = 1
    """Micro-batches one step is made of; more need less memory and give the same step."""
    optimizer: Literal["sgd", "adamw"] = "adamw"
    """sgd has Nesterov momentum."""
    fused: bool = True
    """The fused optimizer; without it torch's scaler waits for the device at each fp16 step."""
    lr: float | None = None
    """Learning rate at the end of the warm-up. The default follows model, optimizer and batch size;
    the run says which it is."""
    head_lr: float | None = None
    """Learning rate of the head; the default is 10 times --lr with --weights, else --lr."""
    momentum: float = 0.9
    """Momentum, for sgd."""
    weight_decay: float = 5e-2
    """Weight decay of matrices and kernels; biases and norms have none."""
    warmup_epochs: float = WARMUP_EPOCHS
    """Epochs in which the learning rate rises from near 0; after them it follows --schedule."""
    schedule: ScheduleName = "cosine"
    """cosine falls to 0; step falls by --lr-gamma every --lr-step-epochs; constant stays; one-cycle
    rises over 30 % of the steps, without a warm-up, and falls to near 0."""
    lr_step_epochs: int | None = None
    """Epochs between two falls of --schedule step; the default is a third of all."""
    lr_gamma: float = 0.1
    """What --schedule step multiplies the learning rate with."""
    early_stop_patience: int | None = None
    """End the run after this many epochs without a better --eval-metric."""
    metrics: str | None = None
    """Metrics of your own, told with each validation: file.py:function or module:function, called
    with (logits, targets) of all validation images; returns names with numbers."""
    eval_metric: str = "accuracy"
    """What tells the best epoch: accuracy (micro-F1 where images have several labels), loss, or a
    name that --metrics returns. Higher is better, but for the loss."""
    loss: LossName = "cross-entropy"
    """cross-entropy takes one class of each image; bce asks of each class by itself whether it is
    there, and takes several labels an image."""
    class_weights: Literal["none", "balanced"] = "none"
    """balanced weighs rare classes more in the loss: by images / (classes × images of the
    class)."""
    label_smoothing: float = 0.1
    """Share of a label's weight that is spread over all classes; with bce over yes and no."""
    max_grad_norm: float | None = None
    """Largest norm of the true gradient; a larger one is scaled down to it."""
    ema_decay: float | None = None
    """Also keep an exponential moving average of the weights, such as 0.999, and validate with
    it."""

    def __post_init__(self) -> None:
        require_finite(self)
        for name in ("epochs", "global_batch_size", "grad_accum_steps"):
            value = getattr(self, name)
            require(
                value >= 1, f"--{name.replace('_', '-')} is {value}; it needs to be at least 1."
            )
        require(
            self.max_steps is None or self.max_steps >= 1,
            f"--max-steps is {self.max_steps}; it needs at least 1.",
        )
        for name in ("lr", "head_lr"):
            value = getattr(self, name)
            flag = f"--{name.replace('_', '-')}"
            require(value is None or value > 0, f"{flag} is {value}; it needs to be above 0.")
        require(
            0 <= self.momentum < 1,
            f"--momentum is {self.momentum}; it needs to be from 0 to below 1.",
        )
        require(
            self.weight_decay >= 0,
            f"--weight-decay is {self.weight_decay}; it needs to be 0 or more.",
        )
        require(
            self.warmup_epochs >= 0,
            f"--warmup-epochs is {self.warmup_epochs}; it needs to be 0 or more.",
        )
        require(
            self.schedule != "one-cycle" or self.warmup_epochs == WARMUP_EPOCHS,
            f"--warmup-epochs {self.warmup_epochs:g} has no part in --schedule one-cycle, which "
            "rises over 30 % of the steps. Leave it out, or take --schedule cosine.",
        )
        for name in ("lr_step_epochs", "early_stop_patience"):
            value, flag = getattr(self, name), f"--{name.replace('_', '-')}"
            require(value is None or value >= 1, f"{flag} is {value}; it needs at least 1 epoch.")
        require(
            self.metrics is not None or self.eval_metric in {"accuracy", "loss"},
            f"--eval-metric is {self.eval_metric}; without --metrics it needs to be accuracy or "
            "loss.",
        )
        require(
            0 < self.lr_gamma <= 1,
            f"--lr-gamma is {self.lr_gamma}; it needs to be above 0 and at most 1.",
        )
        require(
            0 <= self.label_smoothing < 1,
            f"--label-smoothing is {self.label_smoothing}; it needs to be from 0 to below 1.",
        )
        require(
            self.loss != "bce" or self.class_weights == "none",
            "--class-weights balanced weighs an image by its one class, and --loss bce may have "
            "several of each. Leave it out, or take --loss cross-entropy.",
        )
        require(
            self.max_grad_norm is None or self.max_grad_norm > 0,
            f"--max-grad-norm is {self.max_grad_norm}; it needs to be above 0.",
        )
        require(
            self.ema_decay is None or 0 < self.ema_decay < 1,
            f"--ema-decay is {self.ema_decay}; it needs to be between 0 and 1, such as 0.999.",
        )
        require(
            self.global_batch_size % self.grad_accum_steps == 0,
            f"--global-batch-size {self.global_batch_size} cannot be split evenly into "
            f"--grad-accum-steps {self.grad_accum_steps}.",
        )


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Everything a run is told."""

    run: RunConfig = field(default_factory=RunConfig)
    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)

    def __post_init__(self) -> None:
        if self.model.parallel == "fsdp":
            require(
                self.optim.ema_decay is None,
                "--parallel fsdp and --ema-decay do not go together: the average would be a whole "
                "second model in each process. Leave one of them out.",
            )
            require(
                self.optim.optimizer != "sgd" or not self.optim.fused,
                "--parallel fsdp has no fused SGD: torch's kernel does not take sharded "
                "parameters. Add --no-fused, or take --optimizer adamw.",
            )

    @property
    def model_name(self) -> str:
        """The model, which `auto` leaves to the data."""
        if self.model.model != "auto":
            return self.model.model
        return "small_cnn" if self.data.data == "digits" else "resnet50"

    @property
    def run_dir(self) -> Path:
        """`runs/<name>`; without --name, a name made of data, model, precision, and the settings
        that make another run of it: a loop over --lr gives as many runs."""
        data = self.data.data.strip("/").replace("/", "_").replace(":", "-")
        model = self.model_name.strip("/").replace("/", "_").replace(":", "-")
        # 224 has no part in the name: it was the default before there was a choice.
        default = {**flatten(TrainConfig()), "image_size": IMAGE_SIZE}
        differing = [
            f"-{name}{str(value).removeprefix('#')}"
            for name, value in flatten(self).items()
            if name in NAMED_IN_RUN and value not in (None, default[name])
        ]
        name = self.run.name or f"{data}-{model}-{self.precision.precision}{''.join(differing)}"
        return self.run.runs / name


def flatten(config: TrainConfig) -> dict[str, Plain]:
    """All settings by name, as plain types, without --config, whose values are already among
    them."""
    flat: dict[str, Plain] = {}
    for group in dataclasses.fields(config):
        for setting in dataclasses.fields(getattr(config, group.name)):
            value = getattr(getattr(config, group.name), setting.name)
            flat[setting.name] = str(value) if isinstance(value, Path) else value
    del flat["config"]
    return flat


def from_flat(flat: dict[str, Any]) -> TrainConfig:
    """The settings of `flat`, defaults elsewhere. Raises ConfigError for a name or a type that is
    not known."""
    rest = renamed(flat)
    groups: dict[str, Any] = {}
    for group in dataclasses.fields(TrainConfig):
        kind = group.default_factory
        assert isinstance(kind, type)
        known = {setting.name: setting for setting in dataclasses.fields(kind)}
        values = {
            name: _coerce(known[name], rest.pop(name)) for name in list(rest) if name in known
        }
        groups[group.name] = kind(**values)
    for name in rest:
        known_names = list(flatten(TrainConfig()))
        near = difflib.get_close_matches(str(name), known_names, n=1)
        every = f"the settings are {', '.join(known_names)}"
        which = f"perhaps you mean {near[0]}" if near else every
        raise ConfigError(f"There is no setting {name}; {which}.")
    return TrainConfig(**groups)


def renamed(flat: dict[str, Any]) -> dict[str, Any]:
    """`flat` with the names of today, and --augment with today's values, where it was true or
    false."""
    today = {RENAMED.get(name, name): value for name, value in flat.items()}
    if isinstance(today.get("augment"), bool):
        today["augment"] = "flip" if today["augment"] else "none"
    return today


def _coerce(setting: "dataclasses.Field[Any]", value: Any) -> Any:
    """`value` as the type of `setting`: paths of strings, floats of ints and of YAML's 1e-3, which
    it reads as text."""
    wanted = str(setting.type)
    if value is None and "None" in wanted:
        return None
    try:
        if "Path" in wanted:
            return Path(value)
        if "float" in wanted and not isinstance(value, bool):
            return float(value)
    except (TypeError, ValueError):
        raise ConfigError(f"{setting.name} is {value!r}; it needs to be a {wanted}.") from None
    if "Literal" in wanted:
        choices = get_args(setting.type)
        require(
            value in choices,
            f"{setting.name} is {value!r}; it needs to be one of {', '.join(choices)}.",
        )
        return value
    expected = bool if wanted == "<class 'bool'>" else int if "int" in wanted else str
    require(
        type(value) is expected,
        f"{setting.name} is {value!r}; it needs to be of type {expected.__name__}.",
    )
    return value


def load_yaml(path: Path) -> TrainConfig:
    """Settings from a YAML file. Raises ConfigError with the path and what is wrong."""
    try:
        content = yaml.safe_load(path.expanduser().read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"The file {path} given with --config cannot be read: {error}.") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"The file {path} given with --config is not YAML: {error}.") from None
    require(isinstance(content or {}, dict), f"{path} needs lines of the form `name: value`.")
    try:
        return from_flat(content or {})
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def save_yaml(config: TrainConfig, path: Path) -> None:
    """Write all settings, so that `--config` with this file repeats the run."""
    atomic_write(path, yaml.safe_dump(flatten(config), sort_keys=False))
