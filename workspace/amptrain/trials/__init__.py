"""`amptrain find-batch`, `bench` and `advise`: what fits, how fast it is, and what to choose, by
real steps.

Each trial is a process of its own, so that none inherits the memory, the kernels or the clocks of
another, and one that the kernel kills takes nothing with it. `process` starts it and reads its
answer; `inside` runs in it, on a `session`: the step of training without what a run has around it.
`search` doubles and bisects; `find_batch`, `bench` and `advise` decide what to try; `table` shows
it. The parent imports no torch: its memory counts against the same limit as that of a trial."""
