"""GPUs: device nodes, driver, and whether this image's PyTorch has code for them."""

import ctypes
import importlib.util
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from entrypoints.doctor import gpu_watch
from entrypoints.doctor.finding import Finding
from entrypoints.doctor.nvml_errors import meaning
from entrypoints.paths import VENV
from entrypoints.versions import numbers, versions

ASK = (
    "docker run --gpus all (Compose: ACCELERATOR=gpu; CDI and podman: --device nvidia.com/gpu=all)"
)
HOST_SETUP = (
    "On the host: sudo nvidia-ctk runtime configure --runtime=docker && sudo systemctl "
    "restart docker"
)


def check(
    environment: Mapping[str, str], architectures: Sequence[str] | None = None
) -> list[Finding]:
    """All findings about GPUs; without a GPU it is one, and none of the rest is asked."""
    findings = nodes(environment)
    if present():
        findings += [libcuda(environment), *driver_and_devices(load_nvml(), architectures)]
    return findings


def present(dev: Path = Path("/dev")) -> bool:
    """Whether this container has a GPU's device node (WSL 2 has /dev/dxg for all of them)."""
    return bool(gpu_watch.gpu_nodes(dev)) or (dev / "dxg").exists()


def nodes(
    environment: Mapping[str, str], dev: Path = Path("/dev"), record: Path = gpu_watch.RECORD
) -> list[Finding]:
    """The device nodes: there, complete, and to be opened."""
    lost = gpu_watch.gpu_lost(record, dev)
    if lost:
        return [
            Finding("gpu", "error", lost, "the GPUs this container started with", gpu_watch.REMEDY)
        ]
    if (dev / "dxg").exists():
        return [Finding("gpu", "ok", f"{dev}/dxg (WSL 2)")]
    gpus = gpu_watch.gpu_nodes(dev)
    if not gpus:
        return [absent(environment)]
    missing = [name for name in ("nvidiactl", "nvidia-uvm") if not (dev / name).exists()]
    findings = [Finding("gpu", "ok", ", ".join(map(str, gpus)))]
    if missing:
        what = " and ".join(f"{dev}/{name}" for name in missing)
        do = "On the host: sudo nvidia-modprobe -u -c=0, then start the container again"
        findings.append(
            Finding(
                "gpu", "error", f"{what} is missing", "CUDA opens it beside the GPU's own node", do
            )
        )
    return findings + [
        closed(node)
        for node in (*gpus, *gpu_watch.control_nodes(dev))
        if not gpu_watch.usable(node)
    ]


def absent(environment: Mapping[str, str]) -> Finding:
    """No GPU. A note where none was asked for: on a machine without one this is how it should
    be."""
    asked = environment.get("NVIDIA_VISIBLE_DEVICES", "")
    if asked in ("", "void", "none"):
        return Finding(
            "gpu",
            "note",
            "none in this container; training runs on the CPU",
            do=f"With a GPU: {ASK}",
        )
    found = f"NVIDIA_VISIBLE_DEVICES={asked} asks for GPUs, but there is no /dev/nvidia0"
    needed = "an NVIDIA driver and the NVIDIA Container Toolkit on the host"
    return Finding("gpu", "warning", found, needed, f"{ASK}. {HOST_SETUP}")


def closed(node: Path) -> Finding:
    """A node that is there and can't be opened, told apart by its mode: forbidden by the mode, or
    by the cgroup."""
    if not gpu_watch.mode_allows(node):
        mode, group = node.stat().st_mode & 0o777, node.stat().st_gid
        found = (
            f"{node} has mode {mode:04o} and group {group}, to which uid {os.getuid()} "
            "does not belong"
        )
        return Finding(
            "gpu", "error", found, "read and write for this user", f"docker run --group-add {group}"
        )
    found = f"{node} is there, but the cgroup forbids to open it (Operation not permitted)"
    return Finding(
        "gpu", "error", found, "a device rule for it, which --gpus or CDI adds", gpu_watch.REMEDY
    )


def libcuda(environment: Mapping[str, str], name: str = "libcuda.so.1") -> Finding:
    """The driver's own library, which the NVIDIA toolkit brings in from the host: an image must not
    have it."""
    try:
        ctypes.CDLL(name)
    except OSError as error:
        capabilities = environment.get("NVIDIA_DRIVER_CAPABILITIES", "")
        if "compute" in capabilities or capabilities == "all":
            return Finding(
                "libcuda",
                "error",
                f"{name} can't be loaded: {error}",
                "the host driver's library",
                ASK,
            )
        found = f"{name} is missing: NVIDIA_DRIVER_CAPABILITIES={capabilities!r} lacks `compute`"
        return Finding(
            "libcuda",
            "error",
            found,
            "compute,utility",
            "-e NVIDIA_DRIVER_CAPABILITIES=compute,utility",
        )
    return Finding("libcuda", "ok", name)


def load_nvml() -> Any:
    """nvidia-ml-py of the image, or None. From its one file: doctor runs isolated from the packages
    it judges."""
    for file in sorted(VENV.glob("lib/python3*/site-packages/pynvml.py")):
        spec = importlib.util.spec_from_file_location("pynvml", file)
        if spec and spec.loader:
            module = sys.modules["pynvml"] = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
            return module
    return None


def driver_and_devices(nvml: Any, architectures: Sequence[str] | None = None) -> list[Finding]:
    """Driver version and every GPU by NVML; where NVML is not to be had, the CUDA version by
    libcuda."""
    if nvml is None:
        return cuda_version(cuda_driver_version())
    try:
        nvml.nvmlInit()
        version = nvml.nvmlSystemGetDriverVersion()
        count = nvml.nvmlDeviceGetCount()
    except nvml.NVMLError as error:
        return [meaning(error), *cuda_version(cuda_driver_version())]
    findings = [driver(version)]
    for index in range(count):
        try:
            findings += device(nvml, index, architectures)
        except nvml.NVMLError as error:
            findings.append(meaning(error, f"GPU {index}: "))
    return findings


