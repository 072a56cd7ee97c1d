"""LightningModule with a switch, added as a callback. Run it again to resume."""

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn

import pufferfish as pf
from pufferfish.integrations.lightning import SwitchCallback


class Net(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 4)
        )

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self.layers(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def main(folder: str = "run", epochs: int = 6) -> None:
    data = [(torch.randn(64), i % 4) for i in range(256)]  # your data here
    switch = pf.Switch(rank=0.25, when=pf.AtEpoch(2))
    saves = ModelCheckpoint(folder, save_last=True)
    trainer = pl.Trainer(max_epochs=epochs, callbacks=[SwitchCallback(switch), saves], logger=False)
    trainer.fit(
        Net(), torch.utils.data.DataLoader(data, 32, shuffle=True), ckpt_path="last", weights_only=True
    )
    print(switch.report)
    pf.merge_(trainer.lightning_module)  # back to a dense model


if __name__ == "__main__":
    main()
