"""The inside of `mpp.config`: recipe text, types, laying and checking, help."""
