"""`scaled`: a size of a layer in a narrower model of the same architecture."""


def scaled(size: int, width: float) -> int:
    """Return `width` times `size`: a multiple of 8 for sizes from 64 on, where GPUs are fast, otherwise of 2.

    Args:
        width: above 0, and at most 1, which leaves any size unchanged.

    >>> scaled(384, 0.6), scaled(48, 0.6), scaled(1500, 1)
    (232, 28, 1500)
    >>> scaled(384, 2.0)
    Traceback (most recent call last):
    ValueError: width=2.0: must be above 0, and at most 1
    """
    if not 0 < width <= 1:
        raise ValueError(f"width={width}: must be above 0, and at most 1")
    multiple = 8 if size >= 64 else 2
    return size if width == 1 else min(size, max(1, round(width * size / multiple)) * multiple)
