"""`amptrain check --run`: real small scripts, right and wrong ones, in processes of their own."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from amptrain.check import watch
from amptrain.check.judge import RUN_RULES, Record, judge

START = """
import time, torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

torch.set_num_threads(1)

class Numbers(Dataset):
    def __len__(self): return 40
    def __getitem__(self, index):
        {getitem}
        return torch.randn(8), torch.randint(2, ()).item()

model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
loss_fn = nn.CrossEntropyLoss()
loader = DataLoader(Numbers(), batch_size=2)
"""
NO_SCALER = (
    START.format(getitem="time.sleep(0.005)")
    + """
optimizer = torch.optim.AdamW(model.parameters())
for x, y in loader:
    with torch.autocast("cpu", dtype=torch.float16):
        loss = loss_fn(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"loss {loss:.3f}")
    total = float(loss)
"""
)
SKIPS = (
    START.format(getitem="")
    + """
optimizer = torch.optim.AdamW(model.parameters(), fused=FUSED)
scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
for step, (x, y) in enumerate(loader):
    loss = loss_fn(model(x), y) * (float("inf") if step % 4 == 0 else 1)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
"""
)
HALF = (
    START.format(getitem="")
    + """
model = model.bfloat16()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step, (x, y) in enumerate(loader):
    loss = loss_fn(model(x.bfloat16()), y)
    loss.backward()
    if step == 15:
        model[0].weight.grad[0, 0] = float("inf")
    optimizer.step()
    optimizer.zero_grad()
"""
)
RIGHT = (
    START.format(getitem="torch.rand(1).item()")
    + """
optimizer = torch.optim.AdamW(model.parameters())
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
def validate():
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.float16):
        return sum(loss_fn(model(x), y).item() for x, y in loader)
