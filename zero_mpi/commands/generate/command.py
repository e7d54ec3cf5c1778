"""`zero-mpi generate MODEL.gguf --prompt "def "`: generates text with a model file, in one process.

Generated text goes to a file or pipe as its exact bytes. On a terminal, control characters are escaped.
Otherwise a model, or the author of its training text, could move the cursor, rename the window or worse.
"""

import argparse
import codecs
import contextlib
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from itertools import count, islice
from pathlib import Path
from typing import Any

import numpy as np

from zero_mpi import environment, ops
from zero_mpi.checkpoint.gguf.reader import GGUFFile
from zero_mpi.checkpoint.weights import open_merged, open_weights
from zero_mpi.cli.parser import Once, Parser
from zero_mpi.config.command_line import add_settings
from zero_mpi.config.inputs import read_model, template_inputs, tokenizer_of, with_template
from zero_mpi.config.settings import OF_TEMPLATES
from zero_mpi.data import Tokenizer
from zero_mpi.data.conversations.chat_template import ChatTemplate, template_of
from zero_mpi.data.tokenizers.byte import AUTO, bos_of, with_bos
from zero_mpi.device.types import Array
from zero_mpi.errors import UsageError, prefixed
from zero_mpi.files.foreign import readable
from zero_mpi.files.open import read_file
from zero_mpi.launch.world import World, run
from zero_mpi.ops import threads
from zero_mpi.telemetry import log
from zero_mpi.train.text_model import TextModel

DRAW = ("temperature", "top_k", "top_p", "min_p", "seed")
ENGINES = ("own", "llamacpp")
STOP, LENGTH = "stop", "length"  # reasons why an answer ended, with the names that most servers use


@dataclass(frozen=True)
class Reply:
    """An answer: its bytes, its number of tokens, and the reason why it ended: STOP or LENGTH."""

    text: bytes
    tokens: int
    finish_reason: str


@dataclass(frozen=True)
class Speaker:
    """A model with its tokenizer, and the flags that say how to draw the next token."""

    model: Any  # a TextModel, or the model of another engine
    tokenizer: Tokenizer
    options: argparse.Namespace

    @property
    def draw(self) -> dict[str, Any]:
        return {name: getattr(self.options, name) for name in DRAW}

    def answer(self, prompt: Sequence[int] | Array, say: Callable[[bytes], object]) -> Reply:
        """Return the continuation of a prompt's ids. Call `say` with each new part of its bytes."""
        parts = list[bytes]()
        for token in self.model.generate(prompt, self.options.tokens, **self.draw):
            if token in self.tokenizer.ends:
                return Reply(b"".join(parts), len(parts), STOP)
            parts.append(self.tokenizer.decode([token]))
            say(parts[-1])
        return Reply(b"".join(parts), len(parts), LENGTH)

    def answers(self, prompts: Sequence[Array]) -> list[Reply]:
        """Return the continuations of several prompts, computed together."""
        replies = list[Reply]()
        ends = self.tokenizer.ends
        for ids in self.model.generate_each(prompts, self.options.tokens, ends, **self.draw):
            stopped = bool(ids) and ids[-1] in ends
            text = b"".join(self.tokenizer.decode([token]) for token in ids[: len(ids) - stopped])
            replies.append(Reply(text, len(ids) - stopped, STOP if stopped else LENGTH))
        return replies


class LlamaCpp:
    """Model in a GGUF file, computed by llama.cpp. Raises UsageError without a GGUF file or llama.cpp."""

    def __init__(self, path: str) -> None:
        if find_spec("xllamacpp") is None:
            raise UsageError("--engine llamacpp: llama.cpp is not installed: pip install xllamacpp")
        import xllamacpp

        self.file = open_weights(path)
        if not isinstance(self.file, GGUFFile):
            raise UsageError(f"--engine llamacpp: {path}: expected a GGUF file")
        self.config = read_model(self.file)
        params = xllamacpp.CommonParams()
        params.model.path, params.n_ctx = str(self.file.path), self.config.context_length
        params.cpuparams.n_threads = threads.count()
        params.warmup, params.verbosity = False, -1
        self.server = xllamacpp.Server(params)


class LlamaCppSpeaker(Speaker):
    """Speaker whose model is a `LlamaCpp`."""

    def answer(self, prompt: Sequence[int] | Array, say: Callable[[bytes], object]) -> Reply:
        parts, last = list[bytes](), dict[str, Any]()

        def hear(chunk: dict[str, Any]) -> bool:
            last.update(chunk)
            if "choices" in chunk:
                parts.append(chunk["choices"][0]["text"].encode())
                say(parts[-1])
            return False

        request = {"prompt": np.asarray(prompt).tolist(), "n_predict": self.options.tokens, "stream": True}
        self.model.server.handle_completions(request | self.draw, hear)
        if "usage" not in last:
            raise UsageError(f"--engine llamacpp: {last.get('message', last)}")
        return Reply(b"".join(parts), last["usage"]["completion_tokens"], last["choices"][0]["finish_reason"])


