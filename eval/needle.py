"""`suite.needle`: RULER's single needle in a haystack (S-NIAH 1 to 3), fitted to lengths in the model's
tokens.

A long text (the haystack) holds one sentence (the needle) that gives a value for a key. The answer that the
model generates is right if it contains the value, upper and lower case alike. Facts and wording: RULER (arXiv
2404.06654), section 3 and its appendix on tasks.

lm-eval's `ruler` tasks are not used, because they load the tokenizer with `trust_remote_code=True`, download
`punkt_tab` and Paul Graham's essays when they are imported or built, and know one prompt, which a base model
of a few billion tokens does not understand. Differences from them:

- Essays are the user's documents, or the reference pages that Python has for its `help`.
- Each sample begins at a random sentence, not at the first essay. All prompts get the same samples.
- The needle follows the sentence end that is nearest to the depth. Depths are set, not drawn.
"""

import hashlib
import random
import re
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from pydoc_data.topics import topics

import numpy as np
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from fla_train.data.files import describe_files, find_files
from fla_train.data.tokenizers import encode
from fla_train.eval.config import NeedleConfig
from fla_train.eval.documents import file_texts
from fla_train.eval.intervals import mean, proportion_interval
from fla_train.eval.memory import in_halves
from fla_train.eval.result import Measurements, Score
from fla_train.eval.result_cache import EvalJob
from fla_train.eval.session import Session
from fla_train.hub.generate import continue_tokens

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
NEEDLE = "One of the special magic {kind}s for {key} is: {value}."
PROMPTS = {
    "ruler": "A special magic {kind} is hidden within the following text. Make sure to memorize it. I will "
    "quiz you about the {kind} afterwards.\n{text}\nWhat is the special magic {kind} for {key} mentioned "
    "in the provided text? The special magic {kind} for {key} mentioned in the provided text is",
    "continuation": "{text}\n" + NEEDLE.partition(" {value}")[0],
}
KINDS = {"niah_single_1": "number", "niah_single_2": "number", "niah_single_3": "uuid"}  # kinds of values
ESSAY_CHARACTERS = 4_000_000  # limit on the user's texts: about a million tokens
SENTENCE_END = re.compile(r"[.!?][\"')\]]*$")
ADJECTIVES = (
    "bold brave calm clever crisp eager fancy gentle happy honest jolly lively lucky noble quiet swift"
).split()
NOUNS = (
    "anchor badge candle eagle forest garden hammer island kettle lantern meadow ocean pebble ribbon valley"
).split()


@dataclass(frozen=True)
class Sample:
    """A prompt, its tokens with the prefix of a document, and the value that an answer must contain."""

    prompt: str
    tokens: tuple[int, ...]
    value: str


@dataclass(frozen=True)
class Haystack:
    """A text without end: words of essays, or lines of noise, over and over.

    Attributes:
        units: words, or one line.
        joint: what separates two of them.
        ends: [units] bool, after which of them a needle may stand.
        cost: about how many tokens a unit has.
    """

    units: Sequence[str]
    joint: str
    ends: np.ndarray
    cost: float

    @classmethod
    def of(cls, units: Sequence[str], joint: str, tokenizer: PreTrainedTokenizerBase) -> "Haystack":
        """Return the haystack of words or lines; a needle may follow the end of a sentence."""
        ends = np.array([bool(SENTENCE_END.search(unit)) for unit in units])
        beginning = (units * 2)[:50_000]
        return cls(units, joint, ends, len(encode(tokenizer, [joint.join(beginning)])[0]) / len(beginning))

    def text(self, start: int, count: int, needle: str, depth: float) -> str:
        """Return `count` units from `start` on, with the needle at the sentence end nearest to `depth`."""
        chosen = (start + np.arange(count)) % len(self.units)
        places = np.unique([0, *(np.flatnonzero(self.ends[chosen]) + 1), count])
        place = places[np.abs(places - depth / 100 * count).argmin()]
        units = [self.units[i] for i in chosen]
        return self.joint.join([*units[:place], needle, *units[place:]])


def essays(path: str | None, text_column: str, tokenizer: PreTrainedTokenizerBase) -> Haystack:
    """Return the haystack of the documents in `path`, or of Python's reference pages.

    Raises:
        ValueError: the documents are missing, unreadable or empty.
    """
    words, characters = [], 0
    for text in file_texts(path, text_column, "suite.needle.essays") if path else topics.values():
        words += text.split()
        characters += len(text)
        if characters >= ESSAY_CHARACTERS:
            break
    if not words:
        raise ValueError(f"suite.needle.essays={path}: the documents are empty")
    return Haystack.of(words, " ", tokenizer)


