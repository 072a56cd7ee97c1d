"""Seconds and bytes a step of a model sharded by FSDP2 over slow links: plain, and compressed.

    pip install transformers
    python benchmarks/sharded.py [STUDY ...]             # time what is missing, on a machine that does nothing else
    python benchmarks/sharded.py [STUDY ...] --show

sharded-LINK      A Llama of 23.6 M parameters on 4 hosts, AdamW at 1e-5, one row of 64 tokens each.
sharded-loopback  The same without a network between the workers.

Every host is a network namespace with one single-threaded worker; links are shaped both ways and measured first. A run is
one arm in one round: three updates, then 5 that are timed. "sent" is what the interface of worker 0 has sent in an
update, `wire_bytes` what the meter has counted; the baseline keeps parameters after the forward pass, with bf16 both ways.
`peak_bytes` is the memory of worker 0, with Python and all libraries. Needs root, or user namespaces.
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import pufferfish as pf
from pufferfish.compression import BFloat16, BlockInt8, Changed, Int4, Method
from pufferfish.lab.harness import Job, Row, Study, main
from pufferfish.lab.network import Network
from pufferfish.lab.network.hosts import Hosts
from pufferfish.lab.train.record import peak_memory

WARM_UP, STEPS, RATE = 3, 5, 1e-5
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
FP32 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


@dataclass(frozen=True)
class Arm:
    """How the model is sharded, and the methods for its gradients and parameters; None: plain FSDP2."""

    methods: tuple[Method, Method | Changed] | None = None
    reshard: bool = True  # parameters after the forward pass
    policy: MixedPrecisionPolicy = BF16


ARMS = {
    "FSDP2, kept, bf16": Arm(reshard=False),
    "FSDP2, default": Arm(policy=FP32),
    "changed, bf16": Arm((BFloat16(), Changed())),
    "changed, int8": Arm((BlockInt8(), Changed())),
    "changed, int8, kept": Arm((BlockInt8(), Changed()), reshard=False),
    "changed, 4 bits": Arm((Int4(), Changed())),
    "changed, 4 bits, kept": Arm((Int4(), Changed()), reshard=False),
    "int8, int8, kept": Arm((BlockInt8(), BlockInt8()), reshard=False),
}


def run(job: Job) -> Row:
    """Time one arm once."""
    out = job.folder / "times.json"
    link = job.settings["link"]
    with (
        Hosts(job.settings["hosts"]) if link == "loopback" else Network(job.settings["hosts"], link) as hosts
    ):
        mbit = {} if link == "loopback" else {"mbit": round(hosts.measure().got_mbit, 1)}
        if code := hosts.launch([__file__, "--worker", job.arm, str(out)], env={"OMP_NUM_THREADS": "1"}):
            raise RuntimeError(f"the workers failed with exit code {code}")
    times = json.loads(out.read_text())
    return {"validation": times["step"], "test": times["step"]} | mbit | times


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=4096, hidden_size=512, intermediate_size=1408, num_hidden_layers=6, num_attention_heads=8,
            num_key_value_heads=8, max_position_embeddings=256,
        )
    )  # fmt: skip


def work(arm_name: str, out: str) -> None:
    """One of the workers."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    arm, model = ARMS[arm_name], llama()
    for module in (*model.model.layers, model):
        fully_shard(module, reshard_after_forward=arm.reshard, mp_policy=arm.policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    hook = None
    if arm.methods:
        hook = pf.compress(model, arm.methods[0], parameters=arm.methods[1], optimizer=optimizer)

    def update(number: int) -> None:
        generator = torch.Generator().manual_seed(100 * number + dist.get_rank())
        tokens = torch.randint(4096, (1, 64), generator=generator)
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    for number in range(WARM_UP):
        update(number)
    if hook is not None:
        hook.meter.reset()
    dist.barrier()
    began, sent = time.perf_counter(), sent_bytes()
    for number in range(WARM_UP, WARM_UP + STEPS):
        update(number)
    dist.barrier()
    found = {"step": (time.perf_counter() - began) / STEPS, "sent": (sent_bytes() - sent) / STEPS}
    if dist.get_rank() == 0:
        found |= {"peak_bytes": peak_memory(torch.device("cpu"))}
        found |= {"parameters": sum(p.numel() for p in model.parameters())}
        if hook is not None:
            found |= {"wire_bytes": hook.meter.wire_bytes / STEPS} | hook.meter.seconds
        Path(out).write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def sent_bytes() -> int:
    """Bytes that the interfaces of this network namespace have sent, the loopback too."""
    lines = Path("/proc/net/dev").read_text().splitlines()[2:]
    return sum(int(line.split(":")[1].split()[8]) for line in lines)


def study(link: str, hosts: int = 4) -> Study:
    return Study(
        name=f"sharded-{link}", run=run, arms=dict.fromkeys(ARMS, (RATE,)), baseline=next(iter(ARMS)), score="s a step",
        higher=False, digits=3, columns={"sent": ",.0f", "peak_bytes": ",.0f"},
        settings={"link": link, "hosts": hosts, "steps": STEPS},
    )  # fmt: skip


STUDIES = [study("100mbit"), study("1gbit"), study("loopback")]

if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        work(*sys.argv[2:])
    else:
        os.environ["TRANSFORMERS_VERBOSITY"] = "error"
        main(STUDIES, __doc__, processes=1)
