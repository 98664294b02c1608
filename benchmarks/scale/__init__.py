"""How far data-parallel training goes: a model of its step time, checkpoints and failures."""
