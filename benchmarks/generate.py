"""Times generation in tokens per second, compared with llama.cpp on the same number of threads.

    python benchmarks/generate.py MODEL.gguf --threads 2

Both programs take turns to continue the same prompt by the same number of tokens; the prompt is not timed.
`ratio` is the ratio of medians, above 1 if ours is faster. llama.cpp comes from the package xllamacpp.
"""

import statistics
import sys
import time
from argparse import ArgumentDefaultsHelpFormatter

import xllamacpp

from zero_mpi import ops
from zero_mpi.cli.parser import Parser
from zero_mpi.train.text_model import TextModel

PROMPT = list(range(100, 116))


def make_parser() -> Parser:
    """Return the parser of the command line."""
    parser = Parser(
        prog="python benchmarks/generate.py",
        description="Time generation and compare it with llama.cpp.",
        formatter_class=ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("model", help="GGUF file")
    parser.add_argument("--threads", type=int, default=2, help="threads of each program")
    parser.add_argument("--tokens", type=int, default=48, help="number of tokens to generate in a round")
    parser.add_argument("--rounds", type=int, default=8, help="rounds, in which each program runs once")
    return parser


def main() -> None:
    """Time both programs, which take turns. Print a line for each program, and the ratio."""
    options = make_parser().parse_args(sys.argv[1:])
    ops.use_threads(options.threads)
    model, params = TextModel(options.model), xllamacpp.CommonParams()
    params.model.path, params.n_ctx, params.cpuparams.n_threads = options.model, 512, options.threads
    params.warmup, params.verbosity = False, -1
    server = xllamacpp.Server(params)

    def ours() -> float:
        model.reset()
        tokens = model.generate(PROMPT, options.tokens + 1, temperature=0)
        next(tokens)
        begun = time.perf_counter()
        return sum(1 for _ in tokens) / (time.perf_counter() - begun)

    def theirs() -> float:
        request = {"prompt": PROMPT, "n_predict": options.tokens, "temperature": 0, "ignore_eos": True}
        found = server.handle_completions(request | {"cache_prompt": False})
        return float(found["timings"]["predicted_per_second"])

    rates: dict[str, list[float]] = {"zero_mpi": [], "llama.cpp": []}
    for _ in range(options.rounds + 1):  # the first round only warms up
        for rate, run in zip(rates.values(), (ours, theirs), strict=True):
            rate.append(run())
    medians = [statistics.median(each[1:]) for each in rates.values()]
    for name, median in zip(rates, medians, strict=True):
        print(f"{name:10} {median:7.1f} tokens per second")
    print(f"ratio {medians[0] / medians[1]:.2f}")


if __name__ == "__main__":
    main()
