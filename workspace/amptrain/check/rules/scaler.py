"""How a GradScaler is used: the order of its calls, and what it is used with."""

import ast

from amptrain.check.registry import Found, rule
from amptrain.check.rules.autocast import bf16_only
from amptrain.check.script import Script, argument, is_constant, position, text

CLIPPING = {"clip_grad_norm_", "clip_grad_value_", "clip_grad_norm", "clip_grad_value"}
FP16 = {"torch.float16", "torch.half"}


@rule(
    "AMP010",
    "clip-before-unscale",
    "the gradients are still multiplied by the loss scale, so a limit of 1.0 clips nearly all of "
    "them away.",
    "Call `scaler.unscale_(optimizer)` before clipping.",
    "pytorch/examples#1196",
)
def clip_before_unscale(script: Script) -> Found:
    steps = [call for call, _ in script.scaler_methods("step")]
    unscales = [call for call, _ in script.methods("unscale_")]
    for call in script.calls:
        if text(call.func).rpartition(".")[2] not in CLIPPING:
            continue
        scope = script.scope(call)
        after = [
            step
            for step in steps
            if script.scope(step) is scope
            and position(step) > position(call)
            and not script.exclude(call, step)
        ]
        unscaled = any(
            script.scope(unscale) is scope and position(unscale) < position(call)
            for unscale in unscales
        )
        if after and not unscaled:
            yield call, ""


@rule(
    "AMP011",
    "no-scaler-update",
    "without `update` the loss scale never changes, and the second step fails or a scale that "
    "overflows skips every step.",
    "Call `scaler.update()` after `scaler.step(optimizer)`.",
    "Azure/MS-AMP#45",
)
def no_update(script: Script) -> Found:
    updated = {name.rpartition(".")[2] for _, name in script.methods("update")}
    for call, name in script.scaler_methods("step"):
        if name.rpartition(".")[2] not in updated:
            yield call, ""
            return


@rule(
    "AMP012",
    "optimizer-step-beside-scaler",
    "the optimizer also steps on its own: twice a batch, and once without the check for inf and "
    "NaN.",
    "Call `scaler.step(optimizer)` only.",
    "IAHispano/Applio#860",
)
def step_beside(script: Script) -> Found:
    scaled = [(call, text(call.args[0])) for call, _ in script.scaler_methods("step") if call.args]
    for call, name in script.methods("step"):
        for step, optimizer in scaled:
            together = script.scope(call) is script.scope(step) and name == optimizer
            loops = script.loops(call) == script.loops(step)
            if together and loops and _always_with(script, call, step):
                yield call, ""
                break


def _always_with(script: Script, call: ast.AST, step: ast.AST) -> bool:
    """Whether `call` runs in each pass in which `step` does."""
    mine, other = script.branches(call), script.branches(step)
    return mine.items() <= other.items() and not script.exclude(call, step)


@rule(
    "AMP013",
    "scaler-with-bf16",
    "bfloat16 has the range of FP32, so there is nothing to scale; the scaler costs a wait for the "
    "device and can skip steps.",
    "Leave out the GradScaler, or make it with `enabled=False` for bfloat16.",
    "huggingface/accelerate#1036",
)
def scaler_with_bf16(script: Script) -> Found:
    if not bf16_only(script):
        return
    for call in script.scaler_calls:
        enabled = argument(call, "enabled")
        if enabled is None or is_constant(enabled, True):
            yield call, ""


@rule(
    "AMP014",
    "half-parameters-with-scaler",
    "the model's parameters are FP16, so `scaler.step` fails: Attempting to unscale FP16 "
    "gradients.",
    "Keep the parameters in FP32; autocast casts where it pays.",
    "pytorch/pytorch#74739",
)
def half_parameters(script: Script) -> Found:
    if not script.scaler_calls:
        return
    for call in script.calls:
        if not isinstance(call.func, ast.Attribute):
            continue
        half = call.func.attr == "half" and not call.args
        to = call.func.attr == "to" and any(
            isinstance(value, ast.expr) and script.means(value, *FP16)
            for value in [*call.args, argument(call, "dtype")]
        )
        if (half or to) and _is_trained(script, call):
            yield call, ""


def _is_trained(script: Script, call: ast.Call) -> bool:
    """Whether the cast is of a model whose parameters an optimizer of the same function takes."""
    assert isinstance(call.func, ast.Attribute)
    statement, _ = script.statement(call)
    names = {text(call.func.value)}
    if isinstance(statement, ast.Assign) and statement.value is call:
        names = {text(target) for target in statement.targets}
    elif not (isinstance(statement, ast.Expr) and statement.value is call):
        return False  # the cast model goes elsewhere, to a file or into another variable
    scope = script.scope(call)
    return any(
        name in names
        and script.scope(use) is scope
        and position(use) > position(call)
        and not script.exclude(use, call)
        and any(
            isinstance(parent, ast.Call) and "optim" in text(parent.func).lower()
            for parent, _ in script.around(use)
        )
        for use, name in script.methods("parameters")
    )
