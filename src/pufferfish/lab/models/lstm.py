"""`LSTMLanguageModel`: word-level LSTM with a tied embedding."""

from torch import Tensor, nn

from .scaled import scaled

State = tuple[Tensor, Tensor]


class LSTMLanguageModel(nn.Module):
    """Embedding, stacked LSTM, and a decoder tied to the embedding.

    Args:
        width: factor on `d`, for a narrower model.
    """

    def __init__(
        self,
        *,
        vocabulary: int = 33_278,
        d: int = 1500,
        layers: int = 2,
        dropout: float = 0.65,
        width: float = 1.0,
    ) -> None:
        super().__init__()
        d = scaled(d, width)
        self.dropout = nn.Dropout(dropout)
        self.embedding = nn.Embedding(vocabulary, d)
        self.lstm = nn.LSTM(d, d, layers, dropout=dropout)
        self.decoder = nn.Linear(d, vocabulary)
        self.decoder.weight = self.embedding.weight
        nn.init.uniform_(self.embedding.weight, -0.1, 0.1)
        nn.init.zeros_(self.decoder.bias)

    def forward(self, tokens: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        """Logits (time, batch, vocabulary) of tokens (time, batch), and the final state."""
        x, state = self.lstm(self.dropout(self.embedding(tokens)), state)
        return self.decoder(self.dropout(x)), state
