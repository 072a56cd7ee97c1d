"""The names of training methods: `TrainingMethod` and its parts."""

from __future__ import annotations

import ast
import difflib
import hashlib
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from torch import nn, optim

from ..compression import Method, NoCompression, Settings, SparseLoCo
from ..compression.parse_method import parse_method, short_form
from ..compression.settings import HierarchyLike
from ..local.fragments import Schedule
from ..local.local_steps import LocalSteps
from ..lowrank.checks import check_structure
from ..planning.plan import Plan
from ..planning.plan import plan as make_plan
from ..switching.moments import AtEpoch, AtFraction
from ..switching.switch import Switch
from .tasks.recipe import OPTIMIZERS, Recipe

#: Low rank by the paper's recipe; low rank chosen from the weights.
LOW_RANKS = ("pufferfish", "auto")
#: Unchanged model; low rank by the paper's recipe; low rank chosen from the weights.
MODELS = ("dense", *LOW_RANKS)
_GLOBAL = "global-"
#: Names, and the meaning of a number after them, as in early-bird-0.3.
PRUNING_METHODS = {
    "lottery-ticket": "how many rounds of pruning",
    "early-bird": "the share of channels to remove",
}


@dataclass(frozen=True)
class TrainingMethod:
    """How a run changes the model, and how its workers exchange what they learn.

    Args:
        name: text that was parsed.
        model: "dense", "pufferfish" or "auto" with options, a pruning method such as "early-bird-0.5", or a `NarrowMethod`.
        compress: gradient compression; None uses plain DDP.
        scope: "layer"; "global": a sparsifier chooses among the elements of all tensors, as in `global-topk-0.01`.
        local: local steps, which replace DDP, or None.

    >>> training_method("auto+powersgd-4")
    TrainingMethod(name='auto+powersgd-4', model='auto', compress=PowerSGD(rank=4, start=0), scope='layer', local=None)
    """

    name: str
    model: str = "dense"
    compress: Method | None = None
    scope: Literal["layer", "global"] = "layer"
    local: LocalMethod | None = None

    @property
    def compression(self) -> Settings:
        """How gradients are averaged; uncompressed without a method."""
        return Settings(self.compress or NoCompression(), scope=self.scope)

    @property
    def narrow(self) -> NarrowMethod | None:
        """The narrower model that is trained; None for the task's own model."""
        return narrow_method(self.model)

    @property
    def low_rank(self) -> LowRankMethod | None:
        """How the model becomes low-rank; None if it does not."""
        return low_rank_method(self.model)

    def switch(self, recipe: Recipe, keep: Sequence[str]) -> Switch | None:
        """Build the `Switch` to low rank, or return None if the method has none.

        Args:
            keep: names or patterns of layers that stay dense under "pufferfish", if it has none of its own.
        """
        return self.low_rank.switch(recipe, keep) if self.low_rank else None


def training_method(text: str) -> TrainingMethod:
    """Parse `text`: a model, then local steps, then a compression method, each optional, joined by +.

    >>> training_method("bf16").compress, training_method("topk-0.01").compress, training_method("pufferfish").model
    (BFloat16(), TopK(k=0.01, sample=1.0), 'pufferfish')
    >>> training_method("early-bird-0.5+powersgd-4")
    TrainingMethod(name='early-bird-0.5+powersgd-4', model='early-bird-0.5', compress=PowerSGD(rank=4, start=0), scope='layer', local=None)
    >>> training_method("pufferfish+diloco-30+int4").local
    LocalMethod(h=30, fragments=1, delay=0, mixing=None, lr=0.7, momentum=0.9, compress=Int4(...))
    >>> training_method("pufferfsh")
    Traceback (most recent call last):
    ValueError: method 'pufferfsh': there is no pufferfsh (did you mean pufferfish?); choose from dense, pufferfish, ...
    """
    model, plus, exchange = text.strip().partition("+")
    name, bracket, options = model.partition("(")
    if name.lower() in MODELS:
        model = name.lower() + bracket + options
    if not (model in MODELS or low_rank_method(model) or is_pruning_method(model) or narrow_method(model)):
        model, exchange = "dense", text.strip()
    elif not exchange:
        if plus:
            raise ValueError(f"{text!r}: a compression method follows the +, such as {model}+powersgd-4")
        return TrainingMethod(text, model)
    if not is_local_method(exchange):
        return TrainingMethod(text, model, *_compression(exchange, text))
    if is_pruning_method(model):
        raise ValueError(f"method {text!r}: {model} cannot be combined with local steps")
    return TrainingMethod(text, model, local=local_method(exchange, lambda word: _method(word, text)))


