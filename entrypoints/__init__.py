"""What runs in the container before the user's program. Standard library only."""
