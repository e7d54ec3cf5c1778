"""Generation by llama.cpp, for `--engine llamacpp`: the package xllamacpp runs it in this process."""

from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from typing import Any

import numpy as np

from zero_mpi.checkpoint.gguf.reader import GGUFFile
from zero_mpi.checkpoint.weights import open_weights
from zero_mpi.config.inputs import read_model
from zero_mpi.device.types import Array
from zero_mpi.errors import UsageError
from zero_mpi.ops import threads


class LlamaCpp:
    """Model of a GGUF file that llama.cpp computes. Raises UsageError without the package or the file."""

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
        self._server = xllamacpp.Server(params)

    def answer(
        self,
        prompt: Sequence[int] | Array,
        tokens: int,
        draw: Mapping[str, Any],
        say: Callable[[bytes], object],
    ) -> tuple[bytes, int, str]:
        """Return a continuation of ids, its tokens, and why it ended (stop, length); `say` gets pieces."""
        pieces, last = list[bytes](), dict[str, Any]()

        def hear(chunk: dict[str, Any]) -> bool:
            last.update(chunk)
            if "choices" in chunk:
                pieces.append(chunk["choices"][0]["text"].encode())
                say(pieces[-1])
            return False

        request = {"prompt": np.asarray(prompt).tolist(), "n_predict": tokens, "stream": True, **draw}
        self._server.handle_completions(request, hear)
        if "usage" not in last:
            raise UsageError(f"--engine llamacpp: {last.get('message', last)}")
        return b"".join(pieces), last["usage"]["completion_tokens"], last["choices"][0]["finish_reason"]
