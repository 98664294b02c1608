"""What a training or validation loop does at each batch."""

import ast
from collections.abc import Iterator

from amptrain.check.registry import Found, rule
from amptrain.check.script import Loop, Script, calls_in, position, text

NO_GRAD = {"no_grad", "inference_mode", "set_grad_enabled", "autograd", "requires_grad_"}


@rule(
    "AMP020",
    "scheduler-moves-on-skip",
    "the learning rate moves on also where the scaler skipped the step.",
    "Step the scheduler only if the scale did not fall: `scale = scaler.get_scale()`, "
    "`scaler.update()`, `if scaler.get_scale() >= scale: scheduler.step()`.",
    "pytorch/pytorch#44511",
)
def scheduler_on_skip(script: Script) -> Found:
    if script.mentions("get_scale", "_scale", "found_inf", "step_was_skipped", "_step_count"):
        return
    steps = script.scaler_methods("step")
    for call, name in script.methods("step"):
        # With an argument it follows a metric or an epoch, not the steps.
        if name in script.scalers or not script.is_scheduler(name) or call.args:
            continue
        loops = script.loops(call)
        for step, _ in steps:
            same = script.scope(step) is script.scope(call) and script.loops(step) == loops
            rarer = any(
                isinstance(parent, ast.If) and script.every_nth(parent.test)
                for parent in script.branches(call).keys() - script.branches(step).keys()
            )
            if same and loops and not rarer and not script.exclude(call, step):
                yield call, ""
                break


@rule(
    "AMP021",
    "no-zero-grad",
    "the gradients of all steps before are added to each step's own.",
    "Call `optimizer.zero_grad()` once per step.",
    "wenet-e2e/wekws#73",
)
def no_zero_grad(script: Script) -> Found:
    if script.mentions("zero_grad", "grad_zero", "clear_grad") or _sets_grad(script):
        return
    for call, _ in script.optimizer_steps:
        loops = script.loops(call)
        if loops and any(
            script.loops(b) and script.loops(b)[-1] is loops[-1] for b in script.backwards
        ):
            yield call, ""
            return


def _sets_grad(script: Script) -> bool:
    """Whether a gradient is set by hand, as `p.grad = None` and `p.grad.zero_()` do."""
    return any(name.endswith(".grad") for name in script.values) or any(
        name.endswith(".grad") for _, name in script.methods("zero_", "detach_")
    )


@rule(
    "AMP022",
    "gradients-zeroed-before-step",
    "`zero_grad` comes between `backward` and the step, so the step has no gradients.",
    "Call `zero_grad` after the step, or before `backward`.",
    "pytorch/pytorch#47175",
)
def zeroed_before_step(script: Script) -> Found:
    for step, optimizer in script.optimizer_steps:
        statement, block = script.statement(step)
        for earlier in reversed(block[: block.index(statement)]):
            if calls_in(earlier, "step") or isinstance(earlier, ast.FunctionDef):
                break
            if calls_in(earlier, "backward"):
                break
            zero = _plain_call(earlier, "zero_grad")
            if zero is not None and text(zero.func.value) == optimizer:  # type: ignore[attr-defined]
                before = block[: block.index(earlier)]
                if before and calls_in(before[-1], "backward"):
                    yield zero, ""
                break


def _plain_call(statement: ast.stmt, name: str) -> ast.Call | None:
    """A statement that is nothing but a call of this method."""
    call = statement.value if isinstance(statement, ast.Expr) else None
    named = isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute)
    return call if named and call.func.attr == name else None  # type: ignore[union-attr,return-value]


@rule(
    "AMP023",
    "validation-with-gradients",
    "the forward pass in evaluation mode keeps every activation for a backward that never comes: "
    "memory and time.",
    "Put the loop into `with torch.inference_mode():` (or `torch.no_grad()`).",
    "hszhao/semseg#60",
)
def validation_with_gradients(script: Script) -> Found:
    for call, model in script.methods("eval"):
        statement, block = script.statement(call)
        if call.args or not isinstance(statement, ast.Expr) or _without_grad(script, call):
            continue
        for following in block[block.index(statement) + 1 :]:
            if calls_in(following, "train"):
                break
            run = _runs(script, following, model)
            if run is not None:
                yield run, f"`{model}(…)`"
                break


