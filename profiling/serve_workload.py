"""What the serving benchmark asks: chats that come back with their history, and shared documents.

Everybody's chat begins with one system prompt. A turn adds a question to what was said before, the
engine's own answers included; a document is asked about once a wave, each time by somebody else. A
wave has one turn of every chat and one question to every document, in an order of its own, so that
between two turns of a chat all others come. Tokens are random, lengths too; both hang on the seed
alone, and so are the same for every side.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

BLOCK_TOKENS: Final = 32
_LOWEST_TOKEN: Final = 100
_HIGHEST_TOKEN: Final = 10_000
"""Below are special tokens, above are those that a small model has never learnt."""


@dataclass(frozen=True, slots=True)
class Workload:
    """One round: ``turns`` waves over ``chats`` and ``documents``. Lengths are in tokens; a
    question is half to one and a half times ``question_tokens`` long. ``clients`` ask at the same
    time, each its next question as soon as it has an answer.

    Raises ValueError, with the option's name, what was given and what is allowed.
    """

    chats: int
    turns: int
    documents: int
    clients: int
    system_tokens: int
    document_tokens: int
    question_tokens: int
    answer_tokens: int

    def __post_init__(self) -> None:
        allowed = {"turns": 2, "documents": 0, "question_tokens": 2}
        for name in self.__slots__:
            given, least = getattr(self, name), allowed.get(name, 1)
            if isinstance(given, bool) or not isinstance(given, int) or given < least:
                option = name.replace("_", "-")
                raise ValueError(f"--{option} {given!r}; allowed: {least} or more")
        if self.clients > self.chats + self.documents:
            raise ValueError(
                f"--clients {self.clients}; allowed: at most chats and documents together, "
                f"{self.chats + self.documents}"
            )

    @property
    def longest_question_tokens(self) -> int:
        return self.question_tokens + self.question_tokens // 2

    @property
    def longest_tokens(self) -> int:
        """No request is longer, its answer included."""
        turn = self.longest_question_tokens + self.answer_tokens
        return max(self.system_tokens + self.turns * turn, self.document_tokens + turn)

    @property
    def context_tokens(self) -> int:
        """About how many different tokens' KV one round makes."""
        turn = self.question_tokens + self.answer_tokens
        chats = self.system_tokens + self.chats * self.turns * turn
        return chats + self.documents * (self.document_tokens + self.turns * turn)

    @property
    def num_gpu_blocks(self) -> int:
        """A pool for what the clients ask at once and no more, so that it evicts what will return.

        One block is vLLM's own null block; the others are room for a request that ends."""
        return self.clients * -(-self.longest_tokens // BLOCK_TOKENS) + 2

    @property
    def num_requests(self) -> int:
        return self.turns * (self.chats + self.documents)


QUICK: Final = Workload(
    chats=8,
    turns=3,
    documents=2,
    clients=2,
    system_tokens=96,
    document_tokens=512,
    question_tokens=96,
    answer_tokens=8,
)
FULL: Final = Workload(
    chats=12,
    turns=4,
    documents=4,
    clients=3,
    system_tokens=128,
    document_tokens=768,
    question_tokens=96,
    answer_tokens=16,
)


@dataclass(frozen=True, slots=True)
class Turn:
    """One request: ``question`` after the history of its ``thread``, which starts with ``opening``.

    ``is_return``: the prompt's beginning was asked before, beyond the system prompt.
    """

    thread: str
    opening: tuple[int, ...]
    question: tuple[int, ...]
    is_return: bool


Waves = Sequence[Sequence[Turn]]


def waves_of(workload: Workload, seed: int, vocabulary: int) -> Waves:
    """The waves of one round; the same for the same arguments."""
    rng = random.Random(seed)
    highest = min(vocabulary, _HIGHEST_TOKEN)
    lowest = min(_LOWEST_TOKEN, highest // 2)

    def some(num_tokens: int) -> tuple[int, ...]:
        return tuple(rng.randrange(lowest, highest) for _ in range(num_tokens))

    def question() -> tuple[int, ...]:
        half = workload.question_tokens // 2
        return some(rng.randint(workload.question_tokens - half, workload.question_tokens + half))

    system = some(workload.system_tokens)
    documents = [some(workload.document_tokens) for _ in range(workload.documents)]
    waves = []
    for number in range(workload.turns):
        wave = [
            Turn(f"chat {chat}", system, question(), number > 0) for chat in range(workload.chats)
        ]
        wave += [
            Turn(f"document {place}, reader {number}", document, question(), number > 0)
            for place, document in enumerate(documents)
        ]
        rng.shuffle(wave)
        waves.append(wave)
    return waves


def warm_up_of(workload: Workload, seed: int, vocabulary: int) -> list[list[int]]:
    """Prompts of the lengths of a round, a first turn's and the longest; nobody asks them again."""
    rng = random.Random(f"warm up {seed}")
    highest = min(vocabulary, _HIGHEST_TOKEN)
    longest = workload.longest_tokens - workload.answer_tokens
    lengths = [workload.system_tokens + workload.question_tokens, longest] * workload.clients
    return [
        [rng.randrange(min(_LOWEST_TOKEN, highest // 2), highest) for _ in range(length)]
        for length in lengths[: workload.clients + 1]
    ]


class Histories:
    """What was said in each thread on one side."""

    def __init__(self) -> None:
        self._said: dict[str, list[int]] = {}

    def prompt(self, turn: Turn) -> list[int]:
        return [*self._said.get(turn.thread, turn.opening), *turn.question]

    def remember(self, turn: Turn, answer: Sequence[int]) -> None:
        self._said[turn.thread] = [*self.prompt(turn), *answer]


def vocabulary_of(config: Mapping[str, object]) -> int:
    """The number of tokens of a model by its ``config.json``. Raises ValueError without one."""
    text = config.get("text_config")
    for part in (config, text if isinstance(text, Mapping) else {}):
        if isinstance(size := part.get("vocab_size"), int):
            return size
    raise ValueError("--model: its config.json has no vocab_size")
