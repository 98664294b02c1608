"""The modes of this container, one file a mode."""
