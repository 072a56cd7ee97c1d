"""The names of training methods, the same everywhere: `model(options)+exchange(options)`, such as
`pufferfish(rank=0.5,at=0.1)+powersgd(8)`, `dense+bf16`, `narrow+streaming(30,fragments=4)`.

A model that is dense need not be written: `bf16` is `dense+bf16`. The first option of a word may be written without its
name. Every model also takes `optimizer`, `lr` and `epochs`, a factor of the recipe's: `dense(optimizer=lars,lr=1.6)`.
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import hashlib
import inspect
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from torch import nn, optim

from .. import compression
from ..compression import Method, NoCompression, Settings, SparseLoCo
from ..local.fragments import Schedule
from ..local.local_steps import LocalSteps
from ..lowrank.factorize import check_plan
from ..planning import Plan
from ..planning import plan as make_plan
from ..switching.moments import AtEpoch, AtFraction
from ..switching.switch import Switch
from .tasks.find_task import import_path
from .tasks.task import OPTIMIZERS, Recipe

#: Models and their options.
MODELS: dict[str, tuple[str, ...]] = {
    "dense": (),
    "pufferfish": ("rank", "at", "keep", "plan", "frobenius", "back"),
    "auto": ("frobenius", "back"),
    "narrow": ("rank", "parameters"),
    "early-bird": ("ratio",),
    "lottery-ticket": ("rounds",),
}
#: Options of every model.
RECIPE_OPTIONS = ("optimizer", "lr", "epochs")
#: Local steps: an example of each name, and what it means.
LOCAL_STEPS = {
    "diloco(30)": "workers average their models every 30 updates",
    "streaming(30,fragments=4)": "the same in 4 parts, sent while training continues",
    "sparseloco(30)": "the same with 142 times fewer bytes",
}
_LOCAL_OPTIONS = ("h", "fragments", "delay", "mixing", "lr", "momentum", "method")
#: Words of compression methods that are not the name of their class in lower case.
_WORDS = {
    "bf16": "BFloat16", "fp16": "Float16", "fp8": "BlockFP8", "int8": "BlockInt8", "none": "NoCompression",
}  # fmt: skip
_FRACTION = "a fraction between 0 and 1"
#: Options that are numbers: which are valid, in code and in words.
_NUMBERS: dict[str, tuple[Callable[[float], bool], str]] = {
    "rank": (lambda x: 0 < x < 1, _FRACTION),
    "at": (lambda x: 0 <= x < 1, _FRACTION),
    "back": (lambda x: 0 < x < 1, _FRACTION),
    "ratio": (lambda x: 0 < x < 1, _FRACTION),
    "frobenius": (lambda x: x >= 0, "a number of at least 0"),
    "parameters": (lambda x: x >= 1 and x == int(x), "a whole number above 0"),
    "rounds": (lambda x: x >= 1 and x == int(x), "a whole number above 0"),
    "lr": (lambda x: x > 0, "a positive number"),
    "epochs": (lambda x: x > 0, "a positive factor"),
}


def training_method(text: str) -> TrainingMethod:
    """Parse the name of a method.

    >>> training_method("dense + bf16").name, training_method("topk(0.01)").compress
    ('bf16', TopK(k=0.01, sample=1.0))
    >>> method = training_method("pufferfish(rank=0.5,at=0.1)+streaming(30,fragments=4)")
    >>> method.low_rank.rank, method.local.delay
    (0.5, 7)
    >>> training_method("pufferfsh")
    Traceback (most recent call last):
    ValueError: method 'pufferfsh': there is no pufferfsh (did you mean pufferfish?); choose from dense, pufferfish, ...
    """
    try:
        return _training_method(text)
    except (ValueError, TypeError) as error:
        kind = ValueError if isinstance(error, ValueError) else TypeError
        raise kind(f"method {text!r}: {error}") from error


@dataclass(frozen=True, kw_only=True)
class TrainingMethod:
    """How a run changes the model, and how its workers exchange what they learn.

    Args:
        name: text that was parsed, without spaces around its parts and without "dense+".
        model: one of `MODELS`; its options are in `low_rank`, `narrow` or `pruning`.
        exchange: text of the exchange; "": plain DDP.
        compress: gradient compression; None uses plain DDP.
        scope: "layer"; "global": a sparsifier chooses among the elements of all tensors.
        hierarchy: "flat"; "node": averages within each machine, compresses between machines.
        local: local steps, which replace DDP, or None.
        optimizer, lr, epochs: values that replace the recipe's; `epochs` is a factor.
    """

    name: str
    model: str = "dense"
    exchange: str = ""
    low_rank: LowRankMethod | None = None
    narrow: NarrowMethod | None = None
    pruning: PruningMethod | None = None
    compress: Method | None = None
    scope: Literal["layer", "global"] = "layer"
    hierarchy: Literal["flat", "node"] = "flat"
    local: LocalMethod | None = None
    optimizer: str | None = None
    lr: float | None = None
    epochs: float = 1.0

    @property
    def compression(self) -> Settings:
        """How gradients are averaged; uncompressed without a method."""
        return Settings(self.compress or NoCompression(), scope=self.scope)

    @property
    def warm_up(self) -> str:
        """Name of the method that runs before the switch to low rank; the same method without one."""
        return self.name if self.low_rank is None else self.exchange or "dense"

    def recipe(self, default: Recipe) -> Recipe:
        """The recipe with this method's optimizer, learning rate and length.

        >>> training_method("dense(epochs=1.5,lr=0.2)").recipe(Recipe(epochs=10, batch=8, lr=0.1)).epochs
        15
        """
        changed = default
        if self.optimizer or self.lr:
            changed = changed.with_optimizer(self.optimizer or default.optimizer, self.lr)
        if self.epochs != 1:
            changed = changed.changed("", epochs=max(1, round(self.epochs * default.epochs)))
        return changed

    def meaning(self) -> list[str]:
        """Lines that say what the name stands for.

        >>> print(*training_method("pufferfish(rank=0.5,at=0.1)+powersgd(8)").meaning(), sep="\\n")
        model     low rank (rank=0.5, at=0.1): after a full-rank warm-up, the weights become two factors by SVD
        exchange  gradients, compressed by powersgd(rank=8)
        """
        models = {
            "dense": "dense: the task's own model",
            "pufferfish": "low rank{}: after a full-rank warm-up, the weights become two factors by SVD",
            "auto": "low rank{}: ranks and the end of the warm-up are chosen from the weights",
            "narrow": "narrow{}: a dense model with as many parameters as pufferfish's low-rank one",
            "early-bird": "pruned{}: removes channels once the selection is stable",
            "lottery-ticket": "pruned{}: in rounds, each trained from the same early weights",
        }
        own = self.low_rank or self.narrow or self.pruning
        given = {f.name: getattr(own, f.name) for f in dataclasses.fields(own)} if own else {}
        options = ", ".join(
            f"{name}={value}" for name, value in given.items() if value and name in MODELS[self.model]
        )
        lines = [f"model     {models[self.model].format(f' ({options})' if options else '')}"]
        if self.local is not None:
            lines.append(f"exchange  {self.local.as_code()}")
        elif self.compress is not None:
            scope = ", chosen among all tensors" if self.scope == "global" else ""
            node = ", within each machine first" if self.hierarchy == "node" else ""
            lines.append(f"exchange  gradients, compressed by {written(self.compress)}{scope}{node}")
        else:
            lines.append("exchange  gradients in fp32, by DDP")
        changes = {"optimizer": self.optimizer, "lr": self.lr, "epochs ×": self.epochs != 1 and self.epochs}
        if changed := ", ".join(f"{name} {value}" for name, value in changes.items() if value):
            lines.append(f"recipe    with {changed}")
        return lines


@dataclass(frozen=True, kw_only=True)
class NarrowMethod:
    """Which low-rank model a narrower dense one has as many parameters as.

    Args:
        rank: fraction of the full rank of the low-rank model; None: the recipe's.
        parameters: instead of a rank, the number of parameters.
    """

    rank: float | None = None
    parameters: int | None = None


@dataclass(frozen=True, kw_only=True)
class PruningMethod:
    """Pruning by Early-Bird tickets or by lottery tickets.

    Args:
        ratio: share of the channels that an Early-Bird ticket removes; None: a lottery ticket.
        rounds: rounds of a lottery ticket, each trained from the start.
    """

    ratio: float | None = None
    rounds: int = 5


@dataclass(frozen=True, kw_only=True)
class LowRankMethod:
    """How the model becomes low-rank.

    Args:
        automatic: moment and ranks are those of `Switch()`; otherwise those of the recipe.
        rank: fraction of the full rank; None: the recipe's.
        at: moment of the switch, a fraction of the run; None: the recipe's.
        keep: patterns of the layers that stay dense; None: the task's.
        frobenius: strength of the Frobenius decay of the low-rank layers; 0: none.
        back: moment at which the model becomes dense again, a fraction of the run; None: never.
        plan: file of a plan, instead of `rank` and `keep`.
    """

    automatic: bool = False
    rank: float | None = None
    at: float | None = None
    keep: tuple[str, ...] | None = None
    frobenius: float = 0.0
    back: float | None = None
    plan: Path | None = None

    def switch(self, recipe: Recipe, keep: Sequence[str]) -> Switch:
        """Build the `Switch`.

        Args:
            keep: the task's patterns of layers that stay dense.
        """
        settings: dict[str, Any] = {"lr": recipe.switch_lr} if recipe.switch_lr != 1 else {}
        if self.back is not None:
            settings["back"] = AtFraction(self.back)
        if self.automatic:
            return Switch(**settings)
        epoch = recipe.epochs // 3 if recipe.switch_at is None else recipe.switch_at
        if self.at is not None:
            epoch = round(self.at * recipe.epochs)
        when = AtEpoch(min(epoch, recipe.epochs - 1))
        if self.plan is not None:
            return Switch(Plan.load(self.plan), when=when, **settings)
        return Switch(rank=self.rank_of(recipe), keep=self.kept(keep), when=when, **settings)

    def make_plan(self, model: nn.Module, recipe: Recipe, keep: Sequence[str]) -> Plan:
        """The plan for a model: that of the file, or one by rank and patterns. Raises ValueError if it does not fit the model."""
        if self.plan is None:
            return make_plan(model, self.rank_of(recipe), keep=self.kept(keep))
        loaded = Plan.load(self.plan)
        try:
            check_plan(model, loaded)
        except ValueError as error:
            raise ValueError(f"{self.plan} is a plan for another model: {error}") from None
        return loaded

    @property
    def plan_identity(self) -> str | None:
        """Name of the plan's file, with a checksum of its text; None without a file."""
        if self.plan is None:
            return None
        return f"{self.plan.name}@{hashlib.sha256(self.plan.read_bytes()).hexdigest()[:12]}"

    def rank_of(self, recipe: Recipe) -> float:
        """Fraction of the full rank."""
        return recipe.rank if self.rank is None else self.rank

    def kept(self, keep: Sequence[str]) -> Sequence[str]:
        """Patterns of the layers that stay dense, given those of the task."""
        if self.automatic:
            return ()
        return keep if self.keep is None else self.keep


