"""`add_notice` and `remove_notice`: the part of a model card (README.md) that says how to load a low-rank folder."""

import re
from pathlib import Path

from ..planning import Plan, read_json, write_text

MODEL_CARD = "README.md"
_BEGIN, _END = "<!-- pufferfish: begin -->", "<!-- pufferfish: end -->"
_NOTICE = """\
{begin}
## Low-rank weights

Layers of this model are products of two thin matrices: {before:,} → {after:,} parameters. The `from_pretrained` of
transformers does not read these weights. Load them with `pip install pufferfish-torch` and

```python
{imports}from pufferfish.integrations.transformers import from_pretrained

model = from_pretrained("path/of/this/folder"{model_class})
```

`pufferfish merge path/of/this/folder --out dense` writes a dense folder that transformers reads.
{end}
"""


def add_notice(folder: Path, plan: Plan) -> None:
    """Add the notice to the model card, or replace the one that it has; other text stays."""
    card = folder / MODEL_CARD
    text = _without_notice(card.read_text(encoding="utf-8")) if card.is_file() else ""
    named = read_json(folder / "config.json").get("architectures")
    notice = _NOTICE.format(
        begin=_BEGIN, end=_END, before=plan.before.parameters, after=plan.after.parameters,
        imports="" if named else "from transformers import AutoModelForCausalLM  # or the one of this model\n",
        model_class="" if named else ", model_class=AutoModelForCausalLM",
    )  # fmt: skip
    write_text(card, f"{text.rstrip()}\n\n{notice}" if text.strip() else notice)


def remove_notice(folder: Path) -> None:
    """Remove the notice from the model card, and the card if nothing else is in it."""
    card = folder / MODEL_CARD
    if card.is_file():
        text = card.read_text(encoding="utf-8")
        rest = _without_notice(text)
        if not rest.strip():
            card.unlink()
        elif rest != text:
            write_text(card, rest)


def _without_notice(text: str) -> str:
    return re.sub(rf"\n*{re.escape(_BEGIN)}.*?{re.escape(_END)}\n*", "\n", text, flags=re.DOTALL)
