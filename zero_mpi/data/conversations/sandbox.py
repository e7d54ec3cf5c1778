"""Program that renders a chat template in a separate process, under limits that the system enforces.

A template comes with a model and is untrusted code. Jinja2's sandbox keeps it from Python's internals, but
lets it loop forever or double a text without limit, even inside a filter or a comparison, where our code does
not run. So the system ends this process once a rendering has used its CPU time, and refuses to give it memory
beyond a limit. A conversation must give the same text whenever and wherever it is read: there is no `random`,
and `strftime_now` returns a given day.

`chat_template` starts this file as a script. The script imports nothing from zero_mpi, so it starts quickly.
It reads `marshal` values, each preceded by its length: first the template (`source`, `day`), then the
variables of each rendering, with the numbers of the messages (`prompts`) before which a generation prompt is
rendered too. A rendering may use `seconds` of CPU time; the reply tells how many seconds are `left`.
"""

import json
import marshal
import resource
import signal
import sys
from contextlib import suppress
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import Template, nodes
from jinja2.exceptions import TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment

MEMORY = 256 << 20  # memory limit of this process in bytes; it uses 20 MiB when it starts
LETTERS, GROWTH = 1 << 20, 2  # maximum characters of a text: LETTERS, plus GROWTH per byte of its variables
IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)  # meant for the rank


class Marks(Extension):
    """Extension `{% generation %} ... {% endgeneration %}`, which marks the assistant's text in templates."""

    tags = {"generation"}  # noqa: RUF012 (Jinja's own way)

    def parse(self, parser: Parser) -> nodes.Node:
        """Parse the block as a call, so that the position where its text begins is known."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

    def _mark(self, caller: Macro) -> str:
        environment: Any = self.environment
        text = caller()
        environment.marked.append((environment.length, environment.length + len(text)))
        return text


class Sandbox(ImmutableSandboxedEnvironment):
    """Environment of chat templates, as Transformers sets it up.

    length    number of characters rendered so far
    marked    (start, stop) of the text of each `generation` block
    begins    where the text of each message begins, as the last loop over the messages shows it
    """

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[Marks, loopcontrols])
        del self.filters["random"], self.globals["lipsum"]
        self.filters["tojson"] = lambda value, ensure_ascii=False, **options: json.dumps(
            value, ensure_ascii=ensure_ascii, **options
        )  # as in Transformers: no HTML escaping
        self.globals |= {"raise_exception": refuse}

    def compiled(self, source: str) -> Template:
        """Return the template, in which loops with one variable call `begin` with it in each iteration."""
        tree = self.parse(source)
        for loop in tree.find_all(nodes.For):
            if isinstance(loop.target, nodes.Name):
                variable = nodes.Name(loop.target.name, "load")
                call = nodes.Call(nodes.EnvironmentAttribute("begin"), [variable], [], None, None)
                loop.body.insert(0, nodes.ExprStmt(call).set_lineno(loop.lineno))
        return self.from_string(tree)

    def begin(self, variable: object) -> None:
        """Record where the text of a message begins, if `variable` is a message."""
        if id(variable) in self._places:
            self.begins[self._places[id(variable)]] = self.length

    def render(self, template: Template, variables: dict[str, Any], most: int) -> bytes:
        """Return the text of a template. Raise an error if it has more than `most` characters."""
        self._places = {id(message): place for place, message in enumerate(variables["messages"])}
        self.length, self.marked = 0, list[tuple[int, int]]()
        self.begins: list[int | None] = [None] * len(variables["messages"])
        parts = list[str]()
        for part in template.generate(**variables):
            parts.append(part)
            self.length += len(part)
            if self.length > most:
                raise TemplateError(f"the text has more than {most} characters, which is the limit")
        return "".join(parts).encode()

    def answer(self, template: Template, request: dict[str, Any], most: int) -> dict[str, Any]:
        """Return the text, positions in it, and the text before each of `prompts` (None if it is refused)."""
        prompts, before = request.pop("prompts"), list[bytes | None]()
        reply = {"text": self.render(template, request, most), "marked": self.marked, "begins": self.begins}
        for place in prompts:
            part = request | {"messages": request["messages"][:place], "add_generation_prompt": True}
            try:
                before.append(self.render(template, part, most))
            except Exception:  # the template may refuse a conversation that ends here
                before.append(None)
        return reply | {"before": before}


def refuse(message: object) -> NoReturn:
    raise TemplateError(str(message))


def error_text(error: Exception) -> str:
    """Return a description of an error in a template."""
    name = type(error).__name__
    return {
        "MemoryError": f"it takes more than {MEMORY >> 20} MiB of memory",
        "RecursionError": "its recursion is too deep",
        "TemplateError": str(error),
        "UnicodeEncodeError": "the text has lone surrogates, which UTF-8 cannot encode",
    }.get(name, f"{name}: {error}")[:1000]


def main() -> None:
    """Answer requests until the input ends. A request that uses up its CPU time ends the process."""
    with suppress(ValueError):  # a lower limit is set already
        resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for number in IGNORED:
        signal.signal(number, signal.SIG_IGN)
    sandbox, template = Sandbox(), Template("")
    while size := int.from_bytes(sys.stdin.buffer.read(8), "little"):
        request = marshal.loads(sys.stdin.buffer.read(size))
        signal.setitimer(signal.ITIMER_PROF, max(1e-6, request.pop("seconds")))  # SIGPROF ends the process
        try:
            if "source" in request:
                sandbox.globals["strftime_now"] = datetime.fromisoformat(request["day"]).strftime
                template, reply = sandbox.compiled(request["source"]), {}
            else:
                reply = sandbox.answer(template, request, LETTERS + GROWTH * size)
        except Exception as error:  # untrusted code may raise anything
            reply = {"error": error_text(error)}
        seconds, _ = signal.setitimer(signal.ITIMER_PROF, 0)
        answer = marshal.dumps(reply | {"left": seconds})
        sys.stdout.buffer.write(len(answer).to_bytes(8, "little") + answer)
        sys.stdout.flush()


if __name__ == "__main__":
    main()
