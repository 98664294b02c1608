"""The command line: `amptrain COMMAND`, each command with its own flags and --help."""

import atexit
import errno
import os
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack, redirect_stdout
from importlib import metadata
from pathlib import Path
from typing import TypeVar

from amptrain import __version__
from amptrain.config import RENAMED, TrainConfig, load_yaml
from amptrain.errors import ConfigError, TrainingError
from amptrain.files import discard

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
    command = COMMANDS.get(words[0]) if words else None
    return run(_without_command, words) if command is None else run(command, words[1:])


def _without_command(words: Sequence[str]) -> int:
    """`amptrain`, `amptrain --help` and `amptrain --version`. Raises ConfigError."""
    if not words or words[0] in {"-h", "--help"}:
        print(USAGE)
    elif words[0] == "--version":
        print(f"amptrain {__version__}, torch {metadata.version('torch')}")
    else:
        raise ConfigError(f"there is no command {words[0]!r}.\n\n{USAGE}")
    return 0


def run(command: Callable[[Sequence[str]], int], arguments: Sequence[str]) -> int:
    """`command`, with its failures told as sentences. Ctrl-C gives 130, and a reader that goes away
    (`| head`) 141, as in a shell. Both streams are left so that Python's flush at its end, whose
    failure would be the exit code 120, has nothing to do."""
    if os.environ.get("NO_COLOR"):  # no-color.org; tyro has a word of its own
        os.environ["PYTHON_TYRO_ANSI_CODES"] = "False"
    with ExitStack() as streams:
        if sys.stdout is None:  # closed (`>&-`), and tyro asks whether it is a terminal
            nowhere = streams.enter_context(Path(os.devnull).open("w", encoding="utf-8"))
            streams.enter_context(redirect_stdout(nowhere))
        code = _code_of(command, arguments) or _flush_stdout()
    atexit.register(_remove_directory_of_torch)  # here, so that it comes before Python's own turn
    return code


def _remove_directory_of_torch() -> None:
    """torch leaves a temporary directory of its own (torch/distributed/nn/jit/instantiator.py) for
    Python to find at the end, which `python -W error` shows as a traceback."""
    module = sys.modules.get("torch.distributed.nn.jit.instantiator")
    if module is not None:
        module._TEMP_DIR.cleanup()


def _code_of(command: Callable[[Sequence[str]], int], arguments: Sequence[str]) -> int:
    """The exit code of `command`, also where argparse or tyro end it: for --help, or a flag that
    does not exist."""
    try:
        return command(arguments)
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except KeyboardInterrupt:  # a run in training has a handler of its own, and saves
        return _tell("Stopped by Ctrl-C.", 128 + signal.SIGINT)
    except ConfigError as error:
        return _tell(str(error), 2)
    except TrainingError as error:
        return _tell(str(error), 1)
    except OSError as error:
        return _refused(error)


def _refused(error: OSError) -> int:
    """The exit code for an error of a file or stream, told."""
    if isinstance(error, BrokenPipeError):
        discard(sys.stdout)
        return 128 + signal.SIGPIPE
    # A full disk, a directory that may not be written to; anything else is a fault of ours.
    if error.filename is None and error.errno not in {errno.ENOSPC, errno.EDQUOT, errno.EROFS}:
        raise error
    place = error.filename or "to write standard output or a file"
    return _tell(f"The file system refused {place}: {error.strerror}.", 1)


def _tell(sentence: str, code: int) -> int:
    """Say `sentence` on standard error if that can be written to. Returns `code`, which says the
    same to a program; what stands in standard output goes out, too."""
    _flush_stdout()
    try:
        print(f"amptrain: {sentence}", file=sys.stderr, flush=True)
    except OSError:
        discard(sys.stderr)
    return code


def _flush_stdout() -> int:
    """Write what stands in standard output, here, where one can see that it fails. Returns the exit
    code: 141 without a reader, 1 on a full disk, told."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except BrokenPipeError:
        discard(sys.stdout)
        return 128 + signal.SIGPIPE
    except OSError as error:
        discard(sys.stdout)
        return _tell(f"Standard output can't be written: {error.strerror}.", 1)
    return 0
