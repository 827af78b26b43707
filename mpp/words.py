"""Numbers in words."""


def plural(count: int, one: str, many: str | None = None) -> str:
    """1 image, 1,200 images; many: where it is not one + s."""
    return f"{count:,} {one if count == 1 else many or one + 's'}"