total, step = torch.zeros(()), 0
time_at = time.perf_counter
for epoch in range(3):
    for x, y in loader:
        time.sleep(0.01)
        with torch.autocast("cpu", dtype=torch.float16):
            loss = loss_fn(model(x), y)
        scaler.scale(loss * float("inf") if step == 7 else loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        total += loss.detach()
        step += 1
        if step % 10 == 0:
            print(total.item())
        silent = loss.item()  # noqa: AMP106
    validate()
"""
)


def check(folder: Path, script: str, *flags: str) -> subprocess.CompletedProcess[str]:
    (folder / "script.py").write_text(script)
    command = [sys.executable, "-m", "amptrain", "check", *flags, "--run", "--"]
    return subprocess.run(
        [*command, sys.executable, "script.py"],
        cwd=folder,
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )


def environment() -> dict[str, str]:
    above = str(Path(watch.__file__).parents[2])
    paths = [above, os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths).strip(os.pathsep)}


def line_of(script: str, text: str) -> int:
    return next(n for n, line in enumerate(script.splitlines(), 1) if text in line)


def test_reads_waiting_and_a_missing_scaler_are_found(tmp_path: Path) -> None:
    run = check(tmp_path, NO_SCALER, "--format", "json")
    assert run.returncode == 1, run.stderr
    found = {(f["number"], f["line"]) for f in json.loads(run.stdout)}
    assert found == {
        ("AMP102", line_of(NO_SCALER, "optimizer.step()")),
        ("AMP106", line_of(NO_SCALER, "print(")),
        ("AMP106", line_of(NO_SCALER, "float(loss)")),
        ("AMP107", line_of(NO_SCALER, "for x, y")),
    }
    assert run.stderr.count("loss 0.") + run.stderr.count("loss 1.") == 20  # the script's stdout
    assert "20 steps on cpu" in run.stderr
    assert "autocast float16" in run.stderr


@pytest.mark.parametrize("fused", [True, False])
def test_skips_are_counted(tmp_path: Path, fused: bool) -> None:
    script = SKIPS.replace("FUSED", str(fused))
    run = check(tmp_path, script)
    place = f"script.py:{line_of(script, 'scaler.step')}:1:"
    assert f"{place} AMP103 skipped: 5 of 20 steps: " in run.stderr
    assert f"{place} AMP104 the loss scale fell to 0.125: " in run.stderr
    assert "20 steps on cpu" in run.stderr
    assert "5 skipped; loss scale 0.125, at least 0.125" in run.stderr
    assert (run.stderr.count("AMP1"), run.returncode) == (2 * 2, 1)  # each with its page


def test_half_parameters_and_inf_are_found(tmp_path: Path) -> None:
    run = check(tmp_path, HALF)
    place = f"script.py:{line_of(HALF, 'optimizer.step')}:1:"
    assert f"{place} AMP101 bfloat16: 4 of 4 parameters: " in run.stderr
    assert f"{place} AMP105 at step 16 a gradient is inf: " in run.stderr
    assert (run.stderr.count("AMP1"), run.returncode) == (2 * 2, 1)


def test_nothing_is_found_in_a_right_script(tmp_path: Path) -> None:
    run = check(tmp_path, RIGHT)
    assert run.returncode == 0, run.stderr
    assert "AMP" not in run.stderr
    (line,) = run.stderr.splitlines()
    assert line.startswith("amptrain: 60 steps on cpu in ")
    assert "parameters and gradients float32; autocast float16; 1 skipped; loss scale 512" in line
    assert len(run.stdout.splitlines()) == 6


def test_the_programs_own_exit_code_comes_first(tmp_path: Path) -> None:
    run = check(tmp_path, HALF + "raise SystemExit(7)\n")
    assert run.returncode == 7
    assert "AMP101" in run.stderr


def test_a_program_that_makes_no_step_is_not_checked(tmp_path: Path) -> None:
    run = check(tmp_path, "print('no torch')\n")
    assert (run.stdout, run.returncode) == ("no torch\n", 2)
    assert run.stderr == "amptrain: no step of a torch optimizer was seen.\n"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_go_to_the_program(tmp_path: Path, number: signal.Signals) -> None:
    (tmp_path / "script.py").write_text(
        textwrap.dedent("""
        import signal, sys, time
        def told(number, frame): print("told", number, flush=True); sys.exit(5)
        signal.signal(signal.SIGINT, told); signal.signal(signal.SIGTERM, told)
        print("ready", flush=True)
        time.sleep(60)
        """)
    )
    command = [sys.executable, "-m", "amptrain", "check", "--run", "--", sys.executable]
    with subprocess.Popen(
        [*command, "script.py"],
        cwd=tmp_path,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as program:
        assert program.stdout is not None
        assert program.stdout.readline() == "ready\n"
        time.sleep(0.2)
        program.send_signal(number)
        assert program.communicate(timeout=30)[0] == f"told {number}\n"
    assert program.returncode == 5


def test_a_program_that_cannot_be_run_is_refused(tmp_path: Path, capfd) -> None:
    from amptrain.cli import main

    assert main(["check", "--run", "--", str(tmp_path / "gone")]) == 2
    assert "gone cannot be run: No such file or directory." in capfd.readouterr().err
    assert main(["check", "--run", "script.py"]) == 2


def test_the_hooks_leave_torch_as_it_was(tmp_path: Path) -> None:
    import torch

    before = {name: getattr(torch.Tensor, name) for name in watch.READS}
    step = torch.amp.grad_scaler.GradScaler.step
    watching = watch.Watch(tmp_path)
    watching.start()
    assert torch.Tensor.item is not before["item"]
    watching.end()
    assert {name: getattr(torch.Tensor, name) for name in watch.READS} == before
    assert torch.amp.grad_scaler.GradScaler.step is step
    assert list(tmp_path.iterdir()) == []  # no step was made


def test_a_rank_that_counts_less_hides_nothing() -> None:
    """The last step may end before its reads: one step is given for it."""
    record = {
        "steps": 10, "place": ["a.py", 3], "device": "cuda", "dtypes": {"float32": 1},
        "autocast": None, "nonfinite": None, "scaler": None, "seconds": 1.0, "waited": 0.0,
        "waits": [], "reads": [["a.py", 4, "item", 9], ["a.py", 5, "item", 8]],
    }  # fmt: skip
    assert [(f.place.line, f.rule) for f in judge(record)] == [(4, RUN_RULES["AMP106"])]


CLEAN: Record = {
    "steps": 100,
    "seconds": 100.0,
    "place": ("train.py", 7),
    "dtypes": {"float32": 4},
    "autocast": "float16",
    "scaler": {"skipped": 0, "steps": 100, "lowest": 65536.0, "scale": 65536.0},
    "nonfinite": None,
    "reads": [],
    "waited": 0.0,
    "waits": [("train.py", 5, 1.0)],
}


@pytest.mark.parametrize(
    ("number", "told", "not_told"),
    [
        ("AMP103", {"scaler": {"skipped": 10}}, {"scaler": {"skipped": 9}}),
        (
            "AMP103",
            {"steps": 10, "scaler": {"skipped": 3, "steps": 10}},
            {"steps": 9, "scaler": {"skipped": 3, "steps": 9}},
        ),
        ("AMP104", {"scaler": {"lowest": 0.5}}, {"scaler": {"lowest": 1.0}}),
        (
            "AMP106",
            {"reads": [("train.py", 9, "item", 90)]},
            {"reads": [("train.py", 9, "item", 89)]},
        ),
        (
            "AMP106",
            {"steps": 10, "reads": [("train.py", 9, "item", 10)]},
            {"steps": 9, "reads": [("train.py", 9, "item", 9)]},
        ),
        ("AMP107", {"waited": 20.1}, {"waited": 20.0}),
        ("AMP107", {"seconds": 1.0, "waited": 0.51}, {"seconds": 1.0, "waited": 0.5}),
    ],
)
def test_how_often_is_too_often(number: str, told: Record, not_told: Record) -> None:
    def record(changes: Record) -> Record:
        return CLEAN | changes | {"scaler": CLEAN["scaler"] | changes.get("scaler", {})}

    assert [finding.rule.number for finding in judge(record(told))] == [number]
    assert judge(record(not_told)) == []
