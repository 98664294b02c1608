"""`amptrain check`: the known mistakes of mixed-precision training, found in a script's text or in
its run.

Text: `source` reads a script or a notebook, `script` parses it once and answers what rules ask
(which name is what, what stands around what), each rule in `rules/` gives findings, `report` writes
them. Run: `watch` starts the program with torch's public hooks set, and judges what they saw.
Standard library only, so that a linter needs no second of torch's import."""
