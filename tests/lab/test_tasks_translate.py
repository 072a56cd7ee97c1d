"""Translation: byte-pair encoding and beam search, each against a simple reference."""

from __future__ import annotations

import random
import sys
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest
import tiny
import torch
from torch import Tensor, nn

from pufferfish.lab.data.text import BPE, UNKNOWN
from pufferfish.lab.tasks.multi30k import beam_search, bleu

BEGIN, END = 1, 2


def slow_merges(words: list[str], n: int) -> list[str]:
    """Count all pairs, join the first of the most frequent everywhere; from the start for each."""
    parts, made = [list(word) for word in words], []
    for _ in range(n):
        pairs = Counter(pair for word in parts for pair in pairwise(word))
        if not pairs:
            break
        best = min(pairs, key=lambda pair: (-pairs[pair], pair))
        made.append("".join(best))
        for word in parts:
            i = 0
            while i < len(word) - 1:
                if (word[i], word[i + 1]) == best:
                    word[i : i + 2] = ["".join(best)]
                i += 1
    return made


def test_bpe_joins_the_most_frequent_pair() -> None:
    pick = random.Random(0)
    for _ in range(5):
        words = ["".join(pick.choices("abc", k=pick.randint(1, 7))) for _ in range(40)]
        bpe = BPE.learn([" ".join(words[:20]), " ".join(words[20:])], size=40)
        letters = sorted(set("".join(words)) | {" "})
        assert bpe.pieces[4:] == letters + slow_merges([" " + word for word in words], 40 - 4 - len(letters))


def test_bpe_gives_the_text_back() -> None:
    lines = ["Zwei junge weiße Männer, im Freien.", "a dog's toy: 3,5 (red)!", "Hmm... what?!"]
    bpe = BPE.learn(lines, size=70)
    for line in lines:
        assert bpe.decode([1, *bpe.encode(line), 2, 0, 0]) == line
        assert bpe.encode(line) == bpe.encode(line)
    assert UNKNOWN in bpe.encode("жar")
    assert len(BPE.learn(["ab"], size=1000).pieces) == 4 + 3 + 2  # no more pairs to join


class Chance:
    """A translator whose next token hangs on the source, the time and the token before, each by its own dice."""

    def __init__(self) -> None:
        self.table = 2 * torch.randn(50, 20, 9, 9, generator=torch.Generator().manual_seed(0))

    def encode(self, source: Tensor) -> Tensor:
        return source.sum(1)

    def decode(self, target: Tensor, memory: Tensor, source: Tensor) -> Tensor:
        return self.table[memory[:, None], torch.arange(target.shape[1]), target]

    def next(self, source: Tensor, words: list[int]) -> Tensor:
        return self.decode(torch.tensor([words]), self.encode(source[None]), source[None])[0, -1]


def sources() -> Tensor:
    return torch.randint(3, 9, (12, 6), generator=torch.Generator().manual_seed(0))


def translated(row: Tensor) -> list[int]:
    """Without what stands behind the end."""
    words = row.tolist()
    return words[: words.index(END) + 1] if END in words else words


def slow_beam(net: Chance, source: Tensor, width: int, max_length: int, alpha: float) -> list[int]:
    """One sentence, lists of (words, log-likelihood)."""

    def value(beam: tuple[list[int], float]) -> float:
        return beam[1] / ((5 + len(beam[0]) - 1) / 6) ** alpha

    beams = [([BEGIN], 0.0)]
    for _ in range(max_length):
        grown = []
        for words, score in beams:
            if words[-1] == END:
                grown.append((words, score))
                continue
            logs = net.next(source, words).log_softmax(-1)
            grown += [([*words, i], score + float(log)) for i, log in enumerate(logs)]
        beams = sorted(grown, key=value, reverse=True)[:width]
    return beams[0][0]


@pytest.mark.parametrize(("width", "alpha"), [(1, 0.7), (2, 0.7), (3, 0.0), (5, 1.0)])
def test_a_beam_is_the_slow_one(width: int, alpha: float) -> None:
    net, source = Chance(), sources()
    found = beam_search(net, source, width=width, max_length=8, begin=BEGIN, end=END, alpha=alpha)
    greedy = beam_search(net, source, width=1, max_length=8, begin=BEGIN, end=END)
    for row, target in zip(source, found, strict=True):
        assert translated(target) == slow_beam(net, row, width, 8, alpha)
    assert ([translated(x) for x in found] == [translated(x) for x in greedy]) == (width == 1)


def test_without_sacrebleu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny.TINY["multi30k"].write(tmp_path)
    monkeypatch.setitem(sys.modules, "sacrebleu", None)
    with pytest.raises(ImportError, match="pip install sacrebleu"):
        tiny.TINY["multi30k"].task.load(tmp_path)


def test_translations_of_a_task(tmp_path: Path) -> None:
    small = tiny.TINY["multi30k"]
    small.write(tmp_path)
    data = small.task.load(tmp_path)
    net = small.model()
    translations = small.task.translate(net, data, "test", batch=3)  # type: ignore[attr-defined]
    assert translations == small.task.translate(net, data, "test", batch=7)  # type: ignore[attr-defined]
    assert len(translations) == 7
    assert small.task.evaluate(net, data, "test", batch=4)["bleu"] == bleu(translations, data.targets["test"])

    class Knows(nn.Module):
        """Says what is right."""

        def encode(self, source: Tensor) -> Tensor:
            return source

        def decode(self, target: Tensor, memory: Tensor, source: Tensor) -> Tensor:
            sources, targets = data.rows.on("test", "cpu")
            logits = torch.zeros(*target.shape, 60)
            for i, row in enumerate(source):
                match = (sources[:, : len(row)] == row).all(1).nonzero()[0, 0]
                wanted = torch.cat((targets[match, 1:], torch.zeros(200, dtype=torch.long)))
                logits[i, -1, wanted[target.shape[1] - 1]] = 50.0
            return logits

    assert small.task.translate(Knows(), data, "test") == list(data.targets["test"])  # type: ignore[attr-defined]
