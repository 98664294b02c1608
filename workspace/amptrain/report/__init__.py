"""What people see of a run.

`window` sums up the steps between two lines; `log` writes the lines to the terminal, to
metrics.jsonl and to TensorBoard; `introduction` says what is trained on what; `monitor` watches a
run for the usual troubles, and `diagnose` explains a run that stopped; `result` is written at the
end; `plot` draws runs.
"""
