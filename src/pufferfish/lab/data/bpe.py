"""Byte-pair encoding of words, learned from the training text: no word is unknown, and the text comes back as it was."""

from __future__ import annotations

import heapq
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from itertools import pairwise

PADDING, BEGIN, END, UNKNOWN = range(4)
_SPECIAL = ("<pad>", "<s>", "</s>", "�")
_WORD = re.compile(r" \w+| ?[^\w\s]+|\w+")

Pair = tuple[str, str]


class BPE:
    """Pieces of words as numbers. A word begins with its space, so that pieces joined are the text.

    >>> bpe = BPE.learn(["low lower lowest"] * 5, size=13)
    >>> bpe.pieces[4:]
    [' ', 'e', 'l', 'o', 'r', 's', 't', 'w', ' l']
    >>> bpe.decode(bpe.encode("lower slow!"))
    'lower slow�'
    """

    def __init__(self, letters: Iterable[str], merges: Sequence[Pair]) -> None:
        self.pieces = [*_SPECIAL, *sorted(letters), *(a + b for a, b in merges)]
        self._number = {piece: i for i, piece in enumerate(self.pieces)}
        self._rank = {pair: i for i, pair in enumerate(merges)}
        self._seen: dict[str, list[int]] = {}

    @classmethod
    def learn(cls, texts: Iterable[str], size: int) -> BPE:
        """The encoding with `size` pieces, or fewer if there are no more pairs: the most frequent pair is joined, again and again.

        Of equally frequent ones the first in the alphabet is, so that every machine learns the same.
        """
        counts = Counter(word for text in texts for word in _words(text))
        words = [list(word) for word in counts]
        times = list(counts.values())
        letters = {letter for word in counts for letter in word}
        pairs: Counter[Pair] = Counter()
        where: dict[Pair, set[int]] = defaultdict(set)
        for i, word in enumerate(words):
            for pair in pairwise(word):
                pairs[pair] += times[i]
                where[pair].add(i)
        heap = [(-n, pair) for pair, n in pairs.items()]
        heapq.heapify(heap)
        merges: list[Pair] = []
        while heap and len(_SPECIAL) + len(letters) + len(merges) < size:
            n, best = heapq.heappop(heap)
            if -n != pairs[best]:  # an old entry; the pair came in again when its count changed
                continue
            merges.append(best)
            changed: Counter[Pair] = Counter()
            for i in where.pop(best):
                for pair in pairwise(words[i]):
                    changed[pair] -= times[i]
                words[i] = _joined(words[i], best)
                for pair in pairwise(words[i]):
                    changed[pair] += times[i]
                    where[pair].add(i)
            for pair, by in changed.items():
                pairs[pair] += by
                if by and pairs[pair] > 0:
                    heapq.heappush(heap, (-pairs[pair], pair))
        return cls(letters, merges)

    def encode(self, text: str) -> list[int]:
        """Numbers of the pieces; letters that were not in the training text are `UNKNOWN`."""
        return [number for word in _words(text) for number in self._encoded(word)]

    def decode(self, numbers: Iterable[int]) -> str:
        """The text again; padding, begin and end are left out. A number without a piece is `UNKNOWN`."""
        known = (i if i < len(self.pieces) else UNKNOWN for i in numbers)
        return "".join(self.pieces[i] for i in known if i >= UNKNOWN).strip()

    def _encoded(self, word: str) -> list[int]:
        if word not in self._seen:
            parts = list(word)
            while len(parts) > 1:
                best = min(pairwise(parts), key=lambda pair: self._rank.get(pair, len(self._rank)))
                if best not in self._rank:
                    break
                parts = _joined(parts, best)
            self._seen[word] = [self._number.get(part, UNKNOWN) for part in parts]
        return self._seen[word]


def _words(text: str) -> list[str]:
    """Words with the space before them, and what stands between them."""
    return _WORD.findall(" " + text)


def _joined(parts: list[str], pair: Pair) -> list[str]:
    """`parts` with every `pair` made one, from the left."""
    done, i = [], 0
    while i < len(parts):
        both = parts[i] == pair[0] and parts[i + 1 : i + 2] == [pair[1]]
        done.append(pair[0] + pair[1] if both else parts[i])
        i += 2 if both else 1
    return done