def _compression(word: str, text: str) -> tuple[Method, Literal["layer", "global"]]:
    """Parse a compression method and its scope."""
    if not word.lower().startswith(_GLOBAL):
        return _method(word, text), "layer"
    method = _method(word[len(_GLOBAL) :], text)
    Settings(method, scope="global")  # raises an error for methods that do not support it
    return method, "global"


def _method(word: str, text: str) -> Method:
    """Parse a compression method; the error for an unknown name lists what may stand in its place."""
    if re.fullmatch(r"[\w.-]+", word) and short_form(word) is None:
        models = () if "+" in text else (*MODELS, "narrow", *PRUNING_METHODS)
        known = [*models, *LOCAL_METHODS, "bf16", "int8", "powersgd-4", "topk-0.01"]
        close = difflib.get_close_matches(word.lower(), known, n=1)
        hint = f" (did you mean {close[0]}?)" if close else ""
        raise ValueError(
            f"method {text!r}: there is no {word}{hint}; choose from {', '.join(known)} … (`pufferfish methods`)"
        )
    return parse_method(word)


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
            check_structure(model, loaded)
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


def low_rank_method(text: str) -> LowRankMethod | None:
    """Parse `pufferfish` and `auto`, also with options in brackets. Returns None for other methods.

    Patterns in `keep` are separated by |.

    >>> low_rank_method("pufferfish(at=0, keep=conv1|fc)")
    LowRankMethod(automatic=False, rank=None, at=0.0, keep=('conv1', 'fc'), frobenius=0.0, back=None, plan=None)
    >>> low_rank_method("auto(at=0.5)")
    Traceback (most recent call last):
    ValueError: 'auto(at=0.5)': at=0.5 is not an option of auto; choose from frobenius, back
    """
    match = re.fullmatch(r"(\w+)(?:\((.*)\))?", text)
    if match is None or match[1] not in LOW_RANKS:
        return None
    automatic = match[1] == "auto"
    names = ("frobenius", "back") if automatic else ("rank", "at", "keep", "plan", "frobenius", "back")
    options: dict[str, Any] = {}
    for part in filter(None, (match[2] or "").split(",")):
        name, _, value = (x.strip() for x in part.partition("="))
        if name not in names:
            raise ValueError(
                f"{text!r}: {part.strip()} is not an option of {match[1]}; choose from {', '.join(names)}"
            )
        if name == "plan":
            options[name] = Path(value)
        elif name == "keep":
            options[name] = tuple(filter(None, value.split("|")))
        else:
            options[name] = _number(text, name, value)
    if "plan" in options and ("rank" in options or "keep" in options):
        raise ValueError(f"{text!r}: the plan has layers and ranks; remove rank= and keep=, or plan=")
    return LowRankMethod(automatic=automatic, **options)


def _number(text: str, name: str, value: str) -> float:
    try:
        number = float(value)
    except ValueError:
        number = -1.0
    valid = number >= 0 if name == "frobenius" else 0 <= number < 1 if name == "at" else 0 < number < 1
    if not valid:
        needed = "a number of at least 0" if name == "frobenius" else "a fraction between 0 and 1"
        raise ValueError(f"{text!r}: {name}={value} must be {needed}")
    return number


