"""Recurrent networks: layouts, directions, states and packing."""
# mypy: no-warn-return-any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from .case import Case, Inputs, all_tensors, generator, tokens


class BiLSTMTagger(nn.Module):
    """Two-layer bidirectional LSTM, batch first, on packed sequences that are not sorted."""

    def __init__(self, vocab: int = 100, width: int = 64, tags: int = 12) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, width, padding_idx=0)
        self.lstm = nn.LSTM(width, width, 2, batch_first=True, bidirectional=True)
        self.out = nn.Linear(2 * width, tags)

    def forward(self, words: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(self.embed(words), lengths, batch_first=True, enforce_sorted=False)
        y, _ = pad_packed_sequence(self.lstm(packed)[0], batch_first=True, total_length=words.shape[1])
        return self.out(y)


def _sentences() -> Inputs:
    lengths = torch.tensor([5, 11, 8])
    words = torch.randint(1, 100, (3, 12), generator=generator())
    return (words.masked_fill(torch.arange(12)[None] >= lengths[:, None], 0), lengths), {}


class GRUSeq2Seq(nn.Module):
    """Bidirectional GRU encoder; GRU decoder called step by step with its state, additive attention."""

    def __init__(self, vocab: int = 80, width: int = 64) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.encoder = nn.GRU(width, width, batch_first=True, bidirectional=True)
        self.bridge = nn.Linear(2 * width, width)
        self.query, self.key = nn.Linear(width, width), nn.Linear(2 * width, width, bias=False)
        self.score = nn.Linear(width, 1, bias=False)
        self.decoder = nn.GRU(3 * width, width, batch_first=True)
        self.out = nn.Linear(width, vocab)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        memory, state = self.encoder(self.embed(source))
        hidden = self.bridge(torch.cat([state[0], state[1]], -1)).tanh()[None]
        keys = self.key(memory)
        logits = []
        for word in self.embed(target).unbind(1):
            weights = self.score((self.query(hidden[0])[:, None] + keys).tanh()).softmax(1)
            step = torch.cat([word, (weights * memory).sum(1)], -1)
            y, hidden = self.decoder(step[:, None], hidden)
            logits.append(self.out(y[:, 0]))
        return torch.stack(logits, 1)


class TiedLSTM(nn.Module):
    """AWD-like language model: the output layer shares the embedding's Parameter; state in, state out."""

    def __init__(self, vocab: int = 128, width: int = 64) -> None:
        super().__init__()
        self.encoder = nn.Embedding(vocab, width)
        self.rnn = nn.LSTM(width, width, 2)
        self.decoder = nn.Linear(width, vocab)
        self.decoder.weight = self.encoder.weight

    def forward(
        self, words: Tensor, state: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        y, state = self.rnn(self.encoder(words), state)
        return self.decoder(y), state


def _words_and_state() -> Inputs:
    g = generator()
    h, c = 0.1 * torch.randn(2, 2, 3, 64, generator=g)
    return (torch.randint(128, (10, 3), generator=g),), {"state": (h, c)}


class CharRNN(nn.Module):
    """Elman tanh network on one unbatched stream of one-hot characters, returning its state too."""

    def __init__(self, vocab: int = 64, width: int = 96) -> None:
        super().__init__()
        self.vocab = vocab
        self.rnn = nn.RNN(vocab, width, 3, nonlinearity="tanh", dropout=0.0)
        self.out = nn.Linear(width, vocab)

    def forward(self, chars: Tensor) -> tuple[Tensor, Tensor]:
        y, state = self.rnn(F.one_hot(chars, self.vocab).float())
        return self.out(y), state


CASES = {
    "bilstm_tagger": Case(build=BiLSTMTagger, inputs=_sentences),
    "gru_seq2seq": Case(build=GRUSeq2Seq, inputs=tokens(80, (3, 9), (3, 6))),
    "lstm_tied": Case(build=TiedLSTM, inputs=_words_and_state, output=all_tensors),
    "char_rnn": Case(build=CharRNN, inputs=tokens(64, (20,))),
}
