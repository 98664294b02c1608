"""The host's tests of entrypoints/: the files that they find in the image."""

from entrypoints import paths
from host.versions import VERSIONS_FILE

paths.VERSIONS = VERSIONS_FILE
