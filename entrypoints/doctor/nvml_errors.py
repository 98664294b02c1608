"""What NVML's errors mean in a container, and what mends each."""

from entrypoints.doctor.finding import Finding
from entrypoints.doctor.gpu_watch import REMEDY

UTILITY = "-e NVIDIA_DRIVER_CAPABILITIES=compute,utility (the image's own value)"
MEANINGS = {  # nvmlReturn_t of nvml.h: found, needed, do
    9: (
        "the host's NVIDIA driver is not loaded",
        "a loaded driver",
        "On the host: sudo modprobe nvidia; nvidia-smi",
    ),
    12: ("libnvidia-ml.so.1 is missing", "the driver capability `utility`", UTILITY),
    15: (
        "has fallen off the bus (see Xid 79 in the host's dmesg)",
        "a GPU that answers",
        "Reboot the host",
    ),
    18: (
        "the driver's library and its kernel module differ: the driver was updated since",
        "the same version",
        "Start the container again; if that does not mend it, reboot the host",
    ),
    999: (
        "NVML lost the GPUs (Unknown Error), often after a `systemctl daemon-reload`",
        "open device nodes",
        REMEDY,
    ),
}


def meaning(error: Exception, prefix: str = "") -> Finding:
    """The finding for an NVMLError. Without NVML alone CUDA still works: that is a warning, all
    else an error."""
    code = int(getattr(error, "value", 0))
    found, needed, do = MEANINGS.get(
        code, (f"NVML fails: {error} ({code})", "a working NVML", "See nvidia-smi on the host")
    )
    return Finding("nvml", "warning" if code == 12 else "error", prefix + found, needed, do)