#: An example of each name.
LOCAL_METHODS = ("diloco-30", "streaming-30x4", "sparseloco-30")
_FORM = re.compile(
    r"(?P<name>(?i:diloco|streaming|sparseloco))-(?P<h>\d+)(?:x(?P<k>\d+))?(?P<more>\([^()]*\))?"
)
_SETTINGS = ("fragments", "delay", "mixing", "lr", "momentum")


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
                f"LocalSteps: {name} replaces outer momentum; pass momentum=0, as in diloco-{self.h}(momentum=0)+…"
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

    def build(self) -> LocalSteps:
        """Create the local steps of this worker. Call it on all workers."""
        return LocalSteps(
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


def is_local_method(text: str) -> bool:
    """Whether text is the name of local steps, maybe followed by + and compression.

    >>> [is_local_method(text) for text in ("diloco-30", "streaming-30x4+int4", "sparseloco", "powersgd-4")]
    [True, True, False, False]
    """
    found = _FORM.match(text)
    return found is not None and text[found.end() :][:1] in ("", "+")


def local_method(text: str, compression: Callable[[str], Method]) -> LocalMethod:
    """Parse local steps: `diloco-H`, `streaming-HxK`, `sparseloco-H`, settings in brackets, compression after a +.

    Args:
        compression: parses a compression method.

    >>> from pufferfish.compression.parse_method import parse_method
    >>> local_method("streaming-30x4(lr=0.5)+Int4", parse_method)
    LocalMethod(h=30, fragments=4, delay=7, mixing=None, lr=0.5, momentum=0.9, compress=Int4(...))
    """
    found = _FORM.match(text)
    assert found is not None
    name, h, rest = found["name"].lower(), int(found["h"]), text[found.end() :]
    example = next(each for each in LOCAL_METHODS if each.startswith(name))
    if (found["k"] is not None) != (name == "streaming"):
        raise ValueError(f"method {text!r}: write it like {example}, {_meaning(name)}")
    settings: dict[str, Any] = {"h": h}
    if name == "streaming":
        k = int(found["k"])
        settings |= {"fragments": k, "delay": max(min(h // k, h - 1), 0) if k else 0}
    elif name == "sparseloco":
        settings |= {"lr": 1.0, "momentum": 0.0, "compress": SparseLoCo()}
    settings |= _settings(found["more"] or "()", text)
    if rest:
        if name == "sparseloco" or rest == "+":
            raise ValueError(
                f"method {text!r}: after diloco or streaming, a compression method follows the +"
            )
        settings["compress"] = compression(rest[1:])
    try:
        return LocalMethod(**settings)
    except ValueError as error:
        raise ValueError(f"method {text!r}: {error}") from None


def _meaning(name: str) -> str:
    return "updates × fragments" if name == "streaming" else "with the number of updates between two averages"


def _settings(brackets: str, text: str) -> dict[str, Any]:
    """Parse `(lr=0.5, delay=3)`."""
    try:
        call = ast.parse(f"f{brackets}", mode="eval").body
        assert isinstance(call, ast.Call)
        assert not call.args
        values = {str(key.arg): ast.literal_eval(key.value) for key in call.keywords}
    except (SyntaxError, ValueError, AssertionError):
        values = {brackets: None}
    unknown = values.keys() - {*_SETTINGS}
    if unknown:
        raise ValueError(f"method {text!r}: the brackets take {', '.join(_SETTINGS)}, as in (lr=0.5)")
    return values


@dataclass(frozen=True)
class BenchMethod:
    """A training method with its optimizer and learning rate, which replace the recipe's."""

    method: TrainingMethod
    optimizer: str | None = None
    lr: float | None = None

    def recipe(self, default: Recipe) -> Recipe:
        """The recipe with the optimizer and learning rate of this method."""
        return default.with_optimizer(self.optimizer, self.lr) if self.optimizer else default


def bench_method(text: str) -> BenchMethod:
    """Parse a training method, optionally followed by @OPTIMIZER or @OPTIMIZER=LR.

    >>> bench_method("pufferfish+powersgd-4@lars=1.6")
    BenchMethod(method=TrainingMethod(name='pufferfish+powersgd-4', ...), optimizer='lars', lr=1.6)
    >>> bench_method("dense@lion")
    Traceback (most recent call last):
    ValueError: method 'dense@lion': expected sgd, adam, adamw, muon, lars, lamb or sam after the @, optionally with =LR
    """
    word, at, suffix = text.rpartition("@")
    if not at or "/" in suffix or ":" in suffix:  # an @ in a path
        return BenchMethod(training_method(text))
    name, equals, number = suffix.partition("=")
    try:
        lr = float(number) if equals else None
    except ValueError:
        name = ""
    if name not in OPTIMIZERS:
        known = f"{', '.join(OPTIMIZERS[:-1])} or {OPTIMIZERS[-1]}"
        raise ValueError(f"method {text!r}: expected {known} after the @, optionally with =LR")
    return BenchMethod(training_method(word), name, lr)


LOW_RANK = "pufferfish"
#: Suffix of methods that average within each machine and compress between machines.
NODE = ", hierarchy=node"


def parse_method_name(name: str) -> tuple[TrainingMethod, HierarchyLike]:
    """The method and the hierarchy that a name stands for. In a hierarchy, plain averages use `NoCompression`.

    >>> parse_method_name("pufferfish, hierarchy=node")
    (TrainingMethod(name='pufferfish', model='pufferfish', compress=NoCompression(), scope='layer', local=None), 'node')
    >>> parse_method_name("dense")
    (TrainingMethod(name='dense', model='dense', compress=None, scope='layer', local=None), 'flat')
    """
    method = training_method(name.removesuffix(NODE))
    if not name.endswith(NODE):
        return method, "flat"
    return replace(method, compress=method.compress or NoCompression()), "node"


def is_local(name: str) -> bool:
    """Whether a name stands for local steps.

    >>> is_local("pufferfish+streaming-30x4"), is_local("bf16, hierarchy=node")
    (True, False)
    """
    return training_method(name.removesuffix(NODE)).local is not None


def warm_up_name(name: str) -> str:
    """The method that a low-rank method uses before its switch; other methods are returned unchanged.

    >>> names = ("pufferfish", "pufferfish+int8", "int8", "pufferfish+bf16, hierarchy=node")
    >>> [warm_up_name(name) for name in names]
    ['dense', 'int8', 'int8', 'bf16, hierarchy=node']
    """
    flat = name.removesuffix(NODE)
    model, _, compression = flat.partition("+")
    return name if model != LOW_RANK else (compression or "dense") + name[len(flat) :]


def simplicity(name: str) -> tuple[int, bool]:
    """Sort key: dense, bf16, low rank, then larger compression errors, then local steps; each without a hierarchy first.

    >>> sorted(["diloco-30", "int8", "pufferfish", "bf16, hierarchy=node", "bf16", "dense"], key=simplicity)
    ['dense', 'bf16', 'bf16, hierarchy=node', 'pufferfish', 'int8', 'diloco-30']
    """
    simple = ["dense", "bf16", LOW_RANK, f"{LOW_RANK}+bf16"]
    flat = name.removesuffix(NODE)
    last = len(simple) + is_local(flat)
    return simple.index(flat) if flat in simple else last, name.endswith(NODE)


def exchange_method(name: str) -> TrainingMethod:
    """Parse one of `--methods`: compression or local steps.

    >>> exchange_method("powersgd-4").compress, exchange_method("diloco-30").local.h
    (PowerSGD(rank=4, start=0), 30)
    """
    method = training_method(name)
    if (method.compress is None and method.local is None) or method.model != "dense":
        raise ValueError(
            f"--methods {name}: pass compression methods and local steps only; low rank and combinations are always tried"
        )
    return method


@dataclass(frozen=True)
class NarrowMethod:
    """Which low-rank model a narrower dense one has as many parameters as.

    Args:
        rank: fraction of the full rank of the low-rank model; None: the recipe's.
        parameters: instead of a rank, the number of parameters.
    """

    rank: float | None = None
    parameters: int | None = None


def narrow_method(text: str) -> NarrowMethod | None:
    """Parse `narrow`, also with a rank or with a number of parameters. Returns None for other methods.

    >>> narrow_method("narrow"), narrow_method("narrow-0.5"), narrow_method("dense")
    (NarrowMethod(rank=None, parameters=None), NarrowMethod(rank=0.5, parameters=None), None)
    >>> narrow_method("narrow-1.5M").parameters, narrow_method("narrow-800k").parameters
    (1500000, 800000)
    """
    match = re.fullmatch(r"narrow(?:-([\d.]+)([kM])?)?", text)
    if match is None:
        return None
    digits, unit = match.groups()
    number = float(digits) if digits and re.fullmatch(r"\d*\.?\d+", digits) else 0.0
    if digits and not 0 < number < (math.inf if unit else 1):
        raise ValueError(
            f"{text!r}: after narrow- write the low-rank model's fraction of the full rank, as in narrow-0.25, or a number "
            "of parameters, as in narrow-1.5M"
        )
    if unit:
        return NarrowMethod(parameters=round(number * {"k": 1e3, "M": 1e6}[unit]))
    return NarrowMethod(number if digits else None)


def is_pruning_method(text: str) -> bool:
    """Whether `text` names a pruning method; raises ValueError if its number is invalid.

    >>> is_pruning_method("early-bird-0.3"), is_pruning_method("lottery-ticket"), is_pruning_method("pufferfish")
    (True, True, False)
    """
    return parse_pruning(text) is not None


def parse_pruning(text: str) -> tuple[str, float | None] | None:
    """Return name and number, or None for another method."""
    match = re.fullmatch(rf"({'|'.join(PRUNING_METHODS)})(?:-([\d.]+))?", text)
    if match is None:
        return None
    name, digits = match.groups()
    if digits is None:
        return name, None
    counts_rounds = name == "lottery-ticket"
    number = float(digits) if re.fullmatch(r"\d*\.?\d+", digits) else 0.0
    if not (number >= 1 and number.is_integer() if counts_rounds else 0 < number < 1):
        example = "lottery-ticket-5" if counts_rounds else "early-bird-0.5"
        raise ValueError(f"{text!r}: after {name}- write {PRUNING_METHODS[name]}, as in {example}")
    return name, number
