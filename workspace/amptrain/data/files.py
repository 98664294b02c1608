"""The names of a data set's files, in few bytes and shared by all loader workers."""

import hashlib
import os
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray


class FileList:
    """Files with their labels, as four arrays.

    A list of paths takes some 1 kB a file, and is copied into each worker as its reference counts
    are written (pytorch#13246). Arrays take the length of the relative name and 18 bytes, and stay
    shared.
    """

    def __init__(
        self, root: str, parts: Iterable[tuple[Sequence[str], Sequence[int], int]]
    ) -> None:
        """`parts` has (paths relative to `root`, sizes in bytes, label) for each class. Names in
        any encoding: they are held as the bytes they have on the disk."""
        self.root = os.fsencode(root)
        names, lengths, sizes, labels = [], [], [], []
        for paths, part_sizes, label in parts:
            encoded = [os.fsencode(path) for path in paths]
            names.append(np.frombuffer(b"".join(encoded), dtype=np.uint8))
            lengths.append(np.array([len(name) for name in encoded], dtype=np.int64))
            sizes.append(np.array(part_sizes, dtype=np.int64))
            labels.append(
                np.full(len(encoded), label, dtype=np.int16 if label < 2**15 else np.int32)
            )
        empty = np.zeros(0, dtype=np.int64)
        self.names: NDArray[np.uint8] = np.concatenate([empty.astype(np.uint8), *names])
        self.ends = np.cumsum(np.concatenate([empty, *lengths]))
        self.sizes = np.concatenate([empty, *sizes])
        self.labels: NDArray[np.integer] = np.concatenate([empty.astype(np.int16), *labels])

    def __len__(self) -> int:
        return len(self.ends)

    def name(self, index: int) -> bytes:
        """The path relative to `root`, as the bytes on the disk."""
        start = int(self.ends[index - 1]) if index else 0
        return self.names[start : int(self.ends[index])].tobytes()

    def path(self, index: int) -> str:
        """The whole path; bytes that are no UTF-8 come as Python's surrogates."""
        name = self.name(index)  # which is absolute in some tables
        return os.fsdecode(name if name.startswith(b"/") else self.root + b"/" + name)

    def select(self, indices: NDArray[np.int64]) -> "FileList":
        """The files at `indices`, in that order."""
        chosen = FileList.__new__(FileList)
        chosen.root = self.root
        names = [self.name(int(index)) for index in indices]
        chosen.names = np.frombuffer(b"".join(names), dtype=np.uint8)
        chosen.ends = np.cumsum(np.array([len(name) for name in names], dtype=np.int64))
        chosen.sizes, chosen.labels = self.sizes[indices], self.labels[indices]
        return chosen

    @property
    def nbytes(self) -> int:
        """Memory of all of it, in bytes."""
        arrays = (self.names, self.ends, self.sizes, self.labels)
        return sum(array.nbytes for array in arrays)

    def digests(self, label: int) -> tuple[int, str, str]:
        """(count, SHA-256 over names, SHA-256 over names and sizes) of the files of one class, in
        their order."""
        names, sizes = hashlib.sha256(), hashlib.sha256()
        indices = np.flatnonzero(self.labels == label)
        for index in indices:
            name = self.name(int(index))
            names.update(name + b"\0")
            sizes.update(name + b"\0%d\n" % self.sizes[index])
        return len(indices), names.hexdigest(), sizes.hexdigest()

    def digests_of_all(self, label_sets: NDArray[np.bool_]) -> tuple[int, str, str]:
        """As `digests`, of all files with several labels each; their classes are in both hashes."""
        names, sizes = hashlib.sha256(), hashlib.sha256()
        for index in range(len(self)):
            name = self.name(index) + b"\0" + label_sets[self.labels[index]].tobytes()
            names.update(name)
            sizes.update(name + b"%d\n" % self.sizes[index])
        return len(self), names.hexdigest(), sizes.hexdigest()
