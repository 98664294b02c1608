"""The command line: `amptrain COMMAND`, each command with its own flags and --help."""

import errno
import os
import signal
import sys
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import TypeVar

from amptrain import __version__
from amptrain.config import RENAMED, TrainConfig, load_yaml
from amptrain.errors import ConfigError, TrainingError

USAGE = """\
usage: amptrain COMMAND [flags]

  train            train a model, or continue the run of the same name
  check            find the known mistakes of mixed precision in your own script
  plot             draw loss, learning rate and loss scale of one or more runs
  predict          tell the class of images with a trained model
  evaluate         judge a trained model on labelled images
  export           write a trained model as ONNX, torch.export or safetensors
  bench            measure time and memory of each precision on this machine
  advise           find the fastest settings for your model on this machine
  find-batch       find the largest micro-batch that fits into memory
  verify-resume    show that your settings continue bit for bit after a kill

`amptrain COMMAND --help` tells the flags of a command."""


def train(arguments: Sequence[str]) -> int:
    """`amptrain train`, and `train_amp.py`."""
    config = parse_config(arguments, prog="amptrain train")
    from amptrain.train import train as run

    return run(config)


def plot(arguments: Sequence[str]) -> int:
    """`amptrain plot`."""
    from amptrain.report.plot import main

    return main(arguments)


def check(arguments: Sequence[str]) -> int:
    """`amptrain check`."""
    from amptrain.check.command import main

    return main(arguments)


def verify_resume(arguments: Sequence[str]) -> int:
    """`amptrain verify-resume`, with the flags of `amptrain train`."""
    from amptrain.verify import verify_resume as verify

    return verify(parse_config(arguments, prog="amptrain verify-resume"))


def find_batch(arguments: Sequence[str]) -> int:
    """`amptrain find-batch`, with the flags of `amptrain train` and --max-batch."""
    from amptrain.trials.find_batch import FindBatchConfig
    from amptrain.trials.find_batch import find_batch as find

    def around(train: TrainConfig) -> FindBatchConfig:
        return FindBatchConfig(train=train)

    return find(_parse(FindBatchConfig, around, arguments, prog="amptrain find-batch"))


def bench(arguments: Sequence[str]) -> int:
    """`amptrain bench`, with the flags of `amptrain train` and its own."""
    from amptrain.trials.bench import BenchConfig, default_bench
    from amptrain.trials.bench import bench as measure

    def around(train: TrainConfig) -> BenchConfig:
        return BenchConfig(train=default_bench() if train == TrainConfig() else train)

    return measure(_parse(BenchConfig, around, arguments, prog="amptrain bench"))


def advise(arguments: Sequence[str]) -> int:
    """`amptrain advise`, with the flags of `amptrain train` and --repeats."""
    from amptrain.trials.advise import AdviseConfig
    from amptrain.trials.advise import advise as find

    def around(train: TrainConfig) -> AdviseConfig:
        return AdviseConfig(train=train)

    return find(_parse(AdviseConfig, around, arguments, prog="amptrain advise"))


def predict(arguments: Sequence[str]) -> int:
    """`amptrain predict`."""
    from amptrain.inference.predict import main

    return main(arguments)


def evaluate(arguments: Sequence[str]) -> int:
    """`amptrain evaluate`."""
    from amptrain.inference.evaluate import main

    return main(arguments)


def export(arguments: Sequence[str]) -> int:
    """`amptrain export`."""
    from amptrain.inference.export import main

    return main(arguments)


COMMANDS: dict[str, Callable[[Sequence[str]], int]] = {
    "train": train,
    "check": check,
    "plot": plot,
    "predict": predict,
    "evaluate": evaluate,
    "export": export,
    "bench": bench,
    "advise": advise,
    "find-batch": find_batch,
    "verify-resume": verify_resume,
}


Settings = TypeVar("Settings")


def parse_config(arguments: Sequence[str], prog: str) -> TrainConfig:
    """Settings from flags, over those of the file given with --config, over the defaults. Raises
    ConfigError."""
    return _parse(TrainConfig, lambda train: train, arguments, prog)


def _parse(
    kind: type[Settings],
    around: Callable[[TrainConfig], Settings],
    arguments: Sequence[str],
    prog: str,
) -> Settings:
    """Settings of `kind`, which `around` makes of those of a run."""
    import tyro

    arguments = [
        _today(argument, following)
        for argument, following in zip(arguments, [*arguments[1:], "--"], strict=False)
    ]
    path = _config_path(arguments)
    defaults = around(TrainConfig() if path is None else load_yaml(path))
    options = (tyro.conf.OmitArgPrefixes, tyro.conf.AvoidSubcommands)
    return tyro.cli(kind, prog=prog, args=arguments, default=defaults, config=options)


def _today(argument: str, following: str) -> str:
    """A flag by the name of today, where it has the one from before; `following` is what comes
    after it."""
    if argument == "--no-augment":
        return "--augment=none"
    if argument == "--augment" and following.startswith("-"):
        return "--augment=flip"
    flag, equals, value = argument.partition("=")
    name = flag.removeprefix("--").replace("-", "_")
    if not flag.startswith("--") or name not in RENAMED:
        return argument
    return f"--{RENAMED[name].replace('_', '-')}{equals}{value}"


def _config_path(arguments: Sequence[str]) -> Path | None:
    """The last file given with --config, which has to be read before the flags are: it gives their
    defaults."""
    path = None
    for argument, following in zip(arguments, [*arguments[1:], ""], strict=False):
        name, equals, value = argument.partition("=")
        if name == "--config":
            path = Path(value if equals else following)
    return path


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command. Returns the exit code: 2 for what cannot be asked for, 1 for what failed; both
    with a sentence."""
    words = sys.argv[1:] if arguments is None else list(arguments)
    if not words or words[0] in {"-h", "--help"}:
        print(USAGE)
        return 0
    if words[0] == "--version":
        print(f"amptrain {__version__}, torch {metadata.version('torch')}")
        return 0
    if words[0] not in COMMANDS:
        print(f"amptrain: there is no command {words[0]!r}.\n\n{USAGE}", file=sys.stderr)
        return 2
    return run(COMMANDS[words[0]], words[1:])


def run(command: Callable[[Sequence[str]], int], arguments: Sequence[str]) -> int:
    """`command`, with its failures told as sentences. Ctrl-C gives 130, and a reader that goes away
    (`| head`) 141, as in a shell."""
    if os.environ.get("NO_COLOR"):  # no-color.org; tyro has a word of its own
        os.environ["PYTHON_TYRO_ANSI_CODES"] = "False"
    try:
        code = command(arguments)
        if sys.stdout is not None:
            sys.stdout.flush()  # here, where one can see that it fails
        return code
    except KeyboardInterrupt:  # a run in training has a handler of its own, and saves
        print("amptrain: Stopped by Ctrl-C.", file=sys.stderr)
        return 128 + signal.SIGINT
    except BrokenPipeError:
        from amptrain.report.terminal import discard_stdout

        discard_stdout()
        return 128 + signal.SIGPIPE
    except ConfigError as error:
        print(f"amptrain: {error}", file=sys.stderr)
        return 2
    except TrainingError as error:
        print(f"amptrain: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        # A full disk, a directory that may not be written to; anything else is a fault of ours.
        if error.filename is None and error.errno not in {errno.ENOSPC, errno.EDQUOT, errno.EROFS}:
            raise
        where = f" {error.filename}" if error.filename else ""
        print(f"amptrain: The file system refused{where}: {error.strerror}.", file=sys.stderr)
        return 1
