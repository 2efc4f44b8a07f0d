"""Prompts of RULER's single needle in a haystack (S-NIAH 1 to 3), fitted to a length in the model's tokens.

A text (the haystack) holds one sentence (the needle) that gives a value for a key; the prompt asks for it.
Facts and wording: RULER (arXiv 2404.06654), section 3 and its appendix on tasks. What differs is said at
`load_haystack` and `make_samples`.
"""

import random
import re
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from transformers import PreTrainedTokenizerBase

from fla_train.data.tokenizers import encode
from fla_train.eval.documents import file_texts

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
NEEDLE = "One of the special magic {kind}s for {key} is: {value}."
ASK = (
    "A special magic {kind} is hidden within the following text. Make sure to memorize it. I will quiz you "
    "about the {kind} afterwards.\n{text}\nWhat is the special magic {kind} for {key} mentioned in the "
    "provided text?"
)
PROMPTS = {
    "ruler": ASK + " The special magic {kind} for {key} mentioned in the provided text is",
    "question": ASK,
    "continuation": "{text}\n" + NEEDLE.partition(" {value}")[0],
}
ESSAY_CHARACTERS = 4_000_000  # of the user's texts: about a million tokens
SENTENCE_END = re.compile(r"[.!?][\"')\]]*$")
ADJECTIVES = (
    "able bold brave brief broad calm clean clever cold crisp curious dark deep dry eager early empty "
    "fair famous fast fierce fine fresh gentle giant grand happy heavy honest hungry icy jolly keen kind "
    "large lazy light lively lone loud lucky mild modest narrow neat noble odd old pale plain polite "
    "proud quick quiet rare rough round rusty secret sharp shy silent simple sleepy slow small smooth "
    "soft sour steep stiff strange strong sunny sweet swift tall tame tidy tiny tough vast warm wary "
    "weary wide wild wise witty young"
).split()
NOUNS = (
    "anchor apple arrow badge barrel basket beacon bell bench bird blanket bottle bridge broom bucket "
    "button cabin camel candle canoe carpet castle cherry clock cloud coat comet copper cradle curtain "
    "daisy desk drum eagle engine falcon feather fiddle flute forest fox garden ghost glove grape hammer "
    "harbor hat hedge honey island jacket jar kettle kite ladder lake lamp lantern lemon lion locket "
    "magnet maple marble meadow mirror moon needle nest oak ocean onion otter owl paddle parrot pearl "
    "pebble pepper piano pillow planet pocket pony pumpkin quilt rabbit ribbon river robin rocket rope "
    "saddle scarf shadow shell ship spoon squirrel star statue stove teapot temple thimble tiger tower "
    "trumpet tulip turtle valley violin wagon walnut whale"
).split()


@dataclass(frozen=True)
class NeedleTask:
    """A task of RULER: `noise` or essays around the needle, and what its value is."""

    noise: bool
    kind: str  # number (of 7 digits) or uuid


TASKS = {  # by RULER's names
    "niah_single_1": NeedleTask(noise=True, kind="number"),
    "niah_single_2": NeedleTask(noise=False, kind="number"),
    "niah_single_3": NeedleTask(noise=False, kind="uuid"),
}


@dataclass(frozen=True)
class Sample:
    """A prompt and the value that an answer must contain.

    Attributes:
        prompt: text.
        tokens: of the prompt, with what stands before a document.
        value: what the needle gives.
        depth: share of the haystack before the needle that was asked for, in percent.
    """

    prompt: str
    tokens: tuple[int, ...]
    value: str
    depth: float


@dataclass(frozen=True)
class Haystack:
    """A text without end: the units of a list over and over.

    Attributes:
        units: words of essays, or lines of noise.
        joint: what stands between two of them.
        ends: [U] bool, after which ones a needle may stand: words that end a sentence, and every line.
        costs: [U] float, about how many tokens each takes.
    """

    units: Sequence[str]
    joint: str
    ends: np.ndarray
    costs: np.ndarray

    @classmethod
    def of(cls, units: Sequence[str], joint: str, tokenizer: PreTrainedTokenizerBase) -> "Haystack":
        """Costs are those of single units, scaled to what a text of up to 50,000 of them has."""
        costs = np.array([len(ids) for ids in encode(tokenizer, [joint + unit for unit in units])], float)
        together = len(encode(tokenizer, [joint.join(units[:50_000])])[0])
        ends = np.array([joint == "\n" or bool(SENTENCE_END.search(unit)) for unit in units])
        return cls(units, joint, ends, np.maximum(costs * together / costs[:50_000].sum(), 1e-3))

    def holding(self, start: int, room: float) -> int:
        """How many units from the `start`-th on take about `room` tokens."""
        rounds, left = divmod(max(room, 0.0), float(self.costs.sum()))
        sums = np.roll(self.costs, -start).cumsum()
        return int(rounds) * len(self.units) + int(np.searchsorted(sums, left, side="right"))

    def text(self, start: int, count: int, needle: str, depth: float) -> str:
        """`count` units from the `start`-th on, with `needle` at the sentence end nearest to `depth` percent.

        The beginning and the end of the text count as sentence ends.
        """
        chosen = (start + np.arange(count)) % len(self.units)
        places = np.unique([0, *(np.flatnonzero(self.ends[chosen]) + 1), count])
        place = places[np.abs(places - depth / 100 * count).argmin()]
        units = [self.units[i] for i in chosen]
        return self.joint.join([*units[:place], needle, *units[place:]])


