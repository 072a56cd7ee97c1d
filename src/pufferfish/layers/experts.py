"""Low-rank experts of a mixture: 3-D parameters (experts, outputs, inputs) become two grouped products."""

import dataclasses
from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from .base import LowRank, any_requires_grad, meta_copy, register
from .grouped import GroupedLinear, Routing
from .matrix import Matrix


class GroupedFactors(nn.Module):
    """Factors of a stack of matrices, one pair per expert: `y = U_e (V_e x) + b_e`."""

    def __init__(self, matrix: Matrix, r: int, dtype: torch.dtype) -> None:
        super().__init__()
        E, bias = matrix.blocks, matrix.bias is not None
        self.down = GroupedLinear(E, matrix.n, r, device="meta", dtype=dtype)
        self.up = GroupedLinear(E, r, matrix.m, bias, device="meta", dtype=dtype)

    def forward(self, rows: Tensor, ends: Tensor) -> Tensor:
        return cast(Tensor, self.up(self.down(rows, ends), ends))


class LowRankExperts(LowRank):
    """Low-rank form of an experts module of transformers, or of your own.

    It is called as `experts(tokens, index, weights)`: tokens (tokens, n), and for each token the experts that
    the router chose (tokens, k) and their weights (tokens, k). The dense module has 3-D parameters
    `gate_up_proj` (or `up_proj`) and `down_proj`, with biases `gate_up_proj_bias` … if it `has_bias`.

    A module with other parameters or another forward needs a subclass that lists its matrices and computes
    with them. Each matrix is a child of the low-rank module:

    >>> import torch, pufferfish as pf
    >>> class Experts(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.w1 = nn.Parameter(torch.randn(4, 64, 32))
    ...         self.w2 = nn.Parameter(torch.randn(4, 32, 64))
    ...
    ...     def forward(self, tokens, index, weights):
    ...         hidden = torch.einsum("tn,tkmn->tkm", tokens, self.w1[index]).relu()
    ...         return (torch.einsum("tkn,tkmn->tkm", hidden, self.w2[index]) * weights.unsqueeze(-1)).sum(1)
    >>> class LowRankOwn(pf.layers.LowRankExperts):
    ...     @classmethod
    ...     def matrices(cls, dense):
    ...         return [cls.matrix(dense, "w1"), cls.matrix(dense, "w2")]
    ...
    ...     def compute(self, rows, ends):
    ...         return self.w2(self.w1(rows, ends).relu(), ends)
    >>> pf.register(Experts, LowRankOwn)
    >>> model = nn.ModuleDict({"experts": Experts()})
    >>> _ = pf.factorize_(model, pf.plan(model, rank=8))
    >>> model["experts"]
    LowRankOwn(
      ranks={'w1': 8, 'w2': 8}
      (w1): GroupedFactors(
        (down): GroupedLinear(experts=4, in_features=32, out_features=8, bias=False)
        (up): GroupedLinear(experts=4, in_features=8, out_features=64, bias=False)
      )
      (w2): GroupedFactors(
        (down): GroupedLinear(experts=4, in_features=64, out_features=8, bias=False)
        (up): GroupedLinear(experts=4, in_features=8, out_features=32, bias=False)
      )
    )
    """

    # Copied from the dense module or registered by name in __init__; which of them exist depends on the module.
    has_gate: bool = True
    is_concatenated: bool = True
    is_transposed: bool = False
    has_post_expert_norm: bool = False
    act_fn: nn.Module
    post_expert_norm: nn.Module
    gate_proj: nn.Module
    up_proj: nn.Module
    gate_up_proj: nn.Module
    down_proj: nn.Module

    def __init__(self, dense: nn.Module, ranks: Mapping[str, int]) -> None:
        super().__init__(dense, ranks)
        for name, module in dense.named_children():  # activation, normalisation
            self.add_module(name, meta_copy(module))
        for x in self.matrices(dense):
            dtype = dense.get_parameter(x.weight).dtype
            child: nn.Module
            if x.name in ranks:
                child = GroupedFactors(x, ranks[x.name], dtype)
            else:
                child = GroupedLinear(x.blocks, x.n, x.m, x.bias is not None, x.transposed, "meta", dtype)
            self.add_module(x.name, child)
        self.experts = self.matrices(dense)[0].blocks

    @classmethod
    def matrix(
        cls, dense: nn.Module, weight: str, *, bias: str | None = None, transposed: bool = False
    ) -> Matrix:
        """Describe the 3-D parameter `weight`: (experts, outputs, inputs), or (experts, inputs, outputs) if transposed."""
        E, m, n = shape = tuple(dense.get_parameter(weight).shape)
        m, n = (n, m) if transposed else (m, n)
        return Matrix(
            name=weight, weight=weight, dense=f"{weight}.weight", shape=shape, blocks=E, m=m, n=n,
            bias=bias, transposed=transposed, routed=True,
        )  # fmt: skip

    @classmethod
    def matrices(cls, dense: nn.Module) -> list[Matrix]:
        gated, transposed = (
            getattr(dense, flag, getattr(cls, flag)) for flag in ("has_gate", "is_transposed")
        )
        first = "gate_up_proj" if gated else "up_proj"
        biased = getattr(dense, "has_bias", False)
        matrices = [
            cls.matrix(dense, name, bias=f"{name}_bias" if biased else None, transposed=transposed)
            for name in (first, "down_proj")
        ]
        if gated and not _smaller_together(matrices[0]):
            matrices[:1] = _apart(matrices[0], interleaved=not getattr(dense, "is_concatenated", True))
        return matrices

    @classmethod
    def unfit(cls, dense: nn.Module) -> str:
        if getattr(dense, "_is_expert_parallel", False):
            return "expert-parallel: a worker has only some of the experts; factorize before they are split"
        if any(isinstance(p, DTensor) for p in dense.parameters()):
            return "its experts are split over workers (DTensor); factorize before they are split"
        return ""

    @classmethod
    def positions(cls, matrix: Matrix, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> int:
        index: Tensor = [*args, *kwargs.values()][1]
        return index.numel()

    @classmethod
    def grad_positions(
        cls, matrix: Matrix, dense: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> int:
        # Only the first product reads the input; the others read what trainable weights have computed.
        first = matrix.weight == cls.matrices(dense)[0].weight
        before = [p for name, p in dense.named_parameters() if name not in (matrix.weight, matrix.bias)]
        source = (args, kwargs) if first else (args, kwargs, before)
        return cls.positions(matrix, args, kwargs, output) if any_requires_grad(source) else 0

    def forward(self, tokens: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        routing = Routing(index, self.experts)
        rows = routing.to_tokens(self.compute(routing.to_experts(tokens), routing.ends))
        return (rows * weights.unsqueeze(-1)).sum(1).to(tokens.dtype)

    def compute(self, rows: Tensor, ends: Tensor) -> Tensor:
        """Apply the experts to rows that are sorted by expert; `ends` are the ends of their ranges."""
        if "gate_up_proj" in self._modules:
            first = self.gate_up_proj(rows, ends)
        elif self.has_gate:
            both = self.gate_proj(rows, ends), self.up_proj(rows, ends)
            first = torch.cat(both, -1) if self.is_concatenated else torch.stack(both, -1).flatten(-2)
        else:
            first = self.up_proj(rows, ends)
        output: Tensor = self.down_proj(self._activate(first), ends)
        return cast(Tensor, self.post_expert_norm(output)) if self.has_post_expert_norm else output

    def _activate(self, first: Tensor) -> Tensor:
        if not self.has_gate:
            return cast(Tensor, self.act_fn(first))
        if apply_gate := getattr(type(self._dense[0]), "_apply_gate", None):
            return cast(Tensor, apply_gate(self, first))
        gate, up = first.chunk(2, -1)
        return cast(Tensor, self.act_fn(gate) * up)


class LowRankSortedExperts(LowRankExperts):
    """Low-rank experts that are called with rows sorted by expert, equally many for each: `experts(rows)`."""

    is_transposed = True

    @classmethod
    def positions(cls, matrix: Matrix, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> int:
        rows: Tensor = [*args, *kwargs.values()][0]
        return rows.numel() // rows.shape[-1]

    def forward(self, rows: Tensor) -> Tensor:  # type: ignore[override]
        rows = rows.flatten(0, -2)
        ends = torch.arange(1, self.experts + 1, device=rows.device) * (len(rows) // self.experts)
        return self.compute(rows, ends)


def _smaller_together(both: Matrix) -> bool:
    """Whether gate and up as one matrix have fewer weights than two of the same share of the full rank."""
    half = both.m // 2
    return min(both.m, both.n) * (both.m + both.n) < 2 * min(half, both.n) * (half + both.n)


def _apart(both: Matrix, interleaved: bool) -> list[Matrix]:
    """The matrices of gate and up in the parameter that holds both."""
    half, dim = both.m // 2, 2 if both.transposed else 1
    shape = tuple(half if i == dim else size for i, size in enumerate(both.shape))
    first, step = (1, 2) if interleaved else (half, 1)
    return [
        dataclasses.replace(
            both, name=name, dense=f"{name}.weight", shape=shape, m=half,
            start=start, bias_start=start, dim=dim, step=step,
        )
        for name, start in (("gate_proj", 0), ("up_proj", first))
    ]  # fmt: skip


#: Experts modules of transformers, as folder.Class without "Experts". All of them have the parameters and the forward
#: that `LowRankExperts` describes. By name: transformers is not imported.
_TRANSFORMERS = """
afmoe.Afmoe aria.Aria axk1.AXK1 axk2.AXK2 bailing_hybrid.BailingHybrid beam.Beam cohere2_moe.Cohere2Moe
deepseek_ocr2.DeepseekOcr2Text deepseek_v2.DeepseekV2 deepseek_v3.DeepseekV3 deepseek_v32.DeepseekV32
deepseek_v4.DeepseekV4 diffusion_gemma.DiffusionGemmaText dots1.Dots1 ernie4_5_moe.Ernie4_5_Moe
ernie4_5_vl_moe.Ernie4_5_VLMoeMoe exaone_moe.ExaoneMoe flex_olmo.FlexOlmo flint.Flint gemma4.Gemma4Text
glm4_moe.Glm4Moe glm4_moe_lite.Glm4MoeLite glm4v_moe.Glm4vMoeText glm5_next.Glm5NextText
glm_moe_dsa.GlmMoeDsa gpt_oss.GptOss granitemoe.GraniteMoe granitemoe_swa.GraniteMoeSWA
granitemoehybrid.GraniteMoeHybrid granitemoeshared.GraniteMoeShared hunyuan_v1_moe.HunYuanMoEV1 hy_v3.HYV3
hy_v4.HYV4 inkling.Inkling jamba.Jamba kimi_linear.KimiLinear kolibri1.Kolibri1 laguna.Laguna
lfm2_moe.Lfm2Moe mellum.Mellum mimo_v2_flash.MiMoV2Flash minimax.MiniMax minimax_m2.MiniMaxM2
minimax_m3_vl.MiniMaxM3VL mistral4.Mistral4 mistral_large4.MistralLarge4Text mixtral.Mixtral
muse_spark.MuseSpark nemotron_h.NemotronH olmoe.Olmoe openai_privacy_filter.OpenAIPrivacyFilter
phimoe.Phimoe qwen2_moe.Qwen2Moe qwen3_5_moe.Qwen3_5Moe qwen3_moe.Qwen3Moe qwen3_next.Qwen3Next
qwen3_omni_moe.Qwen3OmniMoeThinkerText qwen3_omni_moe.Qwen3OmniMoeTalkerText qwen3_vl_moe.Qwen3VLMoeText
qwen4_exp.Qwen4ExpText solar_open.SolarOpen unlimited_ocr.UnlimitedOcrText zaya.Zaya
"""
for entry in _TRANSFORMERS.split():
    folder, kind = entry.split(".")
    register(f"transformers.models.{folder}.modeling_{folder}.{kind}Experts", LowRankExperts)
register("transformers.models.llama4.modeling_llama4.Llama4TextExperts", LowRankSortedExperts)
