"""Data, from files to batches on the device.

`sources` opens what --data names, one file a kind, and gives one image by (epoch, index);
`shared` does so once for all processes of a machine;
`transforms` makes a training image vary, as a pure function of (seed, epoch, index); `order` says
which images make up which step; `loader` reads them in worker processes and copies them to the
device; `feed` holds the two streams of a run, training from its next step and validation.
"""
