"""Where chat templates run: Jinja2's sandbox, with what it has no bound for bounded, and without chance.

A template comes with a model and is a stranger's program. The sandbox keeps it from the interpreter, but lets
it loop over loops and double a text as often as it likes. So time is looked at in every turn of a loop and at
every call and filter, powers and repetitions are looked at before they are made, and memory is bounded by
the system while a template runs. The same conversation must be the same text whenever and wherever it is
read: there is no `random`, and `strftime_now` tells of one day.
"""

from __future__ import annotations

import functools
import json
import resource
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import nodes
from jinja2.exceptions import TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment

SECONDS = 2.0  # of one rendering, of this thread's own work; templates of models take milliseconds
MEMORY = 192 << 20  # bytes that a rendering may take beside what is there
MOST_TEXT = 1 << 26  # letters, or items, that a repetition may make
MOST_BITS = 1 << 12  # of a whole number that is made by a product or a power
TODAY = datetime(2024, 7, 26)  # what Llama 3's template takes for the day where there is no clock
PAGES = Path("/proc/self/statm")


class Endless(Exception):
    """A template took more time than `SECONDS`."""


class Marks(Extension):
    """`{% generation %} ... {% endgeneration %}`: what a template's author says is the assistant's."""

    tags = {"generation"}  # noqa: RUF012 (Jinja's own way)

    def parse(self, parser: Parser) -> nodes.Node:
        """The block as a call, so that it is known where its text begins."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

    def _mark(self, caller: Macro) -> str:
        environment: Any = self.environment
        text = caller()
        environment.marked.append((environment.written, environment.written + len(text)))
        return text


class Sandbox(ImmutableSandboxedEnvironment):
    """The environment of chat templates, as Transformers sets it up.

    written   letters of a rendering so far; marked: from where to where its `generation` blocks go
    """

    intercepted_binops = frozenset(("*", "**"))

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[Marks, loopcontrols])
        self.until = 0.0
        self.written, self.marked = 0, list[tuple[int, int]]()
        self.filters = {name: self._watched(call) for name, call in self.filters.items() if name != "random"}
        self.filters["tojson"] = self._watched(as_json)
        self.globals.pop("lipsum")
        self.globals |= {"raise_exception": refuse, "strftime_now": TODAY.strftime}

    def watch(self, *_: object) -> str:
        """Raise Endless if the time of this rendering is up."""
        if time.thread_time() > self.until:
            raise Endless
        return ""

    def _watched(self, call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)  # with what Jinja notes on it
        def watched(*args: Any, **kwargs: Any) -> Any:
            self.watch()
            return call(*args, **kwargs)

        return watched

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Call what a template calls."""
        __self.watch()
        return super().call(__context, __obj, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """A product or a power that is not too large."""
        sizes = [abs(each).bit_length() if isinstance(each, int) else 0 for each in (left, right)]
        if operator == "**":
            too_large = isinstance(left, int) and isinstance(right, int) and sizes[0] * right > MOST_BITS
        elif isinstance(left, int) and isinstance(right, int):
            too_large = sum(sizes) > MOST_BITS
        else:
            text, times = (right, left) if isinstance(left, int) else (left, right)
            too_large = hasattr(text, "__len__") and isinstance(times, int) and len(text) * times > MOST_TEXT
        if too_large:
            raise OverflowError(f"the result of {operator} is too large")
        return super().call_binop(context, operator, left, right)

    def compiled(self, source: str) -> Any:
        """A template of which each turn of a loop and each macro asks for the time."""
        tree = self.parse(source)
        for loop in list(tree.find_all(nodes.For)):
            asks = nodes.Call(nodes.EnvironmentAttribute("watch"), [], [], None, None)
            loop.body.insert(0, nodes.ExprStmt(asks).set_lineno(loop.lineno))
        return self.from_string(tree)

    @contextmanager
    def bounded(self) -> Iterator[None]:
        """Bound the time and the memory of what a template does in the body."""
        self.until = time.thread_time() + SECONDS
        soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
        limits = [limit for limit in (soft, memory_limit()) if limit != resource.RLIM_INFINITY]
        resource.setrlimit(resource.RLIMIT_DATA, (min(limits, default=soft), hard))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))

    def parts(self, template: Any, variables: dict[str, Any]) -> Iterator[str]:
        """The text of a template, in parts."""
        self.written, self.marked = 0, []
        for part in template.generate(**variables):
            self.written += len(part)
            yield part


def refuse(message: object) -> NoReturn:
    """Raise the error of a template that wants no such conversation."""
    raise TemplateError(str(message))


def as_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: Any = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    """JSON as Transformers writes it: letters as they are, and nothing made safe for HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def memory_limit() -> int:
    """Bytes of data that this process may have while a template runs; no limit where nobody counts them."""
    try:
        pages = int(PAGES.read_bytes().split()[5])  # data and stack
    except (OSError, IndexError):  # no Linux
        return resource.RLIM_INFINITY
    return pages * resource.getpagesize() + MEMORY
