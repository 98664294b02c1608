"""Checkpoints, from the running state to a file and back.

`state` gathers all that the next steps depend on, as tensors and plain types; `store` writes it
aside, makes it durable, reads it back and renames it, and finds the newest good one; `resume` says
what may change when a run continues; `lock` keeps a second process out of the run directory.
"""