@dataclass(frozen=True, kw_only=True)
class LocalMethod:
    """Local steps between all workers, with SGD as the outer optimizer. See `LocalSteps`.

    Args:
        h: updates between two averages of a tensor.
        fragments: parts of the model that are averaged one after the other.
        delay: updates from sending a fragment to applying its average.
        mixing: share of its own parameters that a worker keeps; None: 0.5 with a delay, 0 without.
        lr: outer learning rate.
        momentum: outer Nesterov momentum; 0: none.
        compress: compression of the averages; None: they are sent in fp32.

    >>> LocalMethod(h=30, fragments=4, delay=7).as_code()
    'pf.LocalSteps(30, fragments=4, delay=7, outer=lambda p: torch.optim.SGD(p, lr=0.7, momentum=0.9, nesterov=True))'
    """

    h: int
    fragments: int = 1
    delay: int = 0
    mixing: float | None = None
    lr: float = 0.7
    momentum: float = 0.9
    compress: Method | None = None

    def __post_init__(self) -> None:
        for name, limit in (("lr", math.inf), ("momentum", 1)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < limit:
                raise ValueError(f"LocalSteps: outer {name}={value!r} must be at least 0 and below {limit}")
        if self.compress is not None and self.compress.has_momentum and self.momentum:
            name = type(self.compress).__name__
            raise ValueError(
                f"LocalSteps: {name} replaces outer momentum; pass momentum=0, as in diloco({self.h},momentum=0,method=…)"
            )
        assert self.schedule  # raises for invalid numbers

    @property
    def schedule(self) -> Schedule:
        """When which fragment is averaged."""
        mixing = (0.5 if self.delay else 0.0) if self.mixing is None else self.mixing
        return Schedule(h=self.h, fragments=self.fragments, delay=self.delay, mixing=mixing)

    @property
    def settings(self) -> Settings:
        """Settings of the compression."""
        return Settings(self.compress or NoCompression())

    def outer(self, params: list[nn.Parameter]) -> optim.Optimizer:
        """Create the outer optimizer."""
        return optim.SGD(params, lr=self.lr, momentum=self.momentum, nesterov=self.momentum > 0)

    def build(self, kind: Callable[..., LocalSteps] = LocalSteps) -> LocalSteps:
        """Create the local steps of this worker. Call it on all workers."""
        return kind(
            self.h, outer=self.outer, method=self.compress, fragments=self.fragments, delay=self.delay,
            mixing=self.mixing,
        )  # fmt: skip

    def as_code(self) -> str:
        """The local steps as Python code."""
        given = [
            f"{name}={x}"
            for name in ("fragments", "delay")
            if (x := getattr(self, name)) > (name == "fragments")
        ]
        given += [] if self.mixing is None else [f"mixing={self.mixing}"]
        given += [] if self.compress is None else [f"method=pf.compression.{self.compress!r}"]
        momentum = f", momentum={self.momentum}, nesterov=True" if self.momentum else ""
        return f"pf.LocalSteps({', '.join([str(self.h), *given])}, outer=lambda p: torch.optim.SGD(p, lr={self.lr}{momentum}))"


def slug(name: str) -> str:
    """The name of a method or a task as the name of a folder.

    >>> slug("auto+powersgd(4)"), slug("my/file.py:Mine(2)")
    ('auto+powersgd(4)', 'file.py_Mine(2)-...')
    """
    plain = re.sub(r"[^\w.,+=()-]+", "_", name.rsplit("/", 1)[-1]).strip("_.")
    return plain if plain == name else f"{plain}-{hashlib.sha256(name.encode()).hexdigest()[:6]}"


def split_names(text: str) -> tuple[str, ...]:
    """Split at commas that are outside of brackets.

    >>> split_names("dense, topk(0.01),file.py:Mine(rank=2, on=[1,2])")
    ('dense', 'topk(0.01)', 'file.py:Mine(rank=2, on=[1,2])')
    """
    return tuple(name for part in _split(text, ",") if (name := part.strip()))


def method_words() -> dict[str, type[Method]]:
    """The words of this package's compression methods.

    >>> method_words()["bf16"], "topk" in method_words()
    (<class '...BFloat16'>, True)
    """
    short = {name: word for word, name in _WORDS.items()}
    found = {name: getattr(compression, name) for name in sorted(compression.__all__, key=str.lower)}
    return {
        short.get(name, name.lower()): x for name, x in found.items() if _is_method(x) and x is not Method
    }


def compression_method(text: str) -> Method:
    """Parse a compression method. Text is never evaluated; a file or module that it names is imported.

    >>> compression_method("accordion(powersgd(4), topk(0.1), every=500)").low
    PowerSGD(rank=4, start=0, bf16=False)
    """
    return _method(text, method_words())


def written(method: Method) -> str:
    """A compression method of this package in the grammar of names: its first setting, and those that are not the defaults.

    >>> written(compression_method("powersgd(4)"))
    'powersgd(rank=4)'
    """
    words = {kind: word for word, kind in method_words().items()}
    shown = []
    for i, f in enumerate(f for f in dataclasses.fields(method) if f.init):
        value = getattr(method, f.name)
        if i == 0 or value != f.default:
            shown.append(f"{f.name}={written(value) if isinstance(value, Method) else repr(value)}")
    word = words.get(type(method), type(method).__name__)
    return f"{word}({', '.join(shown)})" if shown else word


def _training_method(text: str) -> TrainingMethod:
    first, *rest = _split(text, "+")
    model, arguments = _call(first)
    if model not in MODELS:
        first, rest, model, arguments = "dense", [text], "dense", ()
    exchange = "+".join(rest).strip()
    if rest and not exchange:
        raise ValueError(f"an exchange follows the +, such as {model}+powersgd(4)")
    options = _options(model, arguments)
    own = {name: value for name, value in options.items() if name not in RECIPE_OPTIONS}
    values = {name: value for name, value in options.items() if name in RECIPE_OPTIONS}
    if model in ("pufferfish", "auto"):
        values["low_rank"] = LowRankMethod(automatic=model == "auto", **own)
    elif model == "narrow":
        values["narrow"] = NarrowMethod(**own)
    elif model != "dense":
        values["pruning"] = PruningMethod(**({"ratio": 0.5} if model == "early-bird" else {}) | own)
    if exchange:
        word, given = _call(exchange)
        exchange = _canonical(word, given)
        values |= _exchange(word, given)
        if "pruning" in values and "local" in values:
            raise ValueError(f"{model} cannot be combined with local steps")
    name = _canonical(model, arguments)
    if exchange:
        name = exchange if name == "dense" else f"{name}+{exchange}"
    return TrainingMethod(name=name, model=model, exchange=exchange, **values)


def _options(model: str, arguments: Sequence[str]) -> dict[str, Any]:
    """The options of a model, converted and checked."""
    options: dict[str, Any] = {}
    for name, value in _named(arguments, MODELS[model] + RECIPE_OPTIONS, model).items():
        if name == "plan":
            options[name] = Path(value)
        elif name == "keep":
            options[name] = tuple(filter(None, value.split("|")))
        elif name == "optimizer":
            if value not in OPTIMIZERS:
                raise ValueError(f"optimizer={value} is not one of {', '.join(OPTIMIZERS)}")
            options[name] = value
        else:
            valid, needed = _NUMBERS[name]
            try:
                number = float(value)
            except ValueError:
                number = math.nan
            if not valid(number):
                raise ValueError(f"{name}={value} must be {needed}")
            options[name] = int(number) if name in ("parameters", "rounds") else number
    if "plan" in options and ("rank" in options or "keep" in options):
        raise ValueError("the plan has layers and ranks; remove rank= and keep=, or plan=")
    return options


def _exchange(word: str, arguments: Sequence[str]) -> dict[str, Any]:
    """Fields of a `TrainingMethod` for an exchange: local steps, or a compression method with its scope and hierarchy."""
    if word in ("diloco", "streaming") or (word == "sparseloco" and arguments):
        return {"local": _local_steps(word, arguments)}
    found: dict[str, Any] = {}
    rest = []
    for argument in arguments:
        name, _, value = (x.strip() for x in argument.partition("="))
        choices = {"scope": ("layer", "global"), "hierarchy": ("flat", "node")}.get(name)
        if choices is None:
            rest.append(argument)
        elif value not in choices:
            raise ValueError(f"{name}={value} must be {' or '.join(choices)}")
        else:
            found[name] = value
    method = compression_method(_canonical(word, rest))
    Settings(
        method, **{name: x for name, x in found.items() if name == "scope"}
    )  # raises for methods without it
    return {"compress": method} | found


def _local_steps(word: str, arguments: Sequence[str]) -> LocalMethod:
    given = _named(arguments, _LOCAL_OPTIONS, word)
    if "h" not in given or (word == "streaming" and "fragments" not in given):
        example = next(each for each in LOCAL_STEPS if each.startswith(word))
        raise ValueError(f"write it like {example}: {LOCAL_STEPS[example]}")
    settings = {name: _value(value, method_words()) for name, value in given.items()}
    if word == "sparseloco":
        settings = {"lr": 1.0, "momentum": 0.0, "method": SparseLoCo()} | settings
    elif word == "streaming" and settings["fragments"]:
        delay = max(min(settings["h"] // settings["fragments"], settings["h"] - 1), 0)
        settings = {"delay": delay} | settings
    return LocalMethod(compress=settings.pop("method", None), **settings)


def _method(text: str, names: Mapping[str, Any]) -> Method:
    """Make a compression method from a word with its settings."""
    word, arguments = _call(text)
    place, colon, name = word.rpartition(":")
    if colon:
        names = {**names, **vars(import_path(place))}
    found = names.get(name)
    if found is None:
        raise ValueError(_unknown(name, names, colon != ""))
    if not _is_method(found) or found is Method:
        raise TypeError(f"{name} is not a subclass of pufferfish.compression.Method")
    if "__dataclass_fields__" not in vars(found):
        raise TypeError(f"{name} is not a dataclass; decorate it with @dataclass(frozen=True)")
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    for argument in arguments:
        key, equals, value = argument.partition("=")
        if not (equals and key.strip().isidentifier()):
            args.append(_value(argument, names))
        elif key.strip() in kwargs:
            raise ValueError(f"{key.strip()} is given twice")
        else:
            kwargs[key.strip()] = _value(value, names)
    try:
        inspect.signature(found).bind(*args, **kwargs)
    except TypeError as error:
        fields = [f for f in dataclasses.fields(found) if f.init]
        shown = [f.name + ("" if f.default is dataclasses.MISSING else f"={f.default!r}") for f in fields]
        raise ValueError(f"{name}: {error}; write {name}({', '.join(shown)})") from None
    return found(*args, **kwargs)  # type: ignore[no-any-return]


def _value(text: str, names: Mapping[str, Any]) -> Any:
    """A setting: a number, text in quotes, True, False, None, a tuple or list of them, or a compression method."""
    try:
        return ast.literal_eval(text.strip())
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return _method(text, names)


def _unknown(word: str, names: Mapping[str, Any], own: bool) -> str:
    known = [name for name, x in names.items() if _is_method(x) and x is not Method]
    if not own:
        known = [*MODELS, *(each.partition("(")[0] for each in LOCAL_STEPS), *known]
    known = list(dict.fromkeys(known))
    close = difflib.get_close_matches(word.lower(), known, n=1) or difflib.get_close_matches(word, known, n=1)
    hint = f" (did you mean {close[0]}?)" if close else ""
    return f"there is no {word}{hint}; choose from {', '.join(known)} (`pufferfish methods`)"


def _is_method(x: object) -> bool:
    return isinstance(x, type) and issubclass(x, Method)


def _named(arguments: Sequence[str], names: Sequence[str], word: str) -> dict[str, str]:
    """Options by name; only the first may be without its name."""
    found: dict[str, str] = {}
    for i, argument in enumerate(arguments):
        name, equals, value = (x.strip() for x in argument.partition("="))
        if not equals and i == 0 and names:
            name, value = names[0], name
        if name not in names:
            raise ValueError(f"{argument.strip()} is not an option of {word}; choose from {', '.join(names)}")
        if name in found:
            raise ValueError(f"{name} is given twice")
        found[name] = value
    return found


def _call(text: str) -> tuple[str, tuple[str, ...]]:
    """A word and its options."""
    word, bracket, rest = text.strip().partition("(")
    if bracket and not (rest.endswith(")") and len(_split(rest[:-1], ")")) == 1):
        raise ValueError(
            f"{text.strip()}: write word(option,option=value), with one pair of brackets around the options"
        )
    if not word.strip():
        raise ValueError("write model(options)+exchange(options)")
    return word.strip(), split_names(rest[:-1]) if bracket else ()


def _canonical(word: str, arguments: Sequence[str]) -> str:
    return f"{word}({','.join(arguments)})" if arguments else word


def _split(text: str, at: str) -> list[str]:
    """Split at a letter that is outside of brackets."""
    parts, depth = [""], 0
    for letter in text:
        if letter == at and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
        depth += (letter in "([") - (letter in ")]")
    return parts
