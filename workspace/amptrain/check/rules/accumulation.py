"""Gradient accumulation: several backward passes for one step."""

import ast

from amptrain.check.registry import Found, rule
from amptrain.check.script import Loop, Script, position, text

PARALLEL = "torch.nn.parallel.DistributedDataParallel"
NAMES = (PARALLEL, f"{PARALLEL.rpartition('.')[0]}.distributed.DistributedDataParallel")


def accumulating(script: Script) -> list[tuple[Loop, ast.Call, str]]:
    """Each loop that runs backward at each batch and steps at every Nth (`if … % n == 0`), with
    the step and its optimizer."""
    found = []
    for step, optimizer in script.optimizer_steps:
        loops = script.loops(step)
        if not loops:
            continue
        condition = next(
            (
                parent
                for parent, side in script.branches(step, up_to=loops[0]).items()
                if isinstance(parent, ast.If) and side == "body" and script.every_nth(parent.test)
            ),
            None,
        )
        backward = [b for b in script.backwards if script.loops(b)[:1] == [loops[0]]]
        if condition and any(
            condition not in script.branches(b, up_to=loops[0])
            and position(b) < position(step)
            and not script.exclude(b, step)
            for b in backward
        ):
            found.append((loops[0], step, optimizer))
    return found


@rule(
    "AMP030",
    "accumulated-gradients-zeroed",
    "`zero_grad` runs at each micro-batch, so the step sees the last micro-batch only.",
    "Call `zero_grad` where the step is, behind the same condition.",
    "bytetriper/RAE#67",
)
def zeroed_each_batch(script: Script) -> Found:
    for loop, step, optimizer in accumulating(script):
        for call, name in script.methods("zero_grad"):
            if name != optimizer or script.loops(call)[:1] != [loop]:
                continue
            if not script.branches(call, up_to=loop) and not script.exclude(call, step):
                yield call, ""
                break


@rule(
    "AMP031",
    "no-no-sync",
    "DistributedDataParallel averages the gradients over all ranks at each micro-batch, though "
    "only the last one's are used.",
    "Run all but the last micro-batch of a step in `with model.no_sync():`.",
    "pytorch/pytorch#43201",
)
def no_no_sync(script: Script) -> Found:
    if script.mentions("no_sync", "require_backward_grad_sync", "set_requires_gradient_sync"):
        return
    wrapped = [
        call
        for call in script.calls
        if script.means(call.func, *NAMES) or text(call.func) in {"DDP", "DistributedDataParallel"}
    ]
    if not wrapped:
        return
    for _, step, _ in accumulating(script):
        yield step, ""
        return


@rule(
    "AMP032",
    "unscaled-each-micro-batch",
    "`unscale_` runs at each micro-batch, and fails at the second: it may be called once between "
    "two calls of `update`, when the gradients are complete.",
    "Call `unscale_`, and clip, where the step is, behind the same condition.",
    "microsoft/Swin-Transformer#311",
)
def unscaled_each_batch(script: Script) -> Found:
    for loop, step, optimizer in accumulating(script):
        for call, _ in script.methods("unscale_"):
            if script.loops(call)[:1] != [loop] or script.exclude(call, step):
                continue
            conditions = script.branches(call, up_to=loop)
            nth = any(isinstance(at, ast.If) and script.every_nth(at.test) for at in conditions)
            if not nth and [text(value) for value in call.args] == [optimizer]:
                yield call, ""
                break
