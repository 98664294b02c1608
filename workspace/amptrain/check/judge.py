"""What a watched run shows: the rules for runs, numbered from AMP101, and the line that sums one
up."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from amptrain.check.finding import Finding, Place, Rule
from amptrain.check.source import read
from amptrain.errors import ConfigError
from amptrain.words import counted

FEWEST_STEPS = 10  # of fewer, nothing is said that is a matter of how often
OFTEN_SKIPPED = 0.1
EACH_STEP = 0.9
MUCH_WAITING = 0.2
LONG_WAIT = 0.005  # seconds a step; less is a loader's own work, or a busy machine's stutter
RUN_RULES = {
    rule.number: rule
    for rule in (
        Rule(
            "AMP101",
            "half-precision-parameters",
            "an update much smaller than its weight is rounded away, and the weight stays.",
            "Leave out `.half()` and `.bfloat16()`: keep the parameters FP32 and let autocast cast "
            "copies of them.",
            "pytorch/ao#1124",
        ),
        Rule(
            "AMP102",
            "float16-without-scaler",
            "gradients below 6e-8 become zero in float16.",
            "Scale the loss by `torch.amp.GradScaler`, or autocast to bfloat16.",
            "engichang1467/Open-Rig3R#35",
        ),
        Rule(
            "AMP103",
            "many-skipped-steps",
            "a skipped step learns nothing from its batch.",
            "Look for what overflows: losses and norms in float16, a high learning rate, a bad "
            "sample; a few skips at the start alone are no fault, a lower `init_scale` saves them.",
            "espnet/espnet#3237",
        ),
        Rule(
            "AMP104",
            "loss-scale-below-one",
            "a scale this low no longer helps small gradients, and at 0 the weights become NaN.",
            "Stop the run, and find what overflows; if it is the model's range, train in bfloat16.",
            "pytorch/pytorch#99640",
        ),
        Rule(
            "AMP105",
            "gradient-not-finite",
            "the optimizer writes it into the weights, where it stays.",
            "Step only if the norm that `clip_grad_norm_` returns is finite, and find what gave "
            "inf or NaN with `torch.autograd.set_detect_anomaly(True)`.",
            "pytorch/pytorch#40497",
        ),
        Rule(
            "AMP106",
            "host-reads-at-each-step",
            "on a GPU the host waits there until the device is done, and the device then waits "
            "for the host.",
            "Add up on the device with `detach()`, and read every 50 steps or so.",
            "meta-pytorch/torchtune#522",
        ),
        Rule(
            "AMP107",
            "waits-for-data",
            "the device has nothing to do meanwhile.",
            "Give the DataLoader more `num_workers` and `persistent_workers=True`, store smaller "
            "images, or move transforms to the device.",
            "open-edge-platform/geti#5958",
        ),
    )
}
Record = dict[str, Any]


def judge(record: Record) -> list[Finding]:
    """The findings in the record of one process, those left out that a `# noqa` silences."""
    found = []
    for number, (file, line), detail in _found(record):
        place = Place(_shown(file), None, line, 1)
        if not _silenced(place, number):
            found.append(Finding(place, RUN_RULES[number], detail))
    return found


def _found(record: Record) -> Iterator[tuple[str, tuple[str, int], str]]:
    steps, place, scaler = record["steps"], tuple(record["place"]), record["scaler"]
    for dtype in ("float16", "bfloat16"):
        if count := record["dtypes"].get(dtype):
            whole = sum(record["dtypes"].values())
            yield "AMP101", place, f"{dtype}: {count} of {counted(whole, 'parameter')}"
    if record["autocast"] == "float16" and scaler is None:
        yield "AMP102", place, "autocast to float16, and no step by a GradScaler"
    if scaler is not None:
        skipped, of, lowest = scaler["skipped"], scaler["steps"], scaler["lowest"]
        if of >= FEWEST_STEPS and skipped >= 3 and skipped >= OFTEN_SKIPPED * of:
            yield "AMP103", place, f"skipped: {skipped} of {counted(of, 'step')}"
        if lowest is not None and lowest < 1:
            yield "AMP104", place, f"the loss scale fell to {lowest:g}"
    if record["nonfinite"] is not None:
        step, norm = record["nonfinite"]
        yield "AMP105", place, f"at step {step} a gradient is {norm:g}"
    if steps < FEWEST_STEPS:
        return
    for file, line, name, count in record["reads"]:
        if count >= EACH_STEP * (steps - 1):
            yield "AMP106", (file, line), f"{_call(name)} in {count} of {counted(steps, 'step')}"
    share = _waiting(record)
    if share > MUCH_WAITING and record["waited"] > LONG_WAIT * steps and record["waits"]:
        file, line, _ = max(record["waits"], key=lambda wait: wait[2])
        yield "AMP107", (file, line), f"{share:.0%} of the time waits for data"


def summary(record: Record) -> str:
    """What was seen, in one line."""
    steps, scaler = record["steps"], record["scaler"]
    parts = [
        f"{steps} step{'s' * (steps != 1)} on {record['device']} in {record['seconds']:.1f} s",
        f"parameters and gradients {' and '.join(record['dtypes'])}",
        f"autocast {record['autocast']}" if record["autocast"] else "no autocast",
    ]
    if scaler is not None:
        parts.append(f"{scaler['skipped']} skipped")
        if scaler["scale"] is not None:
            parts.append(f"loss scale {scaler['scale']:g}, at least {scaler['lowest']:g}")
    parts.append(f"{_waiting(record):.0%} of the time waiting for data")
    return "; ".join(parts)


def _waiting(record: Record) -> float:
    return record["waited"] / record["seconds"] if record["seconds"] else 0.0


def _call(name: str) -> str:
    """A method as people write it."""
    function = name.strip("_")
    return f"{function}()" if name.startswith("__") else f".{name}()"


def _shown(file: str) -> str:
    """Relative to this folder where it is inside it, as it would be given on a command line."""
    path = Path(file)
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)


def _silenced(place: Place, number: str) -> bool:
    try:
        noqa = read(Path(place.path)).suppressed()
    except ConfigError:
        return False
    numbers = noqa.get(place.line, set())
    return numbers is None or number in numbers
