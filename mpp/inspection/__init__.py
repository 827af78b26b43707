"""Pictures of what was learned: arrays in, figures out."""
