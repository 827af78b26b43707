"""Masked patch pretraining of vision transformers, end to end."""
