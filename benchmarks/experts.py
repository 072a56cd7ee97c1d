"""Time of one training step of a mixture-of-experts block, dense and low-rank, on a GPU in bf16.

The dense block is that of transformers (Mixtral's), with its grouped products. Both are timed in turn.

    python benchmarks/experts.py [--tokens 16384] [--rank 0.25]
"""

import argparse
import copy
import statistics
from collections.abc import Callable

import torch
from torch import nn

import pufferfish as pf


def block(d: int, inner: int, experts: int, k: int) -> nn.Module:
    """A sparse block with random weights, on the GPU in bf16."""
    from transformers import MixtralConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

    config = MixtralConfig(
        hidden_size=d, intermediate_size=inner, num_local_experts=experts, num_experts_per_tok=k
    )
    config._experts_implementation = "grouped_mm"
    torch.manual_seed(0)
    made: nn.Module = MixtralSparseMoeBlock(config).to("cuda", torch.bfloat16)
    for p in made.parameters():
        nn.init.normal_(p, std=0.02)
    return made


def with_our_routing(dense: nn.Module) -> nn.Module:
    """A dense block that sorts tokens as the low-rank one does, so that the difference is low rank alone."""
    copied = copy.deepcopy(dense)
    experts = pf.layers.LowRankExperts(copied.experts, {}).to_empty(device="cuda")
    for p in experts.parameters():
        nn.init.normal_(p, std=0.02)
    copied.experts = experts
    return copied


def step(model: nn.Module, tokens: torch.Tensor, gradient: torch.Tensor) -> Callable[[], None]:
    """Forward, backward and a fused AdamW update."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def run() -> None:
        model(tokens).backward(gradient)
        optimizer.step()
        optimizer.zero_grad()

    return run


def milliseconds(run: Callable[[], None], repeat: int) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(repeat):
        run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / repeat


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--tokens", type=int, default=16384)
    add("--width", type=int, default=2048)
    add("--inner", type=int, default=4096)
    add("--experts", type=int, default=8)
    add("--k", type=int, default=2, help="experts of each token")
    add("--rank", type=float, default=0.25)
    add("--rounds", type=int, default=9)
    o = parser.parse_args()
    tokens = torch.randn(1, o.tokens, o.width, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    gradient = torch.randn_like(tokens)
    dense, low_rank = (block(o.width, o.inner, o.experts, o.k) for _ in range(2))
    plan = pf.plan(low_rank, rank=o.rank, example=tokens, measure=False)
    low_rank = nn.Sequential(low_rank)
    pf.factorize_(low_rank, pf.plan(low_rank, rank=o.rank))
    models = {"dense": dense, "dense, our routing": with_our_routing(dense), "low-rank": low_rank}
    runs = {name: step(model, tokens, gradient) for name, model in models.items()}
    for run in runs.values():
        milliseconds(run, 5)  # warm up
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(o.rounds):
        for name, run in runs.items():
            times[name].append(milliseconds(run, 10))
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, bf16, {o.tokens:,} tokens, "
          f"{o.experts} experts, top-{o.k}, {o.width} → {o.inner}, rank {o.rank:g} of full")  # fmt: skip
    for name, values in times.items():
        ratio = statistics.median(a / b for a, b in zip(times["dense"], values, strict=True))
        spread = f"({min(values):.2f} to {max(values):.2f})"
        print(f"{name:<20}{statistics.median(values):8.2f} ms  {spread:<18}{ratio:.2f}× as fast")
    before, after = plan.before, plan.after
    macs = (before.forward_macs + before.backward_macs) / (after.forward_macs + after.backward_macs)
    print(f"{macs:.2f}× fewer MACs, {before.parameters / after.parameters:.2f}× fewer parameters")


if __name__ == "__main__":
    main()
