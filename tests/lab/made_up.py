"""Runs with made-up figures, as measure/run_log.py writes them."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

METHODS = {  # seconds a step, bytes a step, parameters, last accuracy
    "dense": (1.50, 67e6, 11_173_834, 0.938),
    "bf16": (1.25, 33.5e6, 11_173_834, 0.9382),
    "powersgd(4)": (0.92, 0.9e6, 11_173_834, 0.931),
    "topk(0.01)": (2.31, 2.7e6, 11_173_834, 0.925),
    "pufferfish": (0.59, 20e6, 3_336_138, 0.9318),
    "pufferfish+powersgd(4)": (0.46, 0.5e6, 3_336_138, 0.930),
}


def write_run(folder: Path, name: str, seed: int, *, epochs: int = 20, **changed: Any) -> Path:
    """A run as measure/run_log.py writes it, with made-up figures."""
    step, sent, parameters, accuracy = METHODS.get(name, METHODS["dense"])
    dense_step, dense_sent = METHODS["dense"][:2]
    wiggle = math.sin(7.0 * seed + len(name)) * 0.001
    low = "pufferfish" in name
    run = {
        "pufferfish_run": 1, "name": name, "seed": seed, "workers": 4, "hosts": 4,
        "settings": {"task": "cifar10", "method": name, "recipe": {"lr": 0.4, "epochs": epochs}},
        "versions": {"python": "3.11.7", "torch": "2.13.0", "pufferfish": "0.1", "commit": "0f3c2a9"},
        "hardware": {"cpu": "A processor with a name", "cores": 8, "threads": 2, "gpu": None, "host": "lab1"},
        "link": {"asked": "1gbit", "got_mbit": 941.2 + seed, "latency_ms": 0.2},
        "started": f"2026-05-0{seed + 1}T10:00:00+00:00", "finished": "2026-05-04T11:00:00+00:00",
        "results": {
            "accuracy": accuracy + wiggle, "seconds_a_step": step * (1 + 0.02 * seed), "bytes_a_step": sent,
            "parameters": parameters, "peak_memory": parameters * 24,
        },
        "predicted": {"seconds_a_step": step * {"topk(0.01)": 1.27}.get(name, 0.95 + 0.06 * seed)},
        "layers": some_layers() if low else [],
    } | changed  # fmt: skip
    rows: list[list[object]] = []
    seconds, total = 0.0, 0.0
    for epoch in range(epochs):
        warm = low and epoch < epochs // 3
        seconds += 10 * (dense_step if warm else step * (1 + 0.02 * seed))
        total += 10 * (dense_sent if warm else sent)
        value = (accuracy + wiggle) * (1 - 0.85 * math.exp(-epoch / 3)) - (
            0.01 if epoch == epochs // 3 and low else 0
        )
        end = 10 * (epoch + 1)
        rows.append([seconds, end, epoch, "valid/accuracy", value + math.sin(3 * epoch + seed) * 0.004])
        rows.append([seconds, end, epoch, "bytes", total])
        if low and epoch + 1 == epochs // 3:  # as switch.report.metrics has them
            sizes = {"before": METHODS["dense"][2], "after": parameters}
            rows += [[seconds, end, epoch, f"pufferfish/parameters_{when}", n] for when, n in sizes.items()]
        rows.append([seconds, end, epoch, "loss", 2 - 2 * value])
    folder.mkdir(parents=True)
    (folder / "run.json").write_text(json.dumps(run))
    lines = [["seconds", "step", "epoch", "name", "value"], *rows]
    (folder / "metrics.csv").write_text("".join(",".join(map(str, line)) + "\n" for line in lines))
    return folder


def some_layers() -> list[dict[str, Any]]:
    layers = []
    for n, width in enumerate([64] * 4 + [128] * 4 + [256] * 4 + [512] * 4):
        layers.append({
            "name": f"layer{n // 4 + 1}.{n // 2 % 2}.conv{n % 2 + 1}", "shape": [width, width, 3, 3], "full_rank": width,
            "rank": None if n < 2 else width // 4,
        })  # fmt: skip
    return layers
