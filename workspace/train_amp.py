"""Train a classifier with automatic mixed precision.

    python train_amp.py                       digits, on whatever is there, in some seconds
    python train_amp.py --data imagefolder:/data/imagenet --model resnet50 --precision bf16
    torchrun --standalone --nproc-per-node=4 train_amp.py --global-batch-size 1024

The last one has a process for each GPU. The same command continues a run that was interrupted;
`python train_amp.py --help` tells all flags. What happens is in the package amptrain: train.py is
the loop, step.py the step in mixed precision.
"""

import sys

from amptrain.cli import run, train

if __name__ == "__main__":
    sys.exit(run(train, sys.argv[1:]))