def make_sample(
    config: NeedleConfig,
    task: str,
    prompt: str,
    length: int,
    number: int,
    haystack: Haystack,
    tokenizer: PreTrainedTokenizerBase,
    prefix: Sequence[int] = (),
) -> Sample:
    """Return sample `number`, a function of the arguments alone.

    Prompt and answer have at most `length` tokens together, and about as many as fit. Samples alternate
    between `config.depths`.

    Args:
        config: depths, seed and tokens of the answer.
        task: key of `KINDS`.
        prompt: key of `PROMPTS`.
        length: tokens of prompt and answer.
        number: of the sample, from 0.
        haystack: text to hide the needle in.
        tokenizer: of the model.
        prefix: tokens before the prompt.

    Raises:
        ValueError: `length` leaves no room for a haystack.
    """
    kind, budget = KINDS[task], length - config.answer_tokens - len(prefix)
    draw = random.Random(f"{config.seed} {task} {length} {number}")
    key = f"{draw.choice(ADJECTIVES)}-{draw.choice(NOUNS)}"
    value = str(draw.randrange(10**6, 10**7))
    if kind == "uuid":
        value = str(uuid.UUID(int=draw.getrandbits(128), version=4))
    starts = np.flatnonzero(np.roll(haystack.ends, 1))  # units that begin a sentence
    start = int(draw.choice(starts)) if len(starts) else 0
    depth = config.depths[number % len(config.depths)]
    needle = NEEDLE.format(kind=kind, key=key, value=value)

    def write(count: int) -> tuple[str, list[int]]:
        text = PROMPTS[prompt].format(kind=kind, key=key, text=haystack.text(start, count, needle, depth))
        return text, encode(tokenizer, [text])[0]

    frame = len(write(0)[1])
    if frame > budget:
        raise ValueError(f"suite.needle.lengths: {length} tokens have no room for {task} and its answer")
    # Guess the number of units from their mean cost, correct it by the tokens of that text, then shrink.
    count = int((budget - frame) / haystack.cost)
    text, tokens = write(count)
    count = int(count * (budget - frame) / max(len(tokens) - frame, 1))
    text, tokens = write(count)
    while len(tokens) > budget:
        count = max(count - int((len(tokens) - budget) / haystack.cost) - 1, 0)
        text, tokens = write(count)
    return Sample(text, (*prefix, *tokens), value)


def needle_jobs(session: Session, config: NeedleConfig) -> Iterator[EvalJob]:
    """Yield a job for each of `config.tasks`, `config.prompts` and `config.lengths`.

    Lengths beyond a model's table of positions are left out.

    Raises:
        ValueError: all lengths are beyond that table, or the essays cannot be read.
    """
    limit, tokenizer = session.position_limit, session.tokenizer
    lengths = [length for length in sorted(config.lengths) if limit is None or length <= limit]
    if not lengths:
        raise ValueError(f"the model has positions for {limit:,} tokens only: lower suite.needle.lengths")
    of_jobs = ("tasks", "prompts", "lengths", "batch_size")
    settings = {name: value for name, value in asdict(config).items() if name not in of_jobs}
    noise, texts, files = Haystack.of([NOISE], "\n", tokenizer), None, None
    if {*config.tasks} - {"niah_single_1"}:
        texts = essays(config.essays, config.text_column, tokenizer)
        files = describe_files(find_files(config.essays)) if config.essays else None
    for task, prompt, length in product(config.tasks, config.prompts, lengths):
        haystack, read = (noise, None) if task == "niah_single_1" else (texts, files)
        work = partial(_measure, session, config, task, prompt, length, haystack)
        yield EvalJob("needle", f"{task}/{prompt}/{length}", settings | {"files": read}, work)


def _measure(
    session: Session, config: NeedleConfig, task: str, prompt: str, length: int, haystack: Haystack
) -> Measurements:
    model, tokenizer, ranks = session.model, session.tokenizer, session.ranks
    samples = [
        make_sample(config, task, prompt, length, number, haystack, tokenizer, session.prefix)
        for number in range(ranks.rank, config.samples, ranks.world)
    ]

    def generate(batch: Sequence[Sample]) -> list[list[int]]:
        rows = [sample.tokens for sample in batch]
        return continue_tokens(model, tokenizer, rows, max_new_tokens=config.answer_tokens)

    outcomes = []
    starts = range(0, len(samples), config.batch_size)
    for start in tqdm(starts, desc=f"{task}, {prompt}, {length:,} tokens", disable=not session.progress):
        batch = samples[start : start + config.batch_size]
        remedy = "the GPU's memory is too small for a prompt: lower suite.needle.lengths"
        for sample, answer in zip(batch, in_halves(generate, batch, remedy), strict=True):
            text = tokenizer.decode(answer, skip_special_tokens=True)
            digest = hashlib.sha256(f"{sample.prompt}\0{sample.value}".encode()).hexdigest()
            outcomes.append((int(sample.value.lower() in text.lower()), digest))

    gathered = ranks.gather(outcomes)  # back into the order of the samples, of which rank 0 has the most
    outcomes = [of_rank[i] for i in range(len(gathered[0])) for of_rank in gathered if i < len(of_rank)]
    correct = [right for right, _ in outcomes]
    low, high = proportion_interval(sum(correct), len(correct))
    numbers = mean(np.array(correct), np.ones(len(correct)))._replace(low=low, high=high)
    score = Score(
        "needle",
        f"{task}/{prompt}",
        "accuracy",
        length=length,
        **numbers._asdict(),
        documents=len(correct),
        higher_is_better=True,
        fingerprint=hashlib.sha256("".join(digest for _, digest in outcomes).encode()).hexdigest(),
        by_document=correct,
    )
    return Measurements([score])
