"""How batches are loaded."""

import ast

from amptrain.check.registry import Found, rule
from amptrain.check.script import Script, argument, is_constant, passes_on, text

LOADERS = ("torch.utils.data.DataLoader", "torch.utils.data.dataloader.DataLoader")
SAMPLERS = (
    "torch.utils.data.DistributedSampler",
    "torch.utils.data.distributed.DistributedSampler",
)
VALIDATION = ("val", "test", "eval", "dev_", "query", "gallery", "infer")


@rule(
    "AMP050",
    "no-set-epoch",
    "DistributedSampler gives the same order in every epoch.",
    "Call `sampler.set_epoch(epoch)` at the start of each epoch.",
    "pytorch/pytorch#31771",
)
def no_set_epoch(script: Script) -> Found:
    if script.mentions("set_epoch") or not (script.backwards and script.optimizer_steps):
        return
    for call in script.called(*SAMPLERS):
        off = is_constant(argument(call, "shuffle", 3), False)
        statement, _ = script.statement(call)
        head = text(statement).partition("\n")[0].lower()
        if not off and not passes_on(call) and not any(word in head for word in VALIDATION):
            yield call, ""


@rule(
    "AMP051",
    "workers-without-pinned-memory",
    "batches of the workers lie in pageable memory, so each copy to the GPU waits and "
    "`non_blocking=True` does nothing.",
    "Give the DataLoader `pin_memory=True`.",
    "pytorch/tutorials#2983",
)
def workers_without_pin(script: Script) -> Found:
    if not script.uses_device:
        return
    for call in script.called(*LOADERS):
        workers = argument(call, "num_workers", 5)
        pinned = argument(call, "pin_memory", 7)
        if workers is None or is_constant(workers, 0) or passes_on(call):
            continue
        if isinstance(workers, ast.Constant) and workers.value == 0:
            continue
        if pinned is None:
            yield call, ""
