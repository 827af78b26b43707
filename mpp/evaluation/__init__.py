"""Frozen features in, result rows out: each evaluation is a section of a recipe that can be called."""
