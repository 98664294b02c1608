"""Tar shards, on a disk and in an object store, beside a folder of the same images."""