def _without_grad(script: Script, call: ast.Call) -> bool:
    """Whether gradients are off around an evaluation, in its function or where that is called."""
    scope = script.scope(call)
    own = {text(part) for part in ast.walk(scope) if isinstance(part, ast.Attribute | ast.Name)}
    if isinstance(scope, ast.Module):
        own = {text(part) for part, _ in script.around(call) if isinstance(part, ast.expr)}
    if any(name.rpartition(".")[2] in NO_GRAD for name in own):
        return True
    if any(_turns_off(parent) for parent, _ in script.around(call)):
        return True
    name = scope.name if not isinstance(scope, ast.Module) else ""
    callers = [c for c in script.calls if text(c.func).rpartition(".")[2] == name]
    return any(_turns_off(parent) for c in callers for parent, _ in script.around(c))


def _turns_off(node: ast.AST) -> bool:
    """Whether a `with` or a decorated function turns gradients off."""
    if isinstance(node, ast.With | ast.AsyncWith):
        heads: list[ast.expr] = [item.context_expr for item in node.items]
    elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        heads = node.decorator_list
    else:
        return False
    return any(word in text(head) for head in heads for word in NO_GRAD)


def _runs(script: Script, statement: ast.stmt, model: str) -> ast.Call | None:
    """The model's forward in a loop over batches, with gradients on."""
    if not isinstance(statement, ast.For | ast.AsyncFor):
        return None
    if any(word in text(statement) for word in (*NO_GRAD, "backward(", ".grad")):
        return None
    for part in ast.walk(statement):
        if isinstance(part, ast.Call) and text(part.func) == model:
            return part
    return None


@rule(
    "AMP024",
    "item-in-loop",
    "reading a value makes the host wait for the device at each batch.",
    "Add up the detached tensor on the device and read it every N batches.",
    "meta-pytorch/torchtune#522",
)
def item_in_loop(script: Script) -> Found:
    told: set[Loop] = set()
    if not script.uses_device:
        return
    for call, receiver in _reads(script):
        loops = script.loops(call)
        if not loops or loops[0] in told:
            continue
        losses = _losses(script, loops[0])
        root = receiver.partition(".")[0] if not receiver.startswith("self.") else receiver
        if root in losses and not _now_and_then(script, call, loops[0]):
            told.add(loops[0])
            yield call, f"`{text(call)}`"


def _reads(script: Script) -> Iterator[tuple[ast.Call, str]]:
    """Calls that bring a value to the host, each with the text of what is read."""
    for call, receiver in script.methods("item", "tolist", "numpy"):
        if not call.args:
            yield call, receiver
    for call in script.calls:
        if text(call.func) == "float" and len(call.args) == 1:
            yield call, text(call.args[0])


def _losses(script: Script, loop: Loop) -> set[str]:
    """The tensors whose backward a training loop runs, and those they are given to."""
    found: set[str] = set()
    for call in script.backwards:
        if script.loops(call)[:1] == [loop] and script.scope(call) is script.scope(loop):
            receiver = call.func.value  # type: ignore[attr-defined]
            scaled = isinstance(receiver, ast.Call) and receiver.args
            found |= {text(part) for part in _names(receiver.args[0] if scaled else receiver)}
    return found


def _names(node: ast.AST) -> Iterator[ast.AST]:
    return (part for part in ast.walk(node) if isinstance(part, ast.Name))


def _now_and_then(script: Script, call: ast.Call, loop: Loop) -> bool:
    """Whether a call is behind a condition of its loop, so that it does not run at each batch."""
    inner = script.branches(call, up_to=loop)
    return bool(inner) or position(call) < position(loop.body[0])
