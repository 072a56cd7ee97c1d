"""`BPE`: byte-pair encoding learned from the training text. Encoding is lossless except for unseen characters."""

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
    """Byte-pair encoding: the characters of the training text, and pairs of pieces to merge, in order.

    A word includes the space before it, so the concatenated pieces are the text.

    >>> bpe = BPE.learn(["low lower lowest"] * 5, size=13)
    >>> bpe.pieces[4:]
    [' ', 'e', 'l', 'o', 'r', 's', 't', 'w', ' l']
    >>> bpe.decode(bpe.encode("lower slow!"))
    'lower slow�'
    """

    def __init__(self, letters: Iterable[str], merges: Sequence[Pair]) -> None:
        self.pieces = [*_SPECIAL, *sorted(letters), *(a + b for a, b in merges)]
        self._ids = {piece: i for i, piece in enumerate(self.pieces)}
        self._priority = {pair: i for i, pair in enumerate(merges)}
        self._cache: dict[str, list[int]] = {}

    @classmethod
    def learn(cls, texts: Iterable[str], size: int) -> BPE:
        """Learn an encoding with `size` pieces, or fewer if no pairs are left, by merging the most frequent pair repeatedly.

        Ties are broken alphabetically, so that the result is the same on every machine.
        """
        counts = Counter(word for text in texts for word in _words(text))
        words = [list(word) for word in counts]
        frequencies = list(counts.values())
        letters = {letter for word in counts for letter in word}
        pairs: Counter[Pair] = Counter()
        occurrences: dict[Pair, set[int]] = defaultdict(set)
        for i, word in enumerate(words):
            for pair in pairwise(word):
                pairs[pair] += frequencies[i]
                occurrences[pair].add(i)
        heap = [(-n, pair) for pair, n in pairs.items()]
        heapq.heapify(heap)
        merges: list[Pair] = []
        while heap and len(_SPECIAL) + len(letters) + len(merges) < size:
            n, best = heapq.heappop(heap)
            if -n != pairs[best]:  # stale: the pair was pushed again when its count changed
                continue
            merges.append(best)
            changed: Counter[Pair] = Counter()
            for i in occurrences.pop(best):
                for pair in pairwise(words[i]):
                    changed[pair] -= frequencies[i]
                words[i] = _merge(words[i], best)
                for pair in pairwise(words[i]):
                    changed[pair] += frequencies[i]
                    occurrences[pair].add(i)
            for pair, change in changed.items():
                pairs[pair] += change
                if change and pairs[pair] > 0:
                    heapq.heappush(heap, (-pairs[pair], pair))
        return cls(letters, merges)

    def encode(self, text: str) -> list[int]:
        """Piece ids of a text; characters that are not in the training text become `UNKNOWN`."""
        return [i for word in _words(text) for i in self._encode_word(word)]

    def decode(self, ids: Iterable[int]) -> str:
        """Text of piece ids, without padding, begin and end. Ids out of range become `UNKNOWN`."""
        known = (i if i < len(self.pieces) else UNKNOWN for i in ids)
        return "".join(self.pieces[i] for i in known if i >= UNKNOWN).strip()

    def _encode_word(self, word: str) -> list[int]:
        if word not in self._cache:
            parts = list(word)
            while len(parts) > 1:
                best = min(pairwise(parts), key=lambda pair: self._priority.get(pair, len(self._priority)))
                if best not in self._priority:
                    break
                parts = _merge(parts, best)
            self._cache[word] = [self._ids.get(part, UNKNOWN) for part in parts]
        return self._cache[word]


def _words(text: str) -> list[str]:
    """Words and punctuation, each with the space before it."""
    return _WORD.findall(" " + text)


def _merge(parts: list[str], pair: Pair) -> list[str]:
    """Replace every occurrence of `pair` by its concatenation, from left to right."""
    merged, i = [], 0
    while i < len(parts):
        both = parts[i] == pair[0] and parts[i + 1 : i + 2] == [pair[1]]
        merged.append(pair[0] + pair[1] if both else parts[i])
        i += 2 if both else 1
    return merged