@dataclass
class Chat:
    """A conversation so far, as messages with role and content. The message `system`, if any, comes first."""

    template: ChatTemplate
    tokenizer: Tokenizer
    system: str | None = None
    messages: list[dict[str, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.system is not None:
            self.messages.append({"role": "system", "content": self.system})

    def prompt_ids(self, text: str) -> Array:
        """Return the ids of the conversation plus a question. Raise UsageError if the template fails."""
        self.messages.append({"role": "user", "content": text})
        try:
            rendered = self.template.render(self.messages, generation_prompt=True)
        except ValueError as error:
            raise UsageError(f"--chat: {error}") from None
        return with_bos(self.tokenizer.encode(rendered.text, special=True), bos_of(self.tokenizer, AUTO))

    def answered(self, answer: Reply) -> None:
        self.messages.append({"role": "assistant", "content": answer.text.decode("utf-8", "replace")})


EXAMPLES = """\
Examples:

  zero-mpi generate runs/default/latest --prompt 'def ' --tokens 200
  zero-mpi generate MODEL.gguf --lora runs/adapter/latest --chat"""


def make_parser() -> Parser:
    """Return the parser of the command line."""
    description = "Generate text from a GGUF model, in one process."
    parser = Parser(prog="zero-mpi generate", description=description, epilog=EXAMPLES)
    add = parser.add_argument
    add("model", help="GGUF file, checkpoint folder, or Hugging Face folder")
    add("--lora", action=Once, metavar="FILE", help="adapter.gguf to apply to the model")
    add("--prompt", metavar="TEXT", help="text to continue or answer (default: 'def ')")
    add("--prompts", metavar="FILE", help="file with one prompt per line; -: standard input")
    add("--chat", action="store_true", help="answer prompts, using the model's chat template")
    add("--system", metavar="TEXT", help="system message of the conversation")
    add_settings(parser, dict.fromkeys(OF_TEMPLATES, ""))
    add("--json", action="store_true", help="print prompt and answer as JSON lines")
    batch = "number of prompts in --prompts to answer together (default: 1)"
    add("--batch", type=int, default=1, metavar="N", help=batch)
    engines = "engine that runs the model: own (zero_mpi), or llamacpp (package xllamacpp)"
    add("--engine", choices=ENGINES, default="own", help=engines)
    add("--tokens", type=int, default=200, help="maximum number of tokens to generate")
    temperature = "sampling temperature; 0: always the most likely token"
    add("--temperature", type=float, default=0.8, help=temperature)
    add("--top-k", type=int, default=40, help="sample from the N likeliest tokens; 0: no limit")
    add("--top-p", type=float, default=1.0, help="use only the most likely tokens with total probability X")
    min_p = "of these, use tokens with at least X times the highest probability"
    add("--min-p", type=float, default=0.0, help=min_p)
    add("--seed", type=int, default=0, help="random seed for sampling")
    return parser


def command(world: World, arguments: Sequence[str]) -> int:
    """Print prompts and continuations as soon as they are ready. Return the exit status."""
    options = make_parser().parse_args(arguments)
    check(options)
    log.install(world.rank, world.size).to_stderr = True  # stdout has only the answers
    ops.use_threads(None if environment.threads_were_set else environment.within_quota(environment.cores()))
    speaker = open_speaker(options)
    tokenizer = speaker.tokenizer
    template = template_of(tokenizer, template_inputs(options, tokenizer)) if options.chat else None
    with contextlib.suppress(log.ClosedPipe):
        print_answers(speaker, template)
    return 0


def print_answers(speaker: Speaker, template: ChatTemplate | None) -> None:
    """Print the answers to all prompts, computed in batches of --batch prompts.

    Each line of a --prompts file is a separate conversation; typed lines continue one conversation.
    """
    options, source, numbers = speaker.options, prompts(speaker.options), count()
    chat: Chat | None = None
    while batch := list(islice(source, max(1, options.batch))):
        ids = list[Array]()
        for prompt in batch:
            if template is None:
                ids.append(speaker.tokenizer.encode_prompt(prompt))
                continue
            if chat is None or options.prompts is not None:
                chat = Chat(template, speaker.tokenizer, options.system)
            ids.append(chat.prompt_ids(prompt))
        replies = speaker.answers(ids) if options.batch > 1 else [None]
        for arguments in zip(batch, ids, replies, numbers, strict=False):
            reply = print_answer(speaker, *arguments)
            if chat is not None:
                chat.answered(reply)


def print_answer(speaker: Speaker, prompt: str, ids: Array, reply: Reply | None, number: int) -> Reply:
    """Print an answer: `reply`, or computed here if that is None. An empty line separates texts."""
    if speaker.options.json:
        answer = reply or speaker.answer(ids, lambda piece: None)
        texts = {"prompt": prompt, "text": answer.text.decode("utf-8", "replace")}
        facts = {"tokens": answer.tokens, "finish_reason": answer.finish_reason}
        write_bytes(json.dumps(texts | facts).encode() + b"\n")
        return answer
    write = escaping(write_bytes) if sys.stdout.isatty() else write_bytes
    write_bytes(b"\n" if number else b"")
    if not speaker.options.chat:
        write(prompt.encode("utf-8", "surrogateescape"))
    if reply:
        write(reply.text)
    answer = reply or speaker.answer(ids, write)
    write(b"\n")
    return answer


def open_speaker(options: argparse.Namespace) -> Speaker:
    """Return the model that the flags name, run by the engine that they name."""
    is_own = options.engine == "own"
    model: Any = TextModel(open_merged(options.model, options.lora)) if is_own else LlamaCpp(options.model)
    kind = Speaker if is_own else LlamaCppSpeaker
    return kind(model, with_template(tokenizer_of(model.file, model.config), options.chat_template), options)


def check(options: argparse.Namespace) -> None:
    """Raise UsageError for the first flag that is out of range or does not fit other flags."""
    if options.prompt is not None and options.prompts is not None:
        raise UsageError("--prompt and --prompts: use one of them")
    for name in ("system", *OF_TEMPLATES):
        if getattr(options, name) is not None and not options.chat:
            raise UsageError(f"--{name.replace('_', '-')} needs a conversation: add --chat")
    if options.batch > 1 and (options.prompts is None or options.engine != "own"):
        raise UsageError(f"--batch {options.batch} needs --prompts, and --engine own")
    if options.engine != "own" and options.lora is not None:
        raise UsageError(f"--engine {options.engine}: --lora is not supported; export a merged model first")
    for name in ("tokens", "batch", *DRAW):
        value, flag = getattr(options, name), f"--{name.replace('_', '-')}"
        if not value >= 0:
            raise UsageError(f"{flag} {value}: expected at least 0")
        if name in ("top_p", "min_p") and value > 1:
            raise UsageError(f"{flag} {value}: expected at most 1")


def write_bytes(data: bytes) -> None:
    with log.writing(sys.stdout):
        sys.stdout.buffer.write(data)


def escaping(write: Callable[[bytes], object]) -> Callable[[bytes], None]:
    """Return a `write` for a terminal. It escapes control characters and prints only complete characters."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def show(data: bytes) -> None:
        write(readable(decoder.decode(data)).encode("utf-8", "backslashreplace"))

    return show


main = partial(run, "generate", command, alone=True)

STANDARD_INPUT = "-"
DEFAULT = "def "
MARK = b"> "  # shown before each line that a person types


def prompts(options: argparse.Namespace) -> Iterator[str]:
    """Yield the prompts that the flags give, in order. Raise UsageError for a file without prompts.

    With `--chat` but without --prompt and --prompts, each line typed on standard input is a prompt.
    """
    if options.prompts is None and not (options.chat and options.prompt is None):
        yield DEFAULT if options.prompt is None else options.prompt
        return
    has_line = False
    for line in typed() if options.prompts in (None, STANDARD_INPUT) else lines_of(Path(options.prompts)):
        if line.strip():
            has_line = True
            yield line
    if not has_line:
        source = "standard input" if options.prompts in (None, STANDARD_INPUT) else options.prompts
        raise UsageError(f"--prompts {source}: expected a prompt in each line, found no line")


def lines_of(path: Path) -> list[str]:
    with prefixed("--prompts"):
        text = read_file(path, expected="a file of prompts, one in each line")
    return [line.decode("utf-8", "surrogateescape").rstrip("\r") for line in text.split(b"\n")]


def typed() -> Iterator[str]:
    """Yield each line of standard input as soon as it is complete. On a terminal, show a mark before it."""
    while True:
        if sys.stdin.isatty() and sys.stdout.isatty():
            write_bytes(MARK)
        line = sys.stdin.buffer.readline()
        if not line:
            return
        yield line.decode("utf-8", "surrogateescape").rstrip("\r\n")
