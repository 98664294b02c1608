"""Writing and reading checkpoints."""

import ast

from amptrain.check.registry import Found, rule
from amptrain.check.rules.autocast import bf16_only
from amptrain.check.script import Script, argument, passes_on, text


@rule(
    "AMP040",
    "scaler-not-saved",
    "the checkpoint has the optimizer's state but not the scaler's, so a resumed run starts at a "
    "loss scale of 65536 and skips steps.",
    "Save `scaler.state_dict()` and load it again.",
    "huggingface/transformers#11663",
)
def scaler_not_saved(script: Script) -> Found:
    if not script.scaler_calls or bf16_only(script):
        return
    states = {name for _, name in script.methods("state_dict")}
    if any("scaler" in name.lower() for name in states) or states & script.scalers:
        return
    saves = list(script.called("torch.save"))
    for save in saves:
        if any(_is_optimizer_state(script, part) for part in _content(script, save)):
            yield save, ""
            return


def _content(script: Script, save: ast.Call) -> list[ast.AST]:
    """What a `torch.save` writes: its argument, and the values given to that name in the same
    function."""
    kept = argument(save, "obj", 0)
    if kept is None:
        return []
    values = script.values.get(text(kept), []) if isinstance(kept, ast.Name) else []
    mine = [value for value in values if script.scope(value) is script.scope(save)]
    return [part for value in [kept, *mine] for part in ast.walk(value)]


def _is_optimizer_state(script: Script, node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "state_dict"
        and script.is_optimizer(text(node.func.value))
    )


@rule(
    "AMP041",
    "load-without-weights-only",
    "before torch 2.6 this runs whatever code the file holds, since 2.6 it refuses all but tensors "
    "and plain types.",
    "Say which you mean: `weights_only=True`, and save tensors and plain types only.",
    "pytorch/pytorch#137602",
)
def load_without_weights_only(script: Script) -> Found:
    loads = list(script.called("torch.load"))
    named = [c for c in loads if argument(c, "weights_only") or argument(c, "pickle_module", 2)]
    for call in loads:
        if call not in named and not passes_on(call) and not _for_old_torch(script, call, named):
            yield call, ""


def _for_old_torch(script: Script, call: ast.Call, named: list[ast.Call]) -> bool:
    """Whether this is what a torch without the argument gets, and another call names it: after
    `except TypeError`, or on a side of a condition on the version."""
    for parent, child in script.around(call):
        other = isinstance(parent, ast.Try) and child in parent.handlers
        version = isinstance(parent, ast.If) and "version" in text(parent.test).lower()
        if (other or version) and set(ast.walk(parent)) & set(named):
            return True
    return False
