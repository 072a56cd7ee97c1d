"""`parse_method`: methods from text, as on a command line: `topk-0.001`, `Accordion(PowerSGD(4), PowerSGD(1), every=500)`, `file.py:Mine`."""

import ast
import dataclasses
import difflib
import importlib
import importlib.util
import inspect
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from .method import Method

_CALL = r"[^\W\d]\w*\s*(?:\(.*\))?"
_FORMS = "write Name, Name(setting=value), name-4, file.py:Name(…) or package.module:Name(…)"
#: Names by which the literature calls a method; other names are those of the classes, in any case and with hyphens.
_ALIASES = {
    "bf16": "BFloat16",
    "fp16": "Float16",
    "fp8": "BlockFP8",
    "int8": "BlockInt8",
    "none": "NoCompression",
}


def parse_method(text: str) -> Method:
    """Parse a method. Text is never evaluated; a file or module that it names is imported.

    A name alone means the defaults. In `file.py:Mine(PowerSGD(2))` names may come from the file or from this package.
    This package's names may be written in any case and with hyphens, and their first setting after a hyphen.

    >>> parse_method("PowerSGD(2)"), parse_method("powersgd-2"), parse_method("alternating-powersgd")
    (PowerSGD(rank=2, start=0), PowerSGD(rank=2, start=0), AlternatingPowerSGD(rank=4))
    >>> parse_method("BFloat16"), parse_method("bf16"), parse_method("top-k-0.001")
    (BFloat16(), BFloat16(), TopK(k=0.001, sample=1.0))
    >>> parse_method("Accordion(PowerSGD(rank=4), PowerSGD(rank=1), every=500)").low
    PowerSGD(rank=4, start=0)
    >>> parse_method("PowerSDG(rank=2)")
    Traceback (most recent call last):
    ValueError: method 'PowerSDG(rank=2)': there is no PowerSDG (did you mean PowerSGD?); choose from ...
    """
    written = short_form(text) or text.strip()
    parts = re.fullmatch(rf"(?:(?P<place>.+?):)??(?P<call>{_CALL})", written, re.DOTALL)
    if parts is None:
        name = written.partition("-")[0]
        unknown = name.isidentifier() and short_form(name) is None
        raise ValueError(f"method {text!r}: {_unknown(name, method_classes()) if unknown else _FORMS}")
    try:
        tree = ast.parse(parts["call"], mode="eval").body
    except (SyntaxError, ValueError):
        raise ValueError(f"method {text!r}: cannot be parsed; {_FORMS}") from None
    try:
        names: dict[str, Any] = dict(method_classes())
        if parts["place"] is not None:
            names |= vars(import_path(parts["place"]))
        return _made(tree, names)
    except (ValueError, TypeError) as error:
        kind = ValueError if isinstance(error, ValueError) else TypeError
        raise kind(f"method {text!r}: {error}") from error


def short_form(text: str) -> str | None:
    """A short form such as `powersgd-4` as a call, `PowerSGD(4)`; None if the text is not a short form.

    >>> short_form("powersgd-4"), short_form("Int8"), short_form("PowerSGD(4)")
    ('PowerSGD(4)', 'BlockInt8', None)
    """
    names = {name.lower(): name for name in method_classes()} | _ALIASES
    whole = re.fullmatch(r"([\w-]+?)(?:-(\d[\d.]*(?:e-?\d+)?))?", text.strip())
    if whole is None:
        return None
    for name, setting in ((whole[0], None), whole.groups()):
        if found := names.get(re.sub("[-_]", "", name).lower()):
            return found if setting is None else f"{found}({setting})"
    return None


def method_classes() -> dict[str, type[Method]]:
    """This package's methods, by name.

    >>> "TopK" in method_classes(), "Method" in method_classes()
    (True, False)
    """
    package = importlib.import_module(__package__)
    found = {name: getattr(package, name) for name in sorted(package.__all__, key=str.lower)}
    return {name: x for name, x in found.items() if _is_method(x) and x is not Method}


def signature(method: type[Method]) -> str:
    """A method's call signature with its defaults.

    >>> from pufferfish.compression import Accordion
    >>> signature(Accordion)
    'Accordion(low, high, every)'
    """
    fields = [
        f.name if f.default is dataclasses.MISSING else f"{f.name}={f.default!r}"
        for f in dataclasses.fields(method)
        if f.init
    ]
    return f"{method.__name__}({', '.join(fields)})"


def import_path(place: str) -> ModuleType:
    """Import `file.py` or `package.module`, once. The file's folder, or the current one, is added to `sys.path`."""
    path = Path(place).resolve()
    if place.endswith(".py") and not path.is_file():
        raise ValueError(f"{place}: there is no such file")
    folder = str(path.parent) if place.endswith(".py") else os.getcwd()
    if folder not in sys.path:
        sys.path.insert(0, folder)  # so that it can import its neighbours
    try:
        return _file(path) if place.endswith(".py") else importlib.import_module(place)
    except Exception as error:
        raise ValueError(f"{place} cannot be imported: {type(error).__name__}: {error}") from error


def _file(path: Path) -> ModuleType:
    name = str(path)  # no other module can have it; dataclasses look their module up by name
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(sys.modules[name])
        except BaseException:
            del sys.modules[name]
            raise
    return sys.modules[name]


def _made(node: ast.expr, names: Mapping[str, Any]) -> Method:
    """Make a method from a name or a call."""
    call = node if isinstance(node, ast.Call) else ast.Call(node, [], [])
    keys = [key.arg for key in call.keywords]
    if not isinstance(call.func, ast.Name) or None in keys or len(set(keys)) < len(keys):
        raise ValueError(f"{ast.unparse(node)} is not the name of a method with its settings, each once")
    method = _class(call.func.id, names)
    args = [_value(arg, names) for arg in call.args]
    kwargs = {str(key.arg): _value(key.value, names) for key in call.keywords}
    try:
        inspect.signature(method).bind(*args, **kwargs)
    except TypeError as error:
        raise ValueError(f"{method.__name__}: {error}; write {signature(method)}") from None
    return method(*args, **kwargs)


def _class(name: str, names: Mapping[str, Any]) -> type[Method]:
    found = names.get(name) or names.get(short_form(name) or "")
    if found is None:
        raise ValueError(_unknown(name, names))
    if not _is_method(found) or found is Method:
        raise TypeError(f"{name} is not a subclass of pufferfish.compression.Method")
    if "__dataclass_fields__" not in vars(found):
        raise TypeError(f"{name} is not a dataclass; decorate it with @dataclass(frozen=True)")
    return found  # type: ignore[no-any-return]


def _unknown(name: str, names: Mapping[str, Any]) -> str:
    methods = {n.lower(): n for n, x in names.items() if _is_method(x) and x is not Method}
    close = difflib.get_close_matches(name.lower(), methods, n=1)
    hint = f" (did you mean {methods[close[0]]}?)" if close else ""
    return f"there is no {name}{hint}; choose from {', '.join(methods.values())}"


def _is_method(x: object) -> bool:
    return isinstance(x, type) and issubclass(x, Method)


def _value(node: ast.expr, names: Mapping[str, Any]) -> Any:
    """A setting: a method, number, text, True, False, None, or a tuple or list of them."""
    if isinstance(node, ast.Call | ast.Name):
        return _made(node, names)
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError):
        raise ValueError(f"{ast.unparse(node)} is neither a value nor a method") from None
