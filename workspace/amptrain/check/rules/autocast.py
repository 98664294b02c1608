"""What stands inside an autocast region, and how the region is made."""

import ast
from collections.abc import Iterator

from amptrain.check.registry import Found, rule
from amptrain.check.script import HALF_TYPES, Script, argument, is_constant, text

DEPRECATED = {
    f"torch.{device}.amp.{name}": f"torch.amp.{name}({device!r}, …)"
    for device in ("cuda", "cpu")
    for name in ("autocast", "GradScaler", "custom_fwd", "custom_bwd")
} | {
    f"torch.cuda.amp.{module}.{name}": f"torch.amp.{name}('cuda', …)"
    for module, name in (("autocast_mode", "autocast"), ("grad_scaler", "GradScaler"))
}
# Operations that autocast runs in half precision, whatever their inputs are. From torch's
# "Autocast Op Reference".
LOWERED = {
    *(f"torch.{name}" for name in ("matmul", "mm", "bmm", "addmm", "baddbmm", "einsum")),
    *(f"torch.nn.functional.{name}" for name in ("linear", "conv1d", "conv2d", "conv3d")),
}
# Names of tensors that hold no floating point numbers before the cast.
INTEGERS = ("mask", "label", "target", "index", "onehot", "one_hot", "valid", "weight")


@rule(
    "AMP001",
    "deprecated-amp-name",
    "torch warns since 2.4 that this name goes away.",
    "Use the name in torch.amp, which takes the device as its first argument.",
    "pytorch/tutorials#3331",
)
def deprecated(script: Script) -> Found:
    for node in [*script.calls, *_bare_decorators(script)]:
        function = node.func if isinstance(node, ast.Call) else node
        meanings = script.meanings(function)
        # A name that has a new meaning beside the old one is a fallback for an old torch.
        if meanings and meanings <= DEPRECATED.keys() and not _in_fallback(script, node):
            old = min(meanings)
            yield node, f"{old} is now {DEPRECATED[old]}"


def _bare_decorators(script: Script) -> Iterator[ast.expr]:
    for node in script.nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from (d for d in node.decorator_list if not isinstance(d, ast.Call))


def _in_fallback(script: Script, node: ast.AST) -> bool:
    """Whether a node is behind a condition that asks which torch there is."""
    for parent in script.branches(node):
        asked = text(parent.test) if isinstance(parent, ast.If | ast.IfExp) else "hasattr"
        if any(word in asked.lower() for word in ("version", "hasattr", "torch_")):
            return True
    return False


@rule(
    "AMP002",
    "half-inside-autocast",
    "autocast chooses the type of each operation; a cast to half precision inside it takes FP32 "
    "from the operations that need it.",
    "Remove the cast.",
    "pytorch/pytorch#32140",
)
def half_inside(script: Script) -> Found:
    for call in script.calls:
        if not isinstance(call.func, ast.Attribute) or not script.autocast(call):
            continue
        name = call.func.attr
        plain = name in {"half", "bfloat16"} and not call.args and not call.keywords
        to_half = name == "to" and any(
            isinstance(value, ast.expr) and script.means(value, *HALF_TYPES)
            for value in [*call.args, argument(call, "dtype")]
        )
        if (plain or to_half) and _is_used(script, call):
            yield call, f"`{_short(call)}`"


def _is_used(script: Script, call: ast.Call) -> bool:
    """Whether the cast tensor goes on into a computation, not only into a list or a buffer."""
    parent = script.parents[call]
    return isinstance(parent, ast.Call | ast.BinOp | ast.Assign | ast.Expr)


@rule(
    "AMP003",
    "float-undone-by-autocast",
    "autocast runs this operation in half precision whatever its inputs are, so the cast to FP32 "
    "changes nothing.",
    "Put it into `with torch.autocast(device_type, enabled=False)`, or remove the cast.",
    "huggingface/diffusers#495",
)
def float_undone(script: Script) -> Found:
    for node in script.nodes:
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.MatMult):
            operands: list[ast.expr] = [node.left, node.right]
        elif isinstance(node, ast.Call) and script.means(node.func, *LOWERED):
            operands = node.args
        else:
            continue
        cast = [part for part in operands if _is_float_cast(part)]
        if cast and script.autocast(node):
            yield cast[0], f"`{_short(cast[0])}`"


