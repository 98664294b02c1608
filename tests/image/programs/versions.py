"""Print what torch says of itself, as JSON."""

import json
import sys

import torch
import torchvision

print(
    json.dumps(
        {
            "torch": torch.__version__,
            "torchvision": torchvision.__version__.split("+")[0],
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
            "nccl": torch.cuda.nccl.version(),
            "architectures": torch._C._cuda_getArchFlags().split(),
            "python": sys.executable,
        }
    )
)
