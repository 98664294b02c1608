"""What runs in the process of a trial: a request from stdin, an answer to stdout, as JSON."""

import contextlib
import json
import os
import re
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.utils.tensorboard.writer  # so that as much is loaded as in training
import torchvision

import amptrain.train  # noqa: F401
from amptrain.config import PrecisionConfig, TrainConfig, from_flat
from amptrain.data.datasets import Dataset, FakeImages, open_dataset
from amptrain.distributed import Processes
from amptrain.errors import ConfigError
from amptrain.limits import memory_free
from amptrain.memory import held, is_out_of_memory, out_of_memory, told_at
from amptrain.optim import with_learning_rates
from amptrain.precision import has_bf16, precision_class
from amptrain.precisions import precision_names
from amptrain.pretrained import find_start, with_image_size
from amptrain.trials.clocks import watched
from amptrain.trials.process import Effort
from amptrain.trials.session import Session, timed

Answer = dict[str, Any]


def main(_: Sequence[str]) -> int:
    """Do what is asked for on stdin."""
    with contextlib.suppress(OSError):
        # Where the kernel has to kill for memory, it is to be this process and no other.
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what anything prints meanwhile is no answer
    request = json.load(sys.stdin)
    config = with_learning_rates(from_flat(request["settings"]))
    config = with_image_size(config, find_start(config))
    answer = WORK[request["work"]](config, **request["arguments"])
    with answers:
        json.dump(answer, answers)
    return 0


def facts(config: TrainConfig) -> Answer:
    """See process.Facts."""
    processes = Processes(config.run.device)
    device, is_cuda = processes.device, processes.device.type == "cuda"
    task = open_dataset(config.data, config.run.seed)
    versions = {"torch": torch.__version__, "torchvision": torchvision.__version__}
    if is_cuda:
        versions |= {"CUDA": str(torch.version.cuda), "cuDNN": str(torch.backends.cudnn.version())}
    return {
        "device": torch.cuda.get_device_name(device) if is_cuda else cpu_name(),
        "is_cuda": is_cuda,
        "memory": torch.cuda.mem_get_info(device)[0] if is_cuda else memory_free(),
        "cpus": processes.cpus,
        "versions": versions,
        "emulated": dict(emulated(config.precision, device)),
        "images": len(task.train),
        "shape": task.shape,
        "is_made": isinstance(task.train, FakeImages),
    }


def emulated(config: PrecisionConfig, device: torch.device) -> Iterator[tuple[str, str]]:
    """Precisions that `device` lacks or emulates, each with the reason."""
    for name in precision_names():
        kind = precision_class(name)
        try:
            kind.check(device)
        except ConfigError as error:
            yield name, f"it {str(error).removeprefix(f'--precision {name} ')}"
            continue
        if emulates(kind.dtype, device):
            where = "GPU" if device.type == "cuda" else "CPU"
            yield name, f"this {where} emulates it"


def emulates(dtype: torch.dtype | None, device: torch.device) -> bool:
    """Whether `device` has no instructions for `dtype`; None is FP32."""
    if dtype is torch.bfloat16:
        return not has_bf16(device)
    if dtype is torch.float16 and device.type == "cpu":
        ops: Any = torch.ops.mkldnn
        return not (torch.backends.mkldnn.is_available() and ops._is_mkldnn_fp16_supported())
    return False


def cpu_name(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """The processor's own name for itself."""
    for line in cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return "the CPU"


def fit(config: TrainConfig, micro_batch: int) -> Answer:
    """See process.Fit."""
    processes = Processes(config.run.device)
    try:
        with limited(processes):
            task = open_dataset(config.data, config.run.seed)
            Session(config, task, processes).try_step(micro_batch)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        return {"fits": False, "why": refused(str(error))}
    return peak(processes.device)


def refused(text: str) -> str:
    """What torch says of memory that ran out, in a few words where they are known."""
    found = re.search(r"[Tt]ried to allocate (?:(\d+) bytes|([\d.]+ [KMG]iB))", text)
    if found is None:
        return (text.strip().splitlines() or ["no memory left"])[0]
    return f"no memory for {found[2] or f'{int(found[1]) / 2**20:.0f} MiB'} more"


def speed(
    config: TrainConfig, photos: str | None, with_data: bool, **seconds_and_steps: Any
) -> Answer:
    """See process.Speed."""
    effort, processes = Effort(**seconds_and_steps), Processes(config.run.device)
    images = config.optim.global_batch_size
    try:
        with limited(processes):
            task = open_dataset(config.data, config.run.seed)
            session = Session(config, task, processes)
            processes.set_threads(images // config.optim.grad_accum_steps, task.shape)
            with watched(processes.device) as clock:
                step = partial(session.step, session.endless_noise())
                seconds = timed(step, processes.device, effort)
            answer = {
                "images_per_s": images / statistics.median(seconds),
                "steps": len(seconds),
                "peak": peak(processes.device),
                **clock.found(),
            }
            if with_data:
                answer |= through_loader(session, data_of(config, task, photos), effort)
            return answer
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise out_of_memory(error, config, 1) from error


def data_of(config: TrainConfig, task: Dataset, photos: str | None) -> Dataset:
    """The data set itself, or where it is noise the folder `photos`."""
    if photos is None or not isinstance(task.train, FakeImages):
        return task
    return open_dataset(replace(config.data, data=f"imagefolder:{photos}"), config.run.seed)


def through_loader(session: Session, data: Dataset, effort: Effort) -> Answer:
    """Images/s through the loader."""
    with session.loaded(data) as feed:
        sizes: list[int] = []
        waited: list[float] = []

        def step() -> None:
            sizes.append(feed.order.size(len(sizes)))
            waited.append(feed.training.waited)
            session.step(feed.step())

        seconds = timed(step, session.device, effort)
        measured = slice(len(sizes) - len(seconds), None)
        return {
            "data_images_per_s": sum(sizes[measured]) / sum(seconds),
            "data_wait": min(1.0, (feed.training.waited - waited[measured][0]) / sum(seconds)),
            "workers": feed.workers,
        }


def limited(processes: Processes) -> contextlib.AbstractContextManager[None]:
    """On a CPU: fail above what is free now, rather than be killed for it."""
    is_cpu = processes.device.type == "cpu"
    return told_at(memory_free() + held("RssAnon") if is_cpu else None)


def peak(device: torch.device) -> Answer:
    """A Fit, of the most bytes held so far."""
    if device.type == "cpu":
        return {"fits": True, "resident": held("VmHWM")}
    return {
        "fits": True,
        "allocated": torch.cuda.max_memory_allocated(device),
        "reserved": torch.cuda.max_memory_reserved(device),
    }


WORK: dict[str, Callable[..., Answer]] = {"facts": facts, "fit": fit, "speed": speed}

if __name__ == "__main__":
    from amptrain.cli import run

    raise SystemExit(run(main, []))
