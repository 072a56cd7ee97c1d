"""`Llama` against transformers' own, its size, and the modes it runs in."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import pufferfish as pf
from pufferfish.lab.models import Llama
from pufferfish.lab.tasks import find_task

SIZES = {"vocabulary": 61, "d": 48, "layers": 3, "heads": 6, "inner": 80, "context": 16, "theta": 500.0}
CLOSE = {"rtol": 1e-5, "atol": 1e-5}  # the tables of the rotation are in fp32, here and there


def reference(model: Llama, kv_heads: int, tied: bool) -> LlamaForCausalLM:
    """The same model of transformers, with copies of the weights."""
    config = LlamaConfig(
        vocab_size=61, hidden_size=48, num_hidden_layers=3, num_attention_heads=6, num_key_value_heads=kv_heads,
        intermediate_size=80, max_position_embeddings=16, rms_norm_eps=1e-5, tie_word_embeddings=tied,
        rope_parameters={"rope_type": "default", "rope_theta": 500.0},
    )  # fmt: skip
    other = LlamaForCausalLM(config).double()
    other.load_state_dict({their_name(name): p for name, p in model.named_parameters()}, strict=not tied)
    return other


def their_name(name: str) -> str:
    words = {
        "embedding": "model.embed_tokens", "blocks": "model.layers", "attention_norm": "input_layernorm",
        "ffn_norm": "post_attention_layernorm", "attention": "self_attn", "q": "q_proj", "k": "k_proj", "v": "v_proj",
        "o": "o_proj", "gate": "mlp.gate_proj", "up": "mlp.up_proj", "down": "mlp.down_proj", "norm": "model.norm",
        "head": "lm_head",
    }  # fmt: skip
    return ".".join(words.get(part, part) for part in name.split("."))


def make(kv_heads: int = 2, tied: bool = True, **sizes: float) -> Llama:
    torch.manual_seed(0)
    model = Llama(**(SIZES | sizes), kv_heads=kv_heads, tied=tied)  # type: ignore[arg-type]
    for p in model.parameters():  # norms' weights that differ, and outputs that depend on all layers
        p.data.normal_(std=0.3)
    return model


@pytest.mark.parametrize(("kv_heads", "tied"), [(1, True), (2, False), (6, True)])
def test_outputs_and_gradients_are_those_of_transformers(kv_heads: int, tied: bool) -> None:
    model = make(kv_heads, tied).double()
    other = reference(model, kv_heads, tied)
    text = torch.randint(61, (3, 13))
    logits, expected = model(text), other(text).logits
    torch.testing.assert_close(logits, expected, **CLOSE)
    for output in (logits, expected):
        F.cross_entropy(output.flatten(0, 1), text.flatten()).backward()
    theirs = dict(other.named_parameters())
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad, theirs[their_name(name)].grad, **CLOSE, msg=name)


def test_initialization() -> None:
    torch.manual_seed(0)
    model = Llama(d=192, layers=8, heads=6)
    for name, p in model.named_parameters():
        if p.dim() == 1:
            assert torch.equal(p, torch.ones_like(p))
        else:
            std = 0.02 / 4 if name.endswith((".o.weight", ".down.weight")) else 0.02
            assert float(p.detach().std()) == pytest.approx(std, rel=0.03), name


@pytest.mark.parametrize("low_rank", [False, True])
def test_it_compiles_as_one_graph(low_rank: bool) -> None:
    model, text = make(), torch.randint(61, (2, 16))
    if low_rank:
        pf.factorize_(model, pf.plan(model, pf.Ratio(0.25, multiple=1)))
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(text), model(text))


def test_attention_is_in_the_precision_of_autocast(monkeypatch: pytest.MonkeyPatch) -> None:
    model, text, seen = make(), torch.randint(61, (2, 16)), []
    attend = F.scaled_dot_product_attention

    def record(*arguments: Tensor, **settings: bool) -> Tensor:
        seen.extend(x.dtype for x in arguments)
        return attend(*arguments, **settings)

    monkeypatch.setattr(F, "scaled_dot_product_attention", record)
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(text)
    assert set(seen) == {torch.bfloat16}
    full = model(text)
    assert (logits - full).norm() < 0.05 * full.norm()


@pytest.mark.parametrize(
    "sizes",
    [{"d": 48, "heads": 5}, {"d": 48, "heads": 6, "kv_heads": 4}, {"d": 18, "heads": 6, "kv_heads": 2}],
)
def test_heads_that_do_not_fit(sizes: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="must be a multiple of kv_heads"):
        Llama(**sizes)  # type: ignore[arg-type]


def test_the_options_of_tasks() -> None:
    task = find_task("text:llama,d=64,layers=2,heads=4,context=32")
    model = task.build()
    assert isinstance(model, Llama)
    assert model(torch.randint(256, (1, 32))).shape == (1, 32, 256)
    assert isinstance(find_task("wikitext2:llama,d=64,heads=4").build(), Llama)
    for name in ("text:llama,heads=3", "text:llama,d=10,heads=2"):
        with pytest.raises(ValueError, match=r"must be a multiple of kv_heads=2, and d / heads even"):
            find_task(name)
    with pytest.raises(ValueError, match="has no model 'lama' \\(did you mean llama\\?\\)"):
        find_task("text:lama")
