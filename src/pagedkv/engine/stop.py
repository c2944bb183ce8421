"""What a sequence says, and when it has said enough.

``Voice`` turns the tokens of one sequence into final text: nothing in it is ever taken back, because whatever could
still become part of a stop string is held until it cannot. It ends a sequence for the ends that lie in the output
itself (EOS, stop ids, stop strings); lengths and aborts are the engine's.

``StopStrings`` is the automaton of Aho and Corasick ("Efficient string matching", 1975): amortised O(1) a character
whatever the number of strings, and its state knows how many characters must be held.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from pagedkv.engine.detokenize import IncrementalDetokenizer, TokenBytes
from pagedkv.engine.outputs import FinishReason
from pagedkv.engine.params import SamplingParams


class Finish(NamedTuple):
    """Why a sequence ended; ``stop_reason`` is the stop string or stop id, None for EOS and lengths."""

    reason: FinishReason
    stop_reason: int | str | None = None


class StopStrings:
    """States are prefixes of the strings, 0 the empty one.

    match[state]: the longest string that ends here, or None
    held[state]:  characters at the end of the text that a string could still begin with
    """

    def __init__(self, strings: Sequence[str]) -> None:
        self._next: list[dict[str, int]] = [{}]
        self._fallback = [0]
        self.match: list[str | None] = [None]
        self.held = [0]
        for string in strings:
            self._insert(string)
        self._link()

    def step(self, state: int, char: str) -> int:
        """The longest prefix of a string that the text ends with after ``char``."""
        following = self._next
        while char not in following[state] and state:
            state = self._fallback[state]
        return following[state].get(char, 0)

    def _insert(self, string: str) -> None:
        state = 0
        for depth, char in enumerate(string, start=1):
            if char not in self._next[state]:
                self._next[state][char] = len(self._next)
                self._next.append({})
                self._fallback.append(0)
                self.match.append(None)
                self.held.append(depth)
            state = self._next[state][char]
        self.match[state] = string

    def _link(self) -> None:
        """Shorter prefixes first, so that what a state falls back to is complete."""
        queue = deque(self._next[0].values())
        while queue:
            state = queue.popleft()
            back = self._fallback[state]
            self.match[state] = self.match[state] or self.match[back]
            if not self._next[state]:  # nothing begins with all of it
                self.held[state] = self.held[back]
            for char, child in self._next[state].items():
                self._fallback[child] = self.step(back, char)
                queue.append(child)


class Voice:
    """The text of one sequence and its end.

    tokenizer: None where there is no text (an engine without a tokenizer): then only ids end a sequence
    eos_ids:   every id that ends a text of this model; ``ignore_eos`` turns them all off
    """

    def __init__(self, tokenizer: TokenBytes | None, params: SamplingParams, *, eos_ids: Sequence[int] = ()) -> None:
        self._characters = (
            None
            if tokenizer is None
            else IncrementalDetokenizer(tokenizer, skip_special_tokens=params.skip_special_tokens)
        )
        self._eos_ids = frozenset(() if params.ignore_eos else eos_ids)
        self._stop_ids = frozenset(params.stop_token_ids or ())
        self._stops = StopStrings(params.stop_strings) if params.stop_strings else None
        self._include = params.include_stop_str_in_output
        self._min_tokens = params.min_tokens
        self._num_tokens = 0
        self._state = 0
        self._held = ""
        self.text = ""

    def push(self, token_id: int) -> Finish | None:
        """Take the next token; call once for each, in order, until it returns an end.

        An EOS or stop id is no part of the text (with ``include_stop_str_in_output``: it is, unless it is special and
        special tokens are skipped). A stop string counts if its last character comes after ``min_tokens`` tokens; of
        several, the one that is complete first, and of those that end together the longest.
        """
        self._num_tokens += 1
        may_end = self._num_tokens > self._min_tokens
        if may_end and (token_id in self._eos_ids or token_id in self._stop_ids):
            if self._include:
                self._say(token_id, may_end=False)
            self.close()
            return Finish("stop", None if token_id in self._eos_ids else token_id)
        return self._say(token_id, may_end=may_end)

    def close(self) -> None:
        """No more will come: what was held for a stop string is text after all. An incomplete character is not."""
        self.text += self._held
        self._held = ""

    def _say(self, token_id: int, *, may_end: bool) -> Finish | None:
        if self._characters is None:
            return None
        piece = self._characters.push(token_id)
        if self._stops is None:
            self.text += piece
            return None
        stops, state = self._stops, self._state
        unsaid = self._held + piece
        for end, char in enumerate(piece, start=len(self._held) + 1):
            state = stops.step(state, char)
            stop = stops.match[state]
            if stop is not None and may_end:
                self.text += unsaid[: end if self._include else end - len(stop)]
                self._held = ""
                return Finish("stop", stop)
        self._state = state
        final = len(unsaid) - stops.held[state]
        self.text, self._held = self.text + unsaid[:final], unsaid[final:]
        return None