def load_haystack(
    task: NeedleTask, essays: str | None, text_column: str, tokenizer: PreTrainedTokenizerBase
) -> Haystack:
    """The text around the needle.

    RULER's essays are Paul Graham's; here they are the user's documents, or else the reference pages that
    Python brings along for its `help`, which need no network.

    Args:
        essays: file, folder or glob of documents; None: Python's own pages.
        text_column: their column of the text.

    Raises:
        ValueError: the essays are missing, unreadable or empty.
    """
    if task.noise:
        return Haystack.of([NOISE], "\n", tokenizer)
    words, characters = [], 0
    for text in file_texts(essays, text_column, "suite.needle.essays") if essays else _python_pages():
        words += text.split()
        characters += len(text)
        if characters >= ESSAY_CHARACTERS:
            break
    if not words:
        raise ValueError(f"suite.needle.essays={essays}: the documents are empty")
    return Haystack.of(words, " ", tokenizer)


def _python_pages() -> Iterator[str]:
    from pydoc_data.topics import topics  # half a megabyte

    yield from topics.values()


def make_samples(
    name: str,
    haystack: Haystack,
    tokenizer: PreTrainedTokenizerBase,
    *,
    prompt: str,
    length: int,
    answer_tokens: int,
    numbers: Sequence[int],
    depths: Sequence[float],
    seed: int,
    prefix: Sequence[int] = (),
) -> list[Sample]:
    """The samples of these `numbers`; each is a function of the other arguments and its own number alone.

    As in RULER, prompt and answer together have at most `length` tokens. RULER's haystacks all begin with the
    first essay; here each sample begins at a sentence of its own, and all prompts get the same ones.

    Args:
        name: key of `TASKS`.
        haystack: of the task.
        tokenizer: of the model.
        prompt: key of `PROMPTS`.
        length: tokens.
        answer_tokens: of these, kept for the answer.
        numbers: sample i has the depth `depths[i % len(depths)]`.
        depths: percent.
        seed: of keys, values and beginnings.
        prefix: the token before a document, if any.

    Raises:
        ValueError: `length` leaves no room for a haystack.
    """
    kind, budget = TASKS[name].kind, length - answer_tokens - len(prefix)
    starts = np.flatnonzero(np.roll(haystack.ends, 1))  # units that begin a sentence
    drafts = []
    for number in numbers:
        draw = random.Random(f"{seed} {name} {length} {number}")
        key = f"{draw.choice(ADJECTIVES)}-{draw.choice(NOUNS)}"
        value = str(draw.randrange(10**6, 10**7))
        if kind == "uuid":
            value = str(uuid.UUID(int=draw.getrandbits(128), version=4))
        start = int(draw.choice(starts)) if len(starts) else 0
        drafts.append((key, value, start, depths[number % len(depths)]))

    def written(draft: tuple[str, str, int, float], count: int) -> str:
        key, value, start, depth = draft
        needle = NEEDLE.format(kind=kind, key=key, value=value)
        text = haystack.text(start, count, needle, depth)
        return PROMPTS[prompt].format(kind=kind, key=key, text=text)

    frames = [len(ids) for ids in encode(tokenizer, [written(draft, 0) for draft in drafts])]
    if frames and max(frames) >= budget:
        # One step of 64 more than needed here: other lengths have other, perhaps longer keys.
        least = 64 * ((length - budget + max(frames)) // 64 + 2)
        raise ValueError(
            f"a prompt of {name} with room for an answer needs more than {length} tokens: raise "
            f"suite.needle.lengths to at least {least}, or lower suite.needle.answer_tokens"
        )
    counts = [haystack.holding(d[2], budget - n) for d, n in zip(drafts, frames, strict=True)]
    texts = [written(draft, count) for draft, count in zip(drafts, counts, strict=True)]
    rows = encode(tokenizer, texts)
    cost = float(haystack.costs.mean())
    while over := [i for i, row in enumerate(rows) if len(row) > budget]:
        for i in over:
            counts[i] = max(counts[i] - int((len(rows[i]) - budget) / cost) - 1, 0)
            texts[i] = written(drafts[i], counts[i])
        for i, row in zip(over, encode(tokenizer, [texts[i] for i in over]), strict=True):
            rows[i] = row
    return [
        Sample(text, (*prefix, *row), draft[1], draft[3])
        for text, row, draft in zip(texts, rows, drafts, strict=True)
    ]
