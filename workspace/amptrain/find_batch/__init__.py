"""`amptrain find-batch`: the largest micro-batch that fits, found by real steps.

`search` doubles and bisects. Each trial is a process of its own (`trial`), so that none inherits
the memory of another, and one that the kernel kills takes nothing with it. `command` starts them,
shows each, and gives the flags to paste. It imports no torch: its memory counts against the same
limit as that of the trial."""
