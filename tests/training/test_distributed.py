"""Several processes, started by torchrun; and signals."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from amptrain.checkpoint.store import CheckpointStore
from amptrain.config import DataConfig, TrainConfig
from amptrain.data.datasets import FileImages, open_dataset
from amptrain.data.order import ValidationBatches
from amptrain.data.shared import mapped, shared
from amptrain.distributed import _asked_threads, _interface
from amptrain.model import build_model
from amptrain.precision import resolve_precision
from PIL import Image

from .support import broken_folder, command, lines_of, records, wait_for

Make = Callable[..., TrainConfig]
# torchrun, as a program of this Python; a free port each time
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]


def torchrun(config: TrainConfig, script: str | None = None, **more: object) -> list[str]:
    """`torchrun -m amptrain train …`, or of `script`, which is given the same flags."""
    flags = command(config, **more)[4:]
    return [*TORCHRUN, *(["-m", "amptrain", "train"] if script is None else [script]), *flags]


def run(arguments: list[str], **variables: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "error::FutureWarning:amptrain"}
    env |= variables
    return subprocess.run(
        arguments, capture_output=True, text=True, timeout=180, check=False, env=env
    )


PLAIN_MODEL = '''
"""amptrain with a model without BatchNorm and dropout: its step is the same however its images are
shared out."""
import sys
from torch import nn
from amptrain import cli
from amptrain.checkpoint import state

def plain(name, task):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))

state.build_model = plain
if __name__ == "__main__":
    sys.exit(cli.run(cli.train, sys.argv[1:]))
'''


def weights(config: TrainConfig) -> dict[str, torch.Tensor]:
    loaded = CheckpointStore(config.run_dir / "checkpoints").load_latest()
    assert loaded is not None
    model = loaded.state["model"]
    assert isinstance(model, dict)
    return model


def test_two_processes_train_as_one_with_the_same_batch(make_config: Make, tmp_path: Path) -> None:
    """FP32, SGD, no BatchNorm: to 1e-5 of rounding. With accumulation, and a last step that is
    short."""
    script = tmp_path / "plain.py"
    script.write_text(PLAIN_MODEL)
    settings = {"precision": "fp32", "optimizer": "sgd", "lr": 0.05, "epochs": 2}
    one, two = (
        make_config(name="one", **settings),
        make_config(name="two", accumulate=2, **settings),
    )
    alone = run([sys.executable, str(script), *command(one)[4:]])
    assert alone.returncode == 0, alone.stderr
    both = run(torchrun(two, str(script)))
    assert both.returncode == 0, both.stderr
    assert "128 images: 2 processes × 2 micro-batches × 32 images" in both.stdout
    assert both.stdout.count("A step takes") == 1  # only rank 0 prints
    first, second = weights(one), weights(two)
    for name, weight in first.items():
        torch.testing.assert_close(second[name], weight, rtol=1e-5, atol=1e-5)
    for a, b in zip(records(one, "epoch"), records(two, "epoch"), strict=True):
        assert b["val_loss"] == pytest.approx(a["val_loss"], rel=1e-5)
        assert b["val_accuracy"] == a["val_accuracy"]
    losses = [[r["loss"] for r in records(config, "window")] for config in (one, two)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)


def test_validation_over_processes_is_that_of_the_saved_model(make_config: Make) -> None:
    """With BatchNorm, whose statistics differ between processes until rank 0's are shared; 360
    images over 2 × 64."""
    config = make_config(precision="fp32")
    assert run(torchrun(config)).returncode == 0
    task = open_dataset(config.data, 0)
    model = build_model("small_cnn", task)
    model.load_state_dict(weights(config))
    model.eval()
    precision = resolve_precision(config.precision, torch.device("cpu"))
    correct = loss = 0.0
    for batch in ValidationBatches(360, 360, 0, 1):
        samples = [task.validation[key] for key in batch.keys]
        images = (
            torch.stack([sample.image for sample in samples]).float() - task.mean[0]
        ) / task.std[0]
        labels = torch.tensor([sample.label for sample in samples])
        with torch.no_grad(), precision.autocast():
            logits = model(images)
        loss += float(torch.nn.functional.cross_entropy(logits, labels, reduction="sum"))
        correct += float((logits.argmax(1) == labels).sum())
    [epoch] = records(config, "epoch")
    assert epoch["val_accuracy"] == correct / 360
    assert epoch["val_loss"] == pytest.approx(loss / 360, rel=1e-4)


def started(config: TrainConfig) -> bool:
    metrics = config.run_dir / "metrics.jsonl"
    return metrics.exists() and metrics.stat().st_size > 0


@pytest.mark.parametrize("launch", [command, torchrun], ids=["alone", "torchrun"])
def test_sigterm_with_workers_ends_in_a_checkpoint(
    launch: Callable[..., list[str]], make_config: Make
) -> None:
    """Exit code 143; torchrun's own is 1 whatever its workers return. The same command then goes
    on."""
    config = make_config(epochs=2000, workers=1, log_every=2)
    with subprocess.Popen(
        launch(config), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        wait_for(lambda: started(config), 120)
        process.send_signal(signal.SIGTERM)
        output, error = process.communicate(timeout=30)
    stopped_at = int(output.split("Stopped as asked at step ")[1].split(".")[0])
    assert process.returncode == (143 if launch is command else 1), error
    loaded = CheckpointStore(config.run_dir / "checkpoints").load_latest()
    assert loaded is not None
    assert loaded.step == stopped_at
    again = run(launch(config, max_steps=stopped_at + 2))
    assert again.returncode == 0, again.stderr
    assert f"Continuing at step {stopped_at} of {stopped_at + 2}" in again.stdout


def test_a_process_that_dies_ends_the_others_with_a_message(
    make_config: Make, tmp_path: Path
) -> None:
    """Without torchrun's own watching: it kills the others only later."""
    config = make_config(epochs=2000, log_every=2)
    ranks = []
    for rank in range(2):
        env = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": "2",
        }
        env |= {"LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
        ranks.append(env)
    ranks[1]["MASTER_PORT"] = ranks[0]["MASTER_PORT"]
    processes = [
        subprocess.Popen(
            command(config), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=env
        )
        for env in ranks
    ]
    try:
        wait_for(lambda: started(config), 120)
        processes[1].kill()
        _, error = processes[0].communicate(timeout=60)
    finally:
        for process in processes:
            process.kill()
    assert processes[0].returncode == 1
    assert "amptrain: Rank 0 lost another process of this run" in error
    assert "Traceback" not in error


def free_port() -> str:
    import socket

    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return str(sock.getsockname()[1])


def test_the_log_of_two_killed_processes_has_no_hole(make_config: Make) -> None:
    """Each continues with its own part of the losses of the window that was open."""
    config = make_config(log_every=5, save_every=2, keep_checkpoints=9, precision="fp32")
    assert run(torchrun(config)).returncode == 0
    whole = lines_of(config.run_dir)
    # As if both were killed at the end, and step 6 had been the last one saved.
    for path in (config.run_dir / "checkpoints").glob("*.pt"):
        if path.stem > "step-000000006" or path.stem == "best":
            path.unlink()
    (config.run_dir / "result.json").unlink()
    again = run(torchrun(config))
    assert "Continuing at step 6 of 12" in again.stdout
    assert lines_of(config.run_dir) == whole
    assert [line["step"] for line in whole] == [5, 10, 12, 12]


def test_a_changed_number_of_processes_is_told(make_config: Make) -> None:
    config = make_config(max_steps=4, save_every=2)
    assert run(torchrun(config)).returncode == 0
    alone = run(command(make_config(max_steps=6)))
    assert alone.returncode == 0, alone.stderr
    assert "The checkpoint is of 2 processes, this run of 1." in alone.stdout
    assert json.loads((config.run_dir / "result.json").read_text())["world_size"] == 1


def test_gloo_takes_the_interface_of_the_route() -> None:
    assert _interface("127.0.0.1", 29500) == "lo"
    assert _interface("no.such.host.invalid", 29500) is None


def test_threads_follow_the_cpus(make_config: Make) -> None:
    code = (
        "import torch; from amptrain.distributed import Processes; p = Processes('cpu'); "
        "print(torch.get_num_threads())"
    )
    few = {min(os.sched_getaffinity(0))}
    env = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    done = subprocess.run(
        [sys.executable, "-c", f"import os; os.sched_setaffinity(0, {few}); {code}"],
        capture_output=True, text=True, check=True, env=env,
    )  # fmt: skip
    assert done.stdout.strip() == "1"


@pytest.mark.parametrize(
    ("asked", "threads"), [("3,2", 3), (" 2 ", 2), ("", None), ("abc", None), ("9" * 5000, None)]
)
def test_asked_threads_are_openmp_s(
    asked: str, threads: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", asked)
    assert _asked_threads() == threads


@pytest.mark.parametrize(("asked", "threads"), [({}, "4"), ({"OMP_NUM_THREADS": "1"}, "1")])
def test_ranks_share_the_cpus_whatever_torchrun_sets(
    asked: dict[str, str], threads: str, tmp_path: Path
) -> None:
    """torchrun sets one thread for each of several ranks, unless the user has set a number."""
    script = tmp_path / "threads.py"
    script.write_text(
        "import amptrain.distributed as d, torch\nd.usable_cpus = lambda: 8\n"
        "d.Processes('cpu'); import sys\n"
        "sys.stdout.write(f'threads {torch.get_num_threads()}\\n')\n"
    )
    env = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"} | asked
    done = subprocess.run(
        [*TORCHRUN, str(script)], capture_output=True, text=True, check=True, env=env
    )
    assert done.stdout.splitlines() == [f"threads {threads}"] * 2


def test_srun_without_torchrun_is_told(make_config: Make) -> None:
    config = make_config(precision="fp32")
    done = run(command(config), SLURM_STEP_NUM_TASKS="2", SLURM_PROCID="1")
    assert done.returncode == 2
    assert "RANK is not set" in done.stderr
    assert not config.run_dir.exists()


def test_cuda_that_is_not_there_is_said(make_config: Make) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has CUDA")
    from amptrain.distributed import Processes
    from amptrain.errors import ConfigError

    with pytest.raises(ConfigError, match="torch finds no CUDA device"):
        Processes("cuda")


@pytest.mark.parametrize(
    ("first", "second", "repeat_s", "code"),
    [
        ("SIGTERM", "SIGINT", 5, -signal.SIGINT),
        ("SIGINT", "SIGINT", 5, -signal.SIGINT),
        ("SIGTERM", "SIGTERM", 0, -signal.SIGTERM),
        ("SIGHUP", "SIGHUP", 0, -signal.SIGHUP),
        ("SIGTERM", "SIGTERM", 5, 0),  # Slurm's, and torchrun's which passes on the same request
        ("SIGHUP", "SIGHUP", 5, 0),  # the terminal's, and its shell's
    ],
)
def test_a_second_request_ends_at_once(first: str, second: str, repeat_s: int, code: int) -> None:
    program = (
        "import os, signal, time\nfrom amptrain import signals\n"
        f"signals.REPEAT_S = {repeat_s}\n"
        f"with signals.StopSignal() as stop:\n os.kill(os.getpid(), signal.{first})\n"
        f" assert stop.number == signal.{first}\n"
        " print('asked', flush=True)\n"
        f" os.kill(os.getpid(), signal.{second})\n time.sleep(0.2)\n"
        f" assert stop.number == signal.{first}\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=30
    )
    assert done.stdout == "asked\n"
    assert done.returncode == code


def test_nohup_is_heeded_and_a_thread_may_train() -> None:
    code = (
        "import os, signal, threading\nfrom amptrain.signals import StopSignal\n"
        "def use():\n with StopSignal() as stop:\n  print(stop.number)\n"
        "thread = threading.Thread(target=use); thread.start(); thread.join()\n"
        "with StopSignal() as stop:\n os.kill(os.getpid(), signal.SIGHUP)\n print(stop.number)\n"
    )
    command = ["nohup", sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
    assert (done.returncode, done.stdout) == (0, "None\nNone\n")


def test_ranks_with_different_settings_are_told(make_config: Make, tmp_path: Path) -> None:
    """As by a typo in the command on one of two machines."""
    config = make_config(precision="fp32")
    script = tmp_path / "differing.py"
    script.write_text(
        "import os, sys\nfrom amptrain import cli\n"
        "more = ['--lr=0.5'] if os.environ['RANK'] == '1' else []\n"
        "sys.exit(cli.run(cli.train, [*sys.argv[1:], *more]))\n"
    )
    done = run(torchrun(config, str(script)))
    assert done.returncode != 0
    assert "Rank 1 was given other settings than rank 0: lr 0.5 (rank 0 has " in done.stderr
    assert "Another rank was given other settings than this one." in done.stderr
    assert not (config.run_dir / "checkpoints").exists()


def test_a_broken_validation_image_loses_no_epoch_of_several_ranks(
    make_config: Make, tmp_path: Path
) -> None:
    """One that broke after the data were looked at, and that one rank alone reads."""
    folder = broken_folder(tmp_path)
    (folder / "train/black/1.png").unlink()
    config = make_config(
        data=f"imagefolder:{folder}", image_size=16, model="small_cnn", batch_size=4
    )
    script = tmp_path / "unseen.py"
    script.write_text(
        "import sys\nfrom amptrain import cli\nfrom amptrain.data.feed import Feed\n"
        "Feed.look = lambda self, log: None\n"
        "sys.exit(cli.run(cli.train, sys.argv[1:]))\n"
    )
    done = run(torchrun(config, str(script), image_size=16, batch_size=4))
    assert done.returncode != 0
    assert "2.png" in done.stderr
    assert "Another rank met an image that cannot be read; its message names it." in done.stderr
    # Of 7 images one step of 4: the other 3 are too few for two ranks.
    assert [path.name for path in (config.run_dir / "checkpoints").iterdir()] == [
        "step-000000001.pt"
    ]


SHARED = '''
"""What each rank has of a data set: the memory that its arrays lie in, and its first file."""
import json
import sys
from pathlib import Path
from amptrain.config import from_flat
from amptrain.data import shared
from amptrain.distributed import Processes
from amptrain.errors import ConfigError

processes, folder = Processes("cpu"), sys.argv[1]
found = []

def look(data):
    try:
        files = shared.open_for_all(from_flat({"data": data}), processes).train.files
    except ConfigError as error:
        return str(error)
    address = files.names.ctypes.data
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, end = (int(part, 16) for part in line.split()[0].split("-"))
        if start <= address < end:
            return [files.name(0).decode(), line.split()[4], "memfd:amptrain-data" in line]

found.append(look(f"imagefolder:{folder}"))
found.append(look(f"imagefolder:{folder}/gone"))
if processes.rank == 1:
    shared.machine = lambda: "another node"
found.append(look(f"imagefolder:{folder}"))

def refused(place):
    raise PermissionError(place.path)

if processes.rank == 1:
    shared.machine, shared.mapped = lambda: here, refused
here = processes.broadcast_object(shared.machine() if processes.rank == 0 else None)
found.append(look(f"imagefolder:{folder}"))
Path(f"{folder}/{processes.rank}.json").write_text(json.dumps(found))
processes.close()
'''


def test_ranks_of_one_machine_have_one_data_set_in_memory(tmp_path: Path) -> None:
    """Each other rank, and one that cannot see that memory, looks at the data by itself."""
    folder, script = broken_folder(tmp_path), tmp_path / "shared.py"
    script.write_text(SHARED)
    done = run([*TORCHRUN, str(script), str(folder)])
    assert done.returncode == 0, done.stderr
    first, second = (json.loads((folder / f"{rank}.json").read_text()) for rank in range(2))
    assert first[0] == second[0] == ["black/0.png", first[0][1], True]
    assert first[1] == second[1]
    assert first[1].startswith(f"The folder {folder}/gone is missing; imagefolder needs")
    for other in (2, 3):
        assert first[other][0] == second[other][0] == "black/0.png"
        assert (first[other][2], second[other][2]) == (True, False)


def test_what_a_process_changes_in_shared_arrays_it_alone_sees(tmp_path: Path) -> None:
    config = DataConfig(data=f"imagefolder:{broken_folder(tmp_path)}", image_size=16)
    with shared(open_dataset(config, 0)) as place:
        one, other = mapped(place), mapped(place)
    assert isinstance(one.train, FileImages)
    one.train.files.labels[0] = 7
    assert one.train.labels[0] == 7  # the same array, as it was before
    assert other.train.labels is not None
    assert other.train.labels.tolist() == [0] * 4 + [1] * 4
    assert [one.train.files.path(i) for i in range(8)] == sorted(
        map(str, (tmp_path / "images/train").glob("*/*.png"))
    )


FLAGS = '''
"""Runs of two ranks one after the other: what each says, or the steps that it took."""
import json
import os
import sys
from pathlib import Path
import torch.distributed as dist
from amptrain.config import from_flat
from amptrain.errors import ConfigError, TrainingError
from amptrain.train import train
from torch import nn

class Spare(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.spare = nn.Linear(64, 10), nn.Linear(64, 10)
    def forward(self, images):
        return self.body(images.flatten(1))

def result(name, **settings):
    config = from_flat({"runs": sys.argv[1], "device": "cpu", "epochs": 1, "name": name,
                        "precision": "fp32", "max_steps": 4, **settings})
    try:
        return train(config)
    except (ConfigError, TrainingError) as error:
        return f"{type(error).__name__}: {error}"
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()

if __name__ == "__main__":
    spare = {"model": f"{__file__}:Spare"}
    found = [
        result("sync", sync_batchnorm=True),
        result("unused", **spare, find_unused_parameters=True),
    ]
    Path(f"{sys.argv[1]}/{os.environ['RANK']}.json").write_text(json.dumps(found))
'''


def test_flags_of_models_on_several_ranks(tmp_path: Path) -> None:
    script = tmp_path / "flags.py"
    script.write_text(FLAGS)
    done = run([*TORCHRUN, str(script), str(tmp_path)])
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        sync, unused = json.loads((tmp_path / f"{rank}.json").read_text())
        assert sync == "ConfigError: --sync-batchnorm needs CUDA devices; torch has none for CPUs."
        assert unused == 0
    assert json.loads((tmp_path / "unused/result.json").read_text())["steps"] == 4


AGAIN = '''
"""Three runs one after the other in the same ranks, of which rank 0 is slow to leave each."""
import os
import sys
import time
import torch.distributed as dist
from amptrain.config import from_flat
from amptrain.train import train

leave = dist.destroy_process_group

def slowly():
    time.sleep(0.3 if os.environ["RANK"] == "0" else 0)
    leave()

if __name__ == "__main__":
    dist.destroy_process_group = slowly
    for number in range(3):
        train(from_flat({"runs": sys.argv[1], "device": "cpu", "epochs": 1, "name": str(number),
                         "precision": "fp32", "max_steps": 2}))
'''


@pytest.mark.parametrize("own_store", ["1", "0"])
def test_the_same_ranks_train_several_times(tmp_path: Path, own_store: str) -> None:
    """Whether rank 0 has the store, as in the image, or torchrun has, as is torch's default."""
    script = tmp_path / "again.py"
    script.write_text(AGAIN)
    done = run(
        [*TORCHRUN, str(script), str(tmp_path)], TORCH_DISABLE_SHARE_RDZV_TCP_STORE=own_store
    )
    assert done.returncode == 0, done.stderr
    for number in range(3):
        assert json.loads((tmp_path / f"{number}/result.json").read_text())["steps"] == 2


SLOW_DISK = '''
"""A disk on which each read takes a while, and processes that may wait for each other for less."""
import datetime
import sys
import threading
import time
import amptrain.distributed
from amptrain.cli import main
from amptrain.data import look

read, one_at_a_time = look.retried, threading.Lock()

def slowly(action):
    with one_at_a_time:
        time.sleep(0.5)
    return read(action)

if __name__ == "__main__":
    amptrain.distributed.TIMEOUT = datetime.timedelta(seconds=8)
    look.retried = slowly
    began = time.monotonic()
    code = main(["train", *sys.argv[1:]])
    assert time.monotonic() - began > 12
    sys.exit(code)
'''


def test_looking_at_images_may_take_longer_than_ranks_wait_for_each_other(tmp_path: Path) -> None:
    for index in range(24):
        folder = tmp_path / "images" / str(index % 2)
        folder.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8)).save(folder / f"{index}.png")
    script = tmp_path / "slow.py"
    script.write_text(SLOW_DISK)
    flags = ["--data", f"imagefolder:{tmp_path}/images", "--runs", str(tmp_path), "--max-steps=1"]
    flags += ["--device=cpu", "--image-size=8", "--global-batch-size=4", "--num-workers=0"]
    done = run([*TORCHRUN, str(script), *flags, "--model=small_cnn", "--name=slow"])
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "slow/result.json").exists()
