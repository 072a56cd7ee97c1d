"""`method_colour`: the colour of a method, the same on all pages."""

import zlib

#: Light and dark mode. The colours of Okabe and Ito, which are safe for colour-blind readers, then further ones.
_PALETTE = (
    ("#0072b2", "#4fa8e0"), ("#c44e00", "#f5813a"), ("#00825e", "#2fc798"), ("#a8437a", "#e08fba"),
    ("#9a6700", "#f0b840"), ("#5b4fc4", "#a79df5"), ("#1d7f8c", "#57c7d4"), ("#a3293d", "#f2828f"),
    ("#5f7a12", "#a9c85a"), ("#7a5236", "#cda283"),
)  # fmt: skip
#: Methods that often stand side by side have different colours.
_FIXED = {
    "dense": ("#3c4046", "#d5d8dc"), "bf16": ("#7b828b", "#9aa1a9"), "pufferfish": _PALETTE[0],
    "powersgd-4": _PALETTE[1], "pufferfish+powersgd-4": _PALETTE[2], "narrow": _PALETTE[3], "auto": _PALETTE[4],
    "early-bird-0.5": _PALETTE[6], "lottery-ticket-5": _PALETTE[7],
}  # fmt: skip


def method_colour(name: str) -> tuple[str, str]:
    """The colours of a method for light and for dark mode. They depend on the name only; two names may share a colour.

    >>> method_colour("pufferfish")
    ('#0072b2', '#4fa8e0')
    >>> method_colour("my method") == method_colour("my method")
    True
    """
    return _FIXED.get(name) or _PALETTE[zlib.crc32(name.encode()) % len(_PALETTE)]


def method_dash(name: str) -> list[int]:
    """Dashes of a method's line, so that methods of one colour differ; empty for a solid line.

    >>> method_dash("dense")
    []
    """
    dashes: list[list[int]] = [[], [8, 4], [2, 3], [8, 3, 2, 3]]
    return [] if name in _FIXED else dashes[zlib.crc32(name.encode()) // len(_PALETTE) % len(dashes)]
