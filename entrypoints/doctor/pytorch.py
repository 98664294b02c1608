"""PyTorch itself, asked in a process of its own: version, machine code, the cuDNN it took, and
whether CUDA works."""

import json
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from entrypoints import python
from entrypoints.doctor.finding import Finding
from entrypoints.python import PYTHON

TIMEOUT_S = 120
# cudnn.version() loads a part of cuDNN as a first convolution does, but needs no GPU: whose part it
# is counts.
QUESTION = """
import json, warnings
warnings.simplefilter("ignore")
import torch
facts = {
    "torch": torch.__version__,
    "cuda": torch.version.cuda,
    "cudnn": torch.backends.cudnn.version() if torch.version.cuda else None,
    "architectures": (torch._C._cuda_getArchFlags() or "").split() if torch.version.cuda else [],
    "devices": torch.cuda.device_count(),
    "error": "",
}
if facts["devices"]:
    try:
        torch.ones(8, device="cuda").sum().item()
    except RuntimeError as error:
        facts["error"] = str(error).splitlines()[0]
with open("/proc/self/maps") as maps:
    facts["libraries"] = sorted({line.split()[-1] for line in maps if "libcudnn" in line})
print(json.dumps(facts))
"""


def ask(environment: Mapping[str, str], program: Path = PYTHON) -> dict[str, Any] | str:
    """What torch tells, or why it does not."""
    try:
        done = subprocess.run(
            [str(program), "-c", QUESTION],
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            env=dict(environment),
            check=False,
            cwd="/",
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    if done.returncode:
        why = done.stderr.strip().splitlines() or [f"it ended with {done.returncode}"]
        return f"{why[-1]} (out of memory, perhaps)" if done.returncode == -9 else why[-1]
    facts: dict[str, Any] = json.loads(done.stdout)
    return facts


def check(facts: dict[str, Any] | str, environment: Mapping[str, str], gpu: bool) -> list[Finding]:
    """Findings from torch's answer; `gpu`: whether this container has a GPU's device node."""
    if isinstance(facts, str):
        refusal = python.refusal(environment)
        if refusal:
            found, _, do = refusal.partition(". ")
            return [Finding("python", "error", found, "a Python that starts", do)]
        do = "The image's own torch is in /opt/venv; python -c 'import torch' shows more"
        return [
            Finding(
                "torch", "error", f"torch can't be imported: {facts}", "a torch that imports", do
            )
        ]
    name = f"torch {facts['torch']}, CUDA {facts['cuda']}"
    findings = []
    if facts["error"]:
        found = f"{name}: a first sum on the GPU fails: {facts['error']}"
        findings.append(
            Finding(
                "torch",
                "error",
                found,
                "a GPU that computes",
                "See the findings about gpu and driver",
            )
        )
    elif gpu and not facts["devices"]:
        visible = environment.get("CUDA_VISIBLE_DEVICES")
        why = f"; CUDA_VISIBLE_DEVICES={visible!r}" if visible is not None else ""
        do = (
            "Unset CUDA_VISIBLE_DEVICES"
            if visible is not None
            else "See the findings about gpu, libcuda and driver"
        )
        found = f"{name} sees no GPU, though this container has one{why}"
        findings.append(Finding("torch", "error", found, "torch.cuda.device_count() > 0", do))
    else:
        findings.append(Finding("torch", "ok", f"{name}, GPUs: {facts['devices']}"))
    return [
        *findings,
        *([cudnn(facts["libraries"], facts["cudnn"], environment)] if facts["cudnn"] else []),
    ]


def cudnn(libraries: list[str], version: int, environment: Mapping[str, str]) -> Finding:
    """cuDNN must come whole from the wheel: parts of two versions fail at the first convolution
    (pytorch#80637).

    libcudnn.so.9 looks for its parts in LD_LIBRARY_PATH first, so another cuDNN there wins over the
    wheel's.
    """
    needed = "the cuDNN beside torch, in site-packages, and no other"
    foreign = [library for library in libraries if "/site-packages/" not in library]
    if foreign:
        do = "Unset LD_LIBRARY_PATH and LD_PRELOAD"
        return Finding("cudnn", "error", f"torch has loaded {', '.join(foreign)}", needed, do)
    folders = environment.get("LD_LIBRARY_PATH", "").split(os.pathsep)
    others = [
        str(file)
        for folder in folders
        if folder
        for file in sorted(Path(folder).glob("libcudnn*.so*"))
    ]
    others = [file for file in others if "/site-packages/" not in file]
    if others:
        found = f"LD_LIBRARY_PATH holds another cuDNN, whose parts win over torch's: {others[0]}"
        return Finding(
            "cudnn", "error", found, needed, "Unset LD_LIBRARY_PATH, or take that folder out of it"
        )
    return Finding("cudnn", "ok", f"cuDNN {version_name(version)}, from site-packages")


def version_name(version: int) -> str:
    """9.1.0 for 90100, as cuDNN 9 counts."""
    return f"{version // 10000}.{version // 100 % 100}.{version % 100}"
