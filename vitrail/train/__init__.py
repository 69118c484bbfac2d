"""Supervised training: the loop, recipes, optimisers, checkpoints and the run log."""