def driver(version: str) -> Finding:
    """The host driver's version against what the image's CUDA needs."""
    image = versions()
    needed, recommended = image["DRIVER_NEEDED"], image["DRIVER_RECOMMENDED"]
    do = "Update the driver on the HOST and reboot it; nothing in the image can mend this"
    if numbers(version) < numbers(needed):
        return Finding(
            "driver",
            "error",
            f"driver {version} is too old for CUDA {image['CUDA'].partition('.')[0]}",
            f">= {needed}",
            do,
        )
    if numbers(version) < numbers(recommended):
        found = (
            f"driver {version}: older than this image's CUDA {image['CUDA']}; runs by "
            "minor version compatibility"
        )
        return Finding(
            "driver", "warning", found, f">= {recommended} for all of CUDA {image['CUDA']}", do
        )
    return Finding("driver", "ok", version)


def cuda_driver_version(name: str = "libcuda.so.1") -> int | None:
    """The newest CUDA the driver knows, as 1000 × major + 10 × minor; None without a driver's
    library."""
    try:
        library = ctypes.CDLL(name)
    except OSError:
        return None
    version = ctypes.c_int()
    return version.value if library.cuDriverGetVersion(ctypes.byref(version)) == 0 else None


def cuda_version(version: int | None) -> list[Finding]:
    """The driver judged by the CUDA it knows, for where NVML does not tell its version."""
    if version is None:
        return []  # `libcuda` has told that it is missing
    image = versions()
    major, minor = numbers(image["CUDA"])
    name = f"{version // 1000}.{version % 1000 // 10}"
    do = "Update the driver on the HOST and reboot it"
    if version < major * 1000:
        return [
            Finding(
                "driver",
                "error",
                f"the driver knows CUDA {name} only",
                f">= {image['DRIVER_NEEDED']}",
                do,
            )
        ]
    if version < major * 1000 + minor * 10:
        found = (
            f"the driver knows CUDA {name}; this image has {image['CUDA']}, which runs "
            "by minor version compatibility"
        )
        return [
            Finding(
                "driver",
                "warning",
                found,
                f">= {image['DRIVER_RECOMMENDED']} for all of CUDA {image['CUDA']}",
                do,
            )
        ]
    return [Finding("driver", "ok", f"a driver for CUDA {name}")]


def device(nvml: Any, index: int, architectures: Sequence[str] | None) -> list[Finding]:
    """One GPU: whether the wheel has code for it, and how MIG divides it."""
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    name = nvml.nvmlDeviceGetName(handle)
    major, minor = nvml.nvmlDeviceGetCudaComputeCapability(handle)
    return [
        architecture(f"GPU {index}: {name}", (major, minor), architectures),
        *mig(nvml, handle, index),
    ]


def architecture(
    name: str, capability: tuple[int, int], architectures: Sequence[str] | None = None
) -> Finding:
    """Machine code for sm_XY runs on every X.Z with Z >= Y: a GPU needs one of its own major, not
    above its minor.

    The wheel has no PTX to make other code of. `architectures` are the image's unless given.
    """
    architectures = architectures or versions()["ARCHITECTURES"].split()
    major, minor = capability
    built = [
        divmod(int(text.removeprefix("sm_")), 10)
        for text in architectures
        if text.startswith("sm_")
    ]
    if any(own == major and least <= minor for own, least in built):
        return Finding("device", "ok", f"{name}, sm_{major}{minor}")
    found = f"{name} is sm_{major}{minor}; this PyTorch has {' '.join(architectures)}, and no PTX"
    if (major, minor) > max(built):
        do = "Use an image with torch >= 2.7 for CUDA 12.8, or another GPU by CUDA_VISIBLE_DEVICES"
    else:
        do = "Use another GPU by CUDA_VISIBLE_DEVICES, or CPU"
    return Finding(
        "device", "error", found, "machine code for it ('no kernel image is available' else)", do
    )


def mig(nvml: Any, handle: Any, index: int) -> list[Finding]:
    """Multi-Instance GPU: a process uses one instance; with MIG on and no instance, CUDA sees no
    device at all."""
    try:
        enabled, _ = nvml.nvmlDeviceGetMigMode(handle)
        slots = nvml.nvmlDeviceGetMaxMigDeviceCount(handle) if enabled else 0
    except nvml.NVMLError:
        return []  # this GPU has no MIG
    if not enabled:
        return []
    instances = sum(has_instance(nvml, handle, slot) for slot in range(slots))
    if not instances:
        do = (
            "On the host: sudo nvidia-smi mig -cgi PROFILE -C (-lgip lists them), or "
            "MIG off: sudo nvidia-smi -mig 0"
        )
        return [
            Finding(
                "mig",
                "error",
                f"GPU {index} is in MIG mode without an instance",
                "one instance",
                do,
            )
        ]
    found = (
        f"GPU {index} is in MIG mode, visible instances: {instances}; a process uses one of them"
    )
    do = (
        "One process each with CUDA_VISIBLE_DEVICES=MIG-…; data parallel training over "
        "instances is not possible"
    )
    return [Finding("mig", "note", found, do=do)]


def has_instance(nvml: Any, handle: Any, slot: int) -> bool:
    """Whether there is a MIG device in this slot."""
    try:
        nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, slot)
    except nvml.NVMLError:
        return False
    return True
