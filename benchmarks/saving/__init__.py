"""How long a checkpoint holds up the next step."""
