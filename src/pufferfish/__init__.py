"""Pufferfish: train networks that are already small, on many machines over ordinary networks."""

from typing import TYPE_CHECKING, Any

__version__ = "0.2.0"

if TYPE_CHECKING:
    from .api import *  # noqa: F403
else:

    def __getattr__(name: str) -> Any:
        """Import all public names when one is first used: importing torch takes seconds, which `pufferfish --help` saves."""
        if not name.startswith("__") or name == "__all__":
            from importlib import import_module

            api = import_module(".api", __name__)
            globals().update({public: getattr(api, public) for public in ("__all__", *api.__all__)})
            if name in globals():
                return globals()[name]
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def __dir__() -> list[str]:
        __getattr__("__all__")
        return sorted(globals())