def _is_float_cast(node: ast.expr) -> bool:
    """Whether an operand is `x.float()` of an x that can be in half precision before."""
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return False
    before = node.func.value
    whole = isinstance(before, ast.Compare) or any(w in text(before).lower() for w in INTEGERS)
    return node.func.attr == "float" and not node.args and not whole


@rule(
    "AMP004",
    "backward-inside-autocast",
    "backward runs under autocast, which torch advises against: each operation's backward already "
    "has the type of its forward.",
    "End the autocast region before `backward`.",
    "pytorch/pytorch#175241",
)
def backward_inside(script: Script) -> Found:
    for call in script.backwards:
        if script.autocast(call):
            yield call, ""


@rule(
    "AMP005",
    "bce-under-autocast",
    "binary cross-entropy of probabilities is refused under autocast on CUDA (RuntimeError: unsafe "
    "to autocast).",
    "Leave out the sigmoid and use BCEWithLogitsLoss or binary_cross_entropy_with_logits.",
    "pytorch/pytorch#61098",
)
def bce(script: Script) -> Found:
    losses = {
        name
        for name, values in script.values.items()
        if any(
            isinstance(value, ast.Call) and script.means(value.func, "torch.nn.BCELoss")
            for value in values
        )
        and len(values) == 1
    }
    for call in script.calls:
        function = call.func
        direct = script.means(function, "torch.nn.functional.binary_cross_entropy")
        made = isinstance(function, ast.Call) and script.means(function.func, "torch.nn.BCELoss")
        if direct or made or text(function) in losses:
            region = script.autocast(call)
            if region and not _on_cpu(region):
                yield call, ""


def _on_cpu(region: ast.Call) -> bool:
    device = argument(region, "device_type", 0)
    return isinstance(device, ast.Constant) and device.value == "cpu"


@rule(
    "AMP006",
    "log-of-softmax",
    "a probability that underflows to 0 has the logarithm −inf, and the loss and the gradient "
    "become inf or NaN.",
    "Use log_softmax (logsigmoid for sigmoid), or a loss that takes logits.",
    "pytorch/pytorch#40497",
)
def log_of_softmax(script: Script) -> Found:
    for call in script.calls:
        if script.means(call.func, "torch.log") and call.args:
            inner = call.args[0]
        elif isinstance(call.func, ast.Attribute) and call.func.attr == "log" and not call.args:
            inner = call.func.value
        else:
            continue
        if isinstance(inner, ast.Name):
            given = script.values.get(inner.id, [])
            same = len(given) == 1 and script.scope(given[0]) is script.scope(call)
            inner = given[0] if same else inner
        if _is_softmax(script, inner) and _is_amp(script):
            yield call, ""


def _is_softmax(script: Script, node: ast.expr) -> bool:
    if not isinstance(node, ast.Call):
        return False
    functions = ("softmax", "sigmoid")
    return script.means(
        node.func,
        *(f"torch.{name}" for name in functions),
        *(f"torch.nn.functional.{name}" for name in functions),
    ) or (isinstance(node.func, ast.Attribute) and node.func.attr in functions)


def _is_amp(script: Script) -> bool:
    """Whether the script has to do with mixed precision at all."""
    return script.mentions("autocast", "GradScaler")


def _short(node: ast.expr, length: int = 60) -> str:
    whole = " ".join(text(node).split())
    return whole if len(whole) <= length else f"{whole[: length - 1]}…"


def bf16_only(script: Script) -> bool:
    """Whether every autocast of the script is in bfloat16, written out."""
    types = [argument(call, "dtype", 1) for call in script.autocasts]
    return bool(types) and all(_is_bf16(script, kind) for kind in types)


def _is_bf16(script: Script, node: ast.expr | None) -> bool:
    if node is None or is_constant(node, None):
        return False
    given = script.values.get(text(node), []) if isinstance(node, ast.Name) else []
    return script.means(node, "torch.bfloat16") or (
        len(given) == 1 and script.means(given[0], "torch.bfloat16")
    )
